"""Runs found by what a person calls them, compared, and a proof from its legs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops import compare, prove, runs
from ops.errors import BadInput
from ops.ray_jobs import RayJob

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert(1)</script>"


def write_run(folder: Path, name: str, speed: float = 1000.0, **changes: Any) -> Path:
    place = folder / name
    place.mkdir(parents=True)
    document = {
        "schema": 1,
        "run": name,
        "settings": {"steps": 3, "learningRate": 0.001, "model": {"random": "tiny"}, "run": name, "transport": "any"},
        "versions": {"torch": "2.13.0", "ray": "2.58.0"},
        "imageDigest": None,
        "codeHash": "a" * 64,
        "hosts": ["h1", "h2"],
        "identity": {"dataHash": "d1"},
        "attempts": [{"started": "2026-11-29T10:00:00Z", "ended": "2026-11-29T10:30:00Z", "worldSize": 2}],
        "started": "2026-11-29T10:00:00Z",
        "ended": "2026-11-29T10:30:00Z",
        "outcome": "done",
        "cost": None,
        **changes,
    }
    (place / "run.json").write_text(json.dumps(document))
    lines = [
        {
            "step": step,
            "loss": 7.0 - step,
            "tokens": step * 1000,
            "tokensPerSecond": speed * (0.1 if step == 1 else 1),
            "stepSeconds": 1.0,
            "time": "2026-11-29T10:00:00Z",
        }
        for step in (1, 2, 3)
    ]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "evalLoss": 4.5, "perplexity": 90.0}\n{"torn')
    (place / "verdict.json").write_text(json.dumps({"outcome": "pass", "expected": "tcp", "observed": "tcp", "ranks": [], "hosts": [], "bytes": "unproven"}))
    return place


def values(rows: tuple[compare.Row, ...]) -> dict[str, tuple[str, ...]]:
    return {row.what: row.values for row in rows}


def test_a_comparison_tells_what_differs_and_what_it_did(tmp_path: Path) -> None:
    one = runs.find(str(write_run(tmp_path, "one")))
    other = {"settings": {"steps": 3, "learningRate": 0.01, "model": {"random": "tiny"}}, "versions": {"torch": "2.14.0", "ray": "2.58.0"}}
    two = runs.find(str(write_run(tmp_path, "two", speed=2500.0, **other)))
    found = compare.compare([one, two])
    differs = values(found.differences)
    assert differs["learningRate"] == ("0.001", "0.01")
    assert differs["version of torch"] == ("2.13.0", "2.14.0")
    assert differs["transport"] == ("any", "-")
    assert not {"run", "model.random", "version of ray", "code"} & set(differs), "what is the same, or differs always, is no news"
    came_out = values(found.results)
    assert came_out["tokens/s"] == ("1,000", "2,500"), "the first line holds warm-up"
    assert came_out["held-out loss"] == ("4.5", "4.5")
    assert came_out["time"] == ("30m 00s", "30m 00s")
    assert came_out["network"] == ("tcp (pass)", "tcp (pass)")


def test_a_run_on_a_stack_with_a_price_has_a_cost_and_one_a_million_tokens(tmp_path: Path) -> None:
    import dataclasses

    run = dataclasses.replace(runs.find(str(write_run(tmp_path, "one"))), usd_hour=10.0)
    assert compare.cost(run) == pytest.approx(5.0)
    assert values(compare.compare([run, run]).results)["cost a million tokens"] == ("$1,666.67", "$1,666.67")


def test_names_and_settings_are_data_in_the_page(tmp_path: Path) -> None:
    found = [runs.find(str(write_run(tmp_path, name, settings={"steps": 3, "owner": HOSTILE + name}))) for name in ("one", "two")]
    page = compare.as_page(compare.compare(found), found)
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    assert "<svg" in page
    assert "<script" not in page


def test_the_command_writes_a_page_and_fits_eighty_columns(tmp_path: Path) -> None:
    folders = [str(write_run(tmp_path, name)) for name in ("one", "two")]
    command = [sys.executable, "-m", "ops", "compare", *folders, "--page", str(tmp_path / "page.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    table = [line for line in done.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(len, table)) <= 80
    assert "\x1b" not in done.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    told = json.loads(subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert told["names"] == ["one", "two"]


@pytest.mark.parametrize(("verdict", "code"), [({"outcome": "fail", "reasons": []}, 4), ({"outcome": "not-required"}, 0), (None, 4)])
def test_a_verdict_is_an_exit_code(tmp_path: Path, verdict: dict[str, Any] | None, code: int) -> None:
    place = write_run(tmp_path, "one")
    (place / "verdict.json").unlink() if verdict is None else (place / "verdict.json").write_text(json.dumps(verdict))
    done = subprocess.run([sys.executable, "-m", "ops", "verdict", str(place)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["/nowhere", "gs://bucket/run", "nostack/run", "../x", ""])
def test_a_run_that_is_not_there_is_a_sentence(name: str) -> None:
    with pytest.raises(BadInput):
        runs.find(name)


def test_one_run_can_not_be_compared(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="two runs"):
        compare.compare([runs.find(str(write_run(tmp_path, "one")))])


# ---- the proof

PASSED = "transport pass: expected {0}, observed {0} (8 ranks on 2 hosts)\n"


def log(speed: int, transport: str) -> str:
    return PASSED.format(transport) + "".join(f"step {n:>2}/40  loss 5.0000  {speed if n > 4 else 1:>9,} tokens/s  0:00:01 left\n" for n in range(2, 42, 2))


def job(state: str = "SUCCEEDED", code: int = 0) -> RayJob:
    return RayJob("j", state, "", code, None, None)


def test_each_round_turns_the_order_around_and_the_gate_is_tested_too() -> None:
    order = [leg.name for _, leg in prove.legs(efa=True, rounds=2)]
    assert order == ["efa", "tcp", "tcp", "efa", "fallback"]
    assert [(leg.transport, leg.must) for _, leg in prove.legs(efa=False, rounds=1)] == [("tcp", "pass"), ("efa", "refuse")]


def test_a_proof_holds_when_efa_passes_and_tcp_claiming_efa_is_refused() -> None:
    results = [
        prove.judged(prove.EFA, 1, job(), log(2000, "efa")),
        prove.judged(prove.TCP, 1, job(), log(1000, "tcp")),
        prove.judged(prove.TCP, 2, job(), log(1000, "tcp")),
        prove.judged(prove.EFA, 2, job(), log(2200, "efa")),
        prove.judged(prove.FALLBACK, 2, job("FAILED", 4), "error: transport = efa, but NCCL has no plugin\n"),
    ]
    found = prove.proof("dev", results, [], efa=True)
    assert found.holds
    assert found.ratio == pytest.approx(2.1)
    assert found.ratio_spread == pytest.approx((2.0, 2.2))
    assert "2.10 times as fast" in " ".join(prove.summary(found))


@pytest.mark.parametrize(
    ("leg", "ended", "text"),
    [
        (prove.EFA, job(), log(2000, "tcp")),  # it went over TCP, and nobody stopped it
        (prove.EFA, job(), "step 40/40  loss 5.0  1,000 tokens/s  0:00:00 left\n"),  # nothing was judged
        (prove.EFA, job("FAILED", 4), log(2000, "efa")),
        (prove.NO_DEVICE, job(), log(2000, "efa")),  # the gate let it pass
        (prove.NO_DEVICE, job("FAILED", 3), "error: out of memory\n"),  # it failed, but not for the network
        (prove.FALLBACK, job("STOPPED", None), ""),  # type: ignore[arg-type]
    ],
)
def test_a_gate_that_fails_its_test_is_no_proof(leg: prove.Leg, ended: RayJob, text: str) -> None:
    found = prove.proof("dev", [prove.judged(leg, 1, ended, text)], [], efa=True)
    assert not found.holds
    assert "does NOT hold" in prove.summary(found)[0]


def test_no_legs_are_no_proof() -> None:
    assert not prove.proof("dev", [], [], efa=True).holds


def test_a_legs_settings_are_the_stacks_made_short() -> None:
    own = {
        "data": "s3://d",
        "model": {"pretrained": "m"},
        "steps": 9000,
        "stopAfter": 10,
        "minWorkers": 4,
        "nicsPerHost": 4,
        "learningRate": 0.1,
        "evalRows": 100,
    }
    tcp = prove.settings_of(prove.TCP, own, 40, "prove-1")
    assert (tcp["steps"], tcp["transport"], tcp["evalRows"], tcp["export"], tcp["run"], tcp["learningRate"]) == (40, "tcp", 0, False, "prove-1", 0.1)
    assert not {"stopAfter", "nicsPerHost", "minWorkers"} & set(tcp)
    assert prove.settings_of(prove.EFA, own, 40, "prove-1")["nicsPerHost"] == 4


def test_the_curve_is_read_from_the_jobs_log_and_its_absence_is_said() -> None:
    told = {"tool": "torch.distributed (gloo)", "ranks": 2, "hosts": 2, "rows": [{"bytes": 1024.0, "seconds": 1e-3, "algorithm": 1.0, "bus": 1.0}], "note": ""}
    assert prove.curve_of(f"noise\nRESULT {json.dumps(told)}\n", "tcp").rows[0]["bus"] == 1.0
    with pytest.raises(prove.Refused, match="was not measured: no GPU"):
        prove.curve_of("no GPU\n", "tcp")


NCCL_TESTS = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
[1,0]<stdout>:           8             2     float     sum      -1    31.25    0.00    0.00      0    30.01    0.00    0.00      0
[1,0]<stdout>:  1073741824     268435456     float     sum      -1   250000    4.29    7.52      0   251000    4.28    7.49      0
# Avg bus bandwidth    : 3.76
"""


def test_nccl_tests_own_table_is_read() -> None:
    # Ray is the pods'; what is read here needs none of it.
    script = """
import json, runpy, sys, types
for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
    sys.modules[name] = types.ModuleType(name)
print(json.dumps(runpy.run_path(sys.argv[1])["parsed"](sys.stdin.read())))
"""
    done = subprocess.run([sys.executable, "-c", script, str(prove.CURVE)], input=NCCL_TESTS, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    assert [row["bytes"] for row in rows] == [8.0, 1073741824.0]
    assert (rows[1]["seconds"], rows[1]["bus"]) == (0.25, 7.52)


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=5), st.lists(st.floats(1, 1e6), min_size=1, max_size=5))
def test_the_ratio_lies_within_its_spread(efa: list[float], tcp: list[float]) -> None:
    def result(leg: str, number: int, speed: float) -> prove.Result:
        return prove.Result(leg, number, "j", prove.PASS, True, leg, "pass", 0, speed)

    results = [result("efa", n, speed) for n, speed in enumerate(efa)] + [result("tcp", n, speed) for n, speed in enumerate(tcp)]
    found = prove.proof("dev", results, [], efa=True)
    assert found.ratio is not None
    assert found.ratio_spread is not None
    assert found.ratio_spread[0] <= found.ratio <= found.ratio_spread[1]
