"""The rules of the verdict: what each missing or contrary proof says and asks for, and that nothing passes without all of them."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_logs import HOSTS, Rank, lines_of, plus, run, text_of, warn, without

from training.transport.counters import Moved
from training.transport.evidence import RankEvidence, from_dict, gloo_rank, read_text
from training.transport.judge import table
from training.transport.preflight import Check, Preflight
from training.transport.verdict import Expectation, ExpectedBytes, Verdict, judge

A, B = HOSTS
EFA = Expectation("efa", hosts=2, ranks=8, nics_per_host=1)
GB = 10**9


def verdict_on(ranks: list[Rank] | str, expectation: Expectation = EFA, **more: object) -> Verdict:
    return judge(read_text(ranks if isinstance(ranks, str) else text_of(ranks)), expectation, **more)  # type: ignore[arg-type]


def rules(verdict: Verdict) -> set[str]:
    return {reason.rule for reason in verdict.reasons}


def test_a_whole_job_over_efa_passes_without_a_reason() -> None:
    verdict = verdict_on(run())
    assert (verdict.outcome, verdict.observed, verdict.reasons) == ("pass", "efa", ())
    assert verdict.line() == "transport pass: expected efa, observed efa (8 ranks on 2 hosts)"


PROOFS = {"provider": ("Selected provider",), "network": ("Using network",), "channel": ("via NET/",), "end of start-up": ("Connected all", "Init COMPLETE")}


@pytest.mark.parametrize("proof", PROOFS)
@given(who=st.integers(0, 7), hosts=st.sampled_from([HOSTS, ("a", "b", "c"), ("x", "y", "z", "w")]), nccl=st.sampled_from(["2.18", "2.22", "2.29"]))
@settings(max_examples=15, deadline=None)
def test_without_any_one_proof_of_any_one_rank_nothing_passes(proof: str, who: int, hosts: tuple[str, ...], nccl: str) -> None:
    whole = run(hosts, 2, nccl=nccl)
    expectation = Expectation("efa", hosts=len(hosts))
    assert verdict_on(whole, expectation).outcome == "pass"
    rank = whole[who % len(whole)]
    if proof == "channel":
        # Two ranks a host are both at its border; the proof is the host's.
        lesser = without(whole, *PROOFS[proof], who=rank.rank)
        lesser = without(lesser, *PROOFS[proof], who=rank.rank ^ 1)
    else:
        lesser = without(whole, *PROOFS[proof], who=rank.rank)
    verdict = verdict_on(lesser, expectation)
    assert verdict.outcome == "unproven", f"{rank.host} has no {proof}: {verdict.outcome}"
    assert any(rank.host in reason.where for reason in verdict.reasons), "the reason must name the host"


@given(data=st.data(), nccl=st.sampled_from(["2.18", "2.22", "2.29"]))
@settings(max_examples=200, deadline=None)
def test_of_any_lines_left_of_a_good_run_only_those_with_all_proofs_pass(data: st.DataObject, nccl: str) -> None:
    whole = lines_of(run(nccl=nccl, per_host=2))
    gone = data.draw(st.sets(st.integers(0, len(whole) - 1), max_size=6))
    left = [line for number, line in enumerate(whole) if number not in gone]

    def said(by: str, *words: str) -> bool:
        return any(line.startswith(by) and any(word in line for word in words) for line in left)

    processes = {line.split(":")[0] + ":" + line.split(":")[1] + ":" for line in whole}
    each = all(said(p, "Selected") and said(p, "Using network") and said(p, "nranks") and said(p, "Connected all", "Init COMPLETE") for p in processes)
    proven = each and all(said(host, "via NET/") for host in HOSTS)
    assert (verdict_on("\n".join(left), Expectation("efa", hosts=2)).outcome == "pass") == proven


@given(gone=st.sets(st.integers(0, 7), min_size=1))
@settings(max_examples=40, deadline=None)
def test_a_run_with_unseen_ranks_never_passes(gone: set[int]) -> None:
    seen = [r for r in run() if r.rank not in gone]
    for expectation in (EFA, Expectation("efa")):
        assert verdict_on(seen, expectation).outcome != "pass", f"ranks {gone} left nothing"


@given(
    ranks=st.sampled_from(["efa", "tcp", "mixed", "startup", "one-host", "tail"]),
    who=st.integers(0, 7),
    line=st.sampled_from(["Channel 01/0 : 3[3] -> 4[0] [send] via NET/Socket/0", "Using network Socket", "Assigned NET plugin Socket to comm"]),
)
@settings(max_examples=60, deadline=None)
def test_a_sign_of_sockets_never_makes_a_verdict_better(ranks: str, who: int, line: str) -> None:
    bases = {
        "efa": run(),
        "tcp": run(network="Socket"),
        "mixed": run()[:4] + run(network="Socket")[4:],
        "startup": run(channels=False, finished=False),
        "one-host": run((A,), 8),
        "tail": without(run(), "Using", "Selected", "Init"),
    }
    worse = {"pass": 0, "unproven": 1, "fail": 2}
    before, after = verdict_on(bases[ranks]), verdict_on(plus(bases[ranks], who, line))
    assert worse[after.outcome] >= worse[before.outcome]
    assert after.outcome == "fail"


def test_one_rank_on_sockets_fails_the_run_and_is_named() -> None:
    verdict = verdict_on(run()[:6] + run(network="Socket")[6:7] + run()[7:])
    assert (verdict.outcome, verdict.observed) == ("fail", "mixed")
    assert verdict.reasons[0].rule == "network"
    assert verdict.reasons[0].where == f"rank 6 on {B}"


@pytest.mark.parametrize(
    ("extra", "advice"),
    [
        ("NET/OFI No eligible providers were found", "vpc.amazonaws.com/efa"),
        ("NET/Plugin: Could not find: libnccl-net.so", "LD_LIBRARY_PATH"),
        ("NCCL_NET set by environment to Socket", "unset NCCL_NET"),
        ("NCCL_NET_PLUGIN set by environment to none", "unset NCCL_NET"),
        ("NCCL_NET set by environment to EFA", "NCCL_NET=EFA names no network"),
        ("NET/OFI Initializing aws-ofi-nccl 1.20.0", "WARN lines"),
    ],
)
def test_a_rank_on_sockets_is_told_the_likeliest_cause(extra: str, advice: str) -> None:
    verdict = verdict_on(plus(run(network="Socket"), 5, extra))
    told = [reason for reason in verdict.reasons if reason.rule == "network" and advice in reason.do]
    assert told, verdict.reasons
    assert B in told[0].where


def test_libfabrics_tcp_provider_fails_although_nccl_names_the_plugin() -> None:
    verdict = verdict_on(run(provider="tcp", nics=2))
    assert (verdict.outcome, rules(verdict)) == ("fail", {"provider"})
    assert "FI_PROVIDER=efa" in verdict.reasons[0].do


def test_another_fabric_fails_and_is_told_the_name_to_pin() -> None:
    verdict = verdict_on(run(network="IB", suffix="/GDRDMA"))
    assert (verdict.outcome, rules(verdict)) == ("fail", {"network"})
    assert "AWS Libfabric" in verdict.reasons[0].do


def test_a_second_communicator_that_never_came_up_leaves_the_run_unproven() -> None:
    hanging = "ncclCommInitRankConfig comm 0x99 rank 5 nranks 8 cudaDev 1 nvmlDev 1 busId 10 commId 0x51d07be2c4419aa3 - Init START"
    verdict = verdict_on(plus(run(), 5, hanging))
    assert (verdict.outcome, rules(verdict)) == ("unproven", {"start-up"})
    assert verdict.reasons[0].where == f"rank 5 on {B}"


def test_more_processes_than_ranks_are_not_one_run() -> None:
    assert rules(verdict_on(run(), Expectation("efa", hosts=2, ranks=4))) == {"one-run"}


def test_two_jobs_of_four_ranks_are_not_one_of_eight() -> None:
    jobs = run(per_host=2) + run(per_host=2, comm_id="0x2", first_pid=900)
    assert rules(verdict_on(jobs, Expectation("efa", hosts=2, ranks=8))) == {"one-run"}


def test_fewer_nics_than_the_pod_asked_for_fail() -> None:
    verdict = verdict_on(run(nics=1), Expectation("efa", 2, 8, nics_per_host=4))
    assert (verdict.outcome, rules(verdict)) == ("fail", {"nics"})
    assert "found 1 of 4" in verdict.reasons[0].saw


def test_gpudirect_is_demanded_only_where_the_expectation_says_so() -> None:
    assert verdict_on(run()).outcome == "pass", "a type without GPUDirect needs none"
    demanding = Expectation("efa", 2, 8, 1, gpudirect=True)
    assert rules(verdict_on(run(), demanding)) == {"gpudirect"}
    assert verdict_on(run(suffix="/GDRDMA"), demanding).outcome == "pass"


def test_one_host_cannot_prove_efa() -> None:
    verdict = verdict_on(run((A,), 8))
    assert (verdict.outcome, verdict.observed) == ("fail", "intra-host")
    assert "one host" in verdict.reasons[0].saw


def test_a_missing_host_is_unproven_not_failed() -> None:
    verdict = verdict_on(run()[:4])
    assert (verdict.outcome, verdict.observed) == ("unproven", "unknown")
    assert {"hosts", "ranks"} <= rules(verdict)


@pytest.mark.parametrize("earlier", ["efa", "tcp"])
def test_files_of_an_earlier_attempt_neither_pass_nor_hide(earlier: str) -> None:
    old = run(network="Socket" if earlier == "tcp" else "Libfabric", comm_id="0x01d", first_pid=300)
    verdict = verdict_on(old + run(), Expectation("efa", hosts=2))
    assert verdict.outcome == ("fail" if earlier == "tcp" else "unproven")
    assert "one-run" in rules(verdict)


def test_an_earlier_attempt_cannot_stand_in_for_ranks_that_are_missing_now() -> None:
    old, new = run(comm_id="0x01d", first_pid=300), run()
    verdict = verdict_on(old[4:] + new[:4])
    assert verdict.outcome != "pass", "four ranks of each attempt are not eight of one"


def test_a_security_group_without_a_rule_to_itself_is_named() -> None:
    log = text_of(run()) + warn(A, 703, "NET/OFI Request 0x1 (recv) completed with error: err: 113, flags: 1") + "\n"
    verdict = verdict_on(log)
    assert (verdict.outcome, verdict.observed) == ("fail", "unknown")
    assert "security group" in verdict.reasons[0].do


def test_a_rank_that_died_later_leaves_the_run_unproven() -> None:
    log = text_of(run()) + warn(A, 703, "socketProgress: Connection closed by remote peer birch-gpu-0<41000>") + "\n"
    verdict = verdict_on(log)
    assert (verdict.outcome, verdict.observed) == ("unproven", "efa")


def test_lines_that_ran_into_each_other_are_not_relied_on() -> None:
    whole = run()
    glued = whole[1].lines[-1] + whole[2].lines[0]
    assert rules(verdict_on(text_of(whole) + glued + "\n")) == {"garbled"}
    socket = whole[1].lines[-1] + whole[2].lines[0].split(" INFO ")[0] + " INFO Using network Socket"
    assert verdict_on(text_of(whole) + socket + "\n").outcome == "fail", "what speaks against EFA is kept"


def test_a_sharded_run_with_groups_inside_the_hosts_passes() -> None:
    """HSDP: one communicator inside each host and one across them for each device; none holds all ranks."""
    across, lines = run(), []
    for rank in across:
        head = rank.lines[0].split(" NCCL INFO")[0] + " NCCL INFO "
        pair, other, rest = rank.rank // 4, 1 - rank.rank // 4, "cudaDev 0 nvmlDev 0 busId 10"
        lines += [x for x in rank.lines if "Init" not in x and "Channel" not in x]
        lines.append(f"{head}[Rank {rank.device}] ncclCommInitRankConfig comm 0x1{rank.rank} rank {rank.device} nranks 4 {rest} commId 0xa{pair} - Init START")
        lines.append(f"{head}ncclCommInitRankConfig comm 0x2{rank.rank} rank {pair} nranks 2 {rest} commId 0xb{rank.device} - Init START")
        lines.append(f"{head}Channel 00/0 : {other}[{rank.device}] -> {pair}[{rank.device}] [receive] via NET/Libfabric/0")
    verdict = verdict_on("\n".join(lines))
    assert (verdict.outcome, verdict.reasons) == ("pass", ())


def test_tcp_can_be_demanded_and_proved_too() -> None:
    expectation = Expectation("tcp", 2, 8)
    assert verdict_on(run(network="Socket"), expectation).outcome == "pass"
    assert verdict_on(run(provider="tcp"), expectation).outcome == "pass"
    assert verdict_on(run(), expectation).outcome == "fail"
    assert verdict_on(run(network="Socket")[:4], expectation).outcome == "unproven"
    assert verdict_on(without(run(network="Socket"), "via NET"), expectation).outcome == "unproven"


def test_nothing_is_demanded_of_any_but_it_is_said_what_carried_the_run() -> None:
    for ranks, note in ((run(), "carried by EFA"), (run(network="Socket"), "carried by TCP"), (run((A,), 2), f"inside host {A} by SHM"), ([], "does not show")):
        verdict = verdict_on(ranks, Expectation("any"))
        assert (verdict.outcome, verdict.reasons) == ("not-required", ())
        assert note in verdict.notes[0]


@pytest.mark.parametrize(("hosts", "observed"), [((A, A), "intra-host"), ((A, B), "tcp")])
def test_gloo_is_told_apart_from_nccl_and_never_passes_for_efa(hosts: tuple[str, str], observed: str) -> None:
    ranks = [gloo_rank(host, 100 + rank, rank) for rank, host in enumerate(hosts)]
    demanded = judge(ranks, Expectation("efa", ranks=2))
    assert (demanded.outcome, demanded.observed) == ("fail", observed)
    assert "gloo" in demanded.reasons[0].saw
    free = judge(ranks, Expectation("any", ranks=2))
    assert (free.outcome, free.observed) == ("not-required", observed)
    assert "gloo" in free.notes[0]
    assert judge(ranks, Expectation("tcp", ranks=2)).outcome == ("pass" if observed == "tcp" else "fail")


def test_a_rank_that_left_nothing_is_named() -> None:
    evidence = read_text(text_of(run()[:7]))
    evidence.append(RankEvidence(host=B, pid=9, rank=7, cut=("no log file (No such file or directory)",)))
    verdict = judge(evidence, EFA)
    assert verdict.outcome == "unproven"
    assert any(r.rule == "evidence" and r.where == f"rank 7 on {B}" and "no log file" in r.saw for r in verdict.reasons)


def test_a_failed_check_before_the_start_fails_the_run() -> None:
    checks = [Preflight(host, (Check("device", host == A, "0 of 1 EFA devices", "request the device"),)) for host in HOSTS]
    verdict = verdict_on(run(), preflight=checks)
    assert (verdict.outcome, rules(verdict)) == ("fail", {"preflight-device"})
    assert verdict.reasons[0].where == f"host {B}"


# ---- bytes


def moved(efa: int | None, nic: int | None = 10**6) -> Moved:
    return Moved(
        {"rdmap0s6/1": (efa, efa)} if efa is not None else None,
        {"eth0": (nic, nic)} if nic is not None else None,
        "" if efa is not None else "no EFA counters in sysfs",
    )


@pytest.mark.parametrize(
    ("efa", "expected", "layer", "outcome"),
    [
        (100 * GB, 100 * GB, "pass", "pass"),
        (115 * GB, 100 * GB, "pass", "pass"),
        (60 * GB, 100 * GB, "fail", "fail"),
        (200 * GB, 100 * GB, "unproven", "unproven"),
        (0, 100 * GB, "fail", "fail"),
        (0, None, "fail", "fail"),
        (100 * GB, None, "unproven", "pass"),
        (None, 100 * GB, "unproven", "pass"),
    ],
)
def test_bytes_are_held_against_the_plan(efa: int | None, expected: int | None, layer: str, outcome: str) -> None:
    counters = {A: moved(100 * GB), B: moved(efa)} if expected is None or efa else {A: moved(expected), B: moved(efa)}
    verdict = verdict_on(run(), counters=counters, expected_bytes=ExpectedBytes(expected, 0.25) if expected else None)
    assert (verdict.bytes, verdict.outcome) == (layer, outcome)
    if layer == "unproven" and outcome == "pass":
        assert any("unproven by bytes" in note or "no plan" in note for note in verdict.notes), "a layer that proves nothing must say so"


def test_traffic_over_the_ordinary_nic_is_told_with_its_size() -> None:
    verdict = verdict_on(run(), counters={A: moved(0, 90 * GB), B: moved(0, 90 * GB)}, expected_bytes=ExpectedBytes(90 * GB))
    assert "90.00 GB over the ordinary NIC" in verdict.reasons[0].saw


def test_no_counters_are_never_a_pass_of_the_byte_layer() -> None:
    assert verdict_on(run()).bytes == "unproven"
    assert verdict_on(run(), counters={A: moved(5)}).bytes == "unproven", "one host's counters say nothing of the other"


# ---- any input


def test_the_document_holds_what_readers_of_verdict_json_rely_on() -> None:
    document = verdict_on(run(), run="qwen-1", attempt=2, judged_at="2026-04-02T17:20:11+00:00", counters={A: moved(7), B: moved(8)}).as_dict()
    assert json.loads(json.dumps(document)) == document
    assert {"schema", "run", "attempt", "judgedAt", "expected", "observed", "outcome", "reasons", "ranks", "hosts"} <= document.keys()
    assert document["hosts"][1] | {"host": B, "efaTx": 8, "efaRx": 8, "nicTx": 10**6, "nicRx": 10**6, "expected": None} == document["hosts"][1]


def test_order_and_repetition_of_lines_change_nothing() -> None:
    for ranks in (run(), run(nccl="2.18", network="Socket"), run()[:4] + run(network="Socket")[4:]):
        lines = lines_of(ranks)
        straight = read_text("\n".join(lines) + "\n")
        for seed in range(5):
            shuffled = random.Random(seed).sample(lines + lines[::3], len(lines) + len(lines[::3]))
            assert read_text("\n".join(shuffled) + "\n") == straight


@given(at=st.integers(0, len(text_of(run()))))
@settings(max_examples=300, deadline=None)
def test_a_log_cut_at_any_byte_passes_only_when_all_proofs_stand_before_the_cut(at: int) -> None:
    text = text_of(run())
    verdict = verdict_on(text[:at])
    proofs_end = text.rfind("Connected all rings") + len("Connected all ")  # the last rank's last proof; only "Init COMPLETE" follows
    assert verdict.outcome in ("pass", "unproven"), "a cut contradicts nothing"
    if verdict.outcome == "pass":
        assert at >= proofs_end
    assert judge(read_text(text_of(run(network="Socket"))[:at]), EFA).outcome != "pass"


LINE = st.sampled_from([*lines_of(run()), *lines_of(run(network="Socket")), *lines_of(run(provider="tcp")), warn(A, 700, "completed with error: err: 113")])


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """NCCL lines cut up, glued, overwritten and mixed with anything."""
    pieces = []
    for line in draw(st.lists(LINE, max_size=12)):
        raw = bytearray(line.encode())
        for _ in range(draw(st.integers(0, 2))):
            at = draw(st.integers(0, len(raw)))
            raw[at : at + draw(st.integers(0, 5))] = draw(st.binary(max_size=5))
        pieces += [bytes(raw), draw(st.sampled_from([b"\n", b"\r\n", b"\r", b"", b"\0\n", b" [repeated 3x across cluster]\n"]))]
    return b"".join(pieces)


@given(text=st.one_of(mangled(), st.binary(max_size=300)), transport=st.sampled_from(["efa", "tcp", "any"]))
@settings(max_examples=300, deadline=None)
def test_no_input_crashes_the_judge_or_makes_it_print_what_a_terminal_obeys(text: bytes, transport: str) -> None:
    evidence = read_text(text)
    assert [from_dict(json.loads(json.dumps(r.as_dict()))) for r in evidence] == evidence, "evidence must survive the way between ranks"
    assert judge(evidence, EFA).outcome != "pass", "a dozen lines can't hold three proofs of eight ranks"
    verdict = judge(evidence, Expectation(transport))
    json.dumps(verdict.as_dict())
    shown = table(verdict)
    assert all(len(line) <= 80 and line.isprintable() for line in shown.split("\n")), shown
