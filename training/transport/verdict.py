"""Evidence and expectation to verdict: which network carried a run between its hosts, and whether that is the one that was asked for.

A pure function. Missing evidence never passes: what contradicts the expectation makes ``fail``, what is merely absent makes ``unproven``. EFA is proven by
three things together, for each is printed by runs that never use EFA: every rank's libfabric provider is efa, every rank's network is the plugin's,
and every host has a channel over it (``Selected provider is efa`` precedes checks that may still fail; ``Using network Libfabric`` is also what
libfabric's tcp provider prints; one host needs no network at all).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from training.transport.counters import Moved
from training.transport.evidence import PLUGIN_NETWORKS, SOCKET, Communicator, Link, RankEvidence
from training.transport.preflight import Preflight

SCHEMA = 1
TRANSPORTS = ("efa", "tcp", "any")
_LOSSY = ("holds more", "has a hole")  # RankEvidence.cut: lines that may have said anything are gone
_FATAL = frozenset({"unreachable", "transfer", "stopped", "memory"})


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a run must show. ``transport`` is efa, tcp or any; None leaves the number of hosts, ranks or NICs to what the evidence itself names.

    ``gpudirect`` only where the instance type has GPUDirect RDMA over EFA (p4d and later, some g7e; never g4dn to g6e).
    """

    transport: str
    hosts: int | None = None
    ranks: int | None = None
    nics_per_host: int | None = None
    gpudirect: bool = False


@dataclasses.dataclass(frozen=True)
class ExpectedBytes:
    """Bytes that each host must have sent, and as many received, between the two readings of its counters; within ``tolerance``, a fraction.

    A plan counts payload: headers add 1-3%, and a run's first collectives (broadcast of weights) come on top, so 0.25 is a usual tolerance.
    """

    per_host: int
    tolerance: float = 0.25


@dataclasses.dataclass(frozen=True)
class Reason:
    """A rule that didn't hold: where, what was seen, what to do. ``against``: it contradicts the expectation (else proof is missing)."""

    rule: str
    where: str
    saw: str
    do: str
    against: bool


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The content of verdict.json; :meth:`as_dict` writes it. ``bytes`` is the byte layer alone: pass, fail or unproven."""

    run: str
    attempt: int
    judged_at: str
    expected: Expectation
    observed: str
    outcome: str
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]
    bytes: str
    ranks: tuple[Mapping[str, Any], ...]
    hosts: tuple[Mapping[str, Any], ...]

    @property
    def ok(self) -> bool:
        """Whether the run may go on."""
        return self.outcome in ("pass", "not-required")

    def line(self) -> str:
        """The verdict in one line for a person."""
        size = f"{_count(len(self.ranks), 'rank')} on {_count(len(self.hosts), 'host')}"
        return f"transport {self.outcome}: expected {self.expected.transport}, observed {self.observed} ({size})"

    def as_dict(self) -> dict[str, Any]:
        """verdict.json as plain data."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "attempt": self.attempt,
            "judgedAt": self.judged_at,
            "expected": self.expected.transport,
            "demanded": {
                "hosts": self.expected.hosts,
                "ranks": self.expected.ranks,
                "nicsPerHost": self.expected.nics_per_host,
                "gpudirect": self.expected.gpudirect,
            },
            "observed": self.observed,
            "outcome": self.outcome,
            "bytes": self.bytes,
            "reasons": [{"rule": r.rule, "where": r.where, "saw": r.saw, "do": r.do} for r in self.reasons],
            "notes": list(self.notes),
            "ranks": [dict(r) for r in self.ranks],
            "hosts": [dict(h) for h in self.hosts],
        }


def judge(
    evidence: Sequence[RankEvidence],
    expectation: Expectation,
    *,
    counters: Mapping[str, Moved] | None = None,
    expected_bytes: ExpectedBytes | None = None,
    preflight: Sequence[Preflight] = (),
    run: str = "",
    attempt: int = 0,
    judged_at: str = "",
) -> Verdict:
    """The verdict on one attempt of one run.

    ``counters`` holds each host's bytes since before the run, under the host's name in the evidence. ``judged_at`` is the caller's clock (ISO 8601).
    """
    ranks = sorted(evidence, key=lambda r: (r.rank is None, r.rank or 0, r.host, r.pid))
    observed = observe(ranks, expectation)
    byte_layer, byte_reasons, byte_notes = _bytes(ranks, expectation, counters, expected_bytes)
    reasons: list[Reason] = []
    if expectation.transport != "any":
        reasons = [*_preflight(preflight), *_proof(ranks, expectation, observed), *byte_reasons]
        if not reasons and observed != expectation.transport:
            do = "give the complete output of every rank of one run"
            reasons = [Reason("observed", "the run", f"traffic between hosts is {observed}", do, against=False)]
        # What contradicts comes first: it is what a person must mend.
        reasons.sort(key=lambda reason: not reason.against)
        outcome = "fail" if any(r.against for r in reasons) else "unproven" if reasons else "pass"
    else:
        outcome = "not-required"
    return Verdict(
        run=run,
        attempt=attempt,
        judged_at=judged_at,
        expected=expectation,
        observed=observed,
        outcome=outcome,
        reasons=tuple(reasons),
        notes=(_carried(ranks, observed), *byte_notes, *_missing_text(ranks)),
        bytes=byte_layer,
        ranks=tuple(_rank_row(r) for r in ranks),
        hosts=tuple(_host_row(host, counters, expected_bytes) for host in _hosts(ranks)),
    )


def observe(evidence: Sequence[RankEvidence], expectation: Expectation | None = None) -> str:
    """What the evidence proves about traffic between hosts: efa, tcp, mixed, intra-host or unknown.

    Ranks without any evidence don't count here (:func:`judge` holds them against the run); hosts without any do.
    """
    ranks = [r for r in evidence if _speaks(r)]
    hosts = _hosts(ranks)
    if expectation is not None and expectation.ranks == 1 and len(evidence) == 1 and not any(p.kind in _FATAL for p in evidence[0].problems):
        return "intra-host"  # one process has nobody to talk to, and NCCL may then say nothing
    if not ranks or any(p.kind in _FATAL or (p.kind == "failed" and not _started(r)) for r in ranks for p in r.problems):
        return "unknown"
    if all(r.backend == "gloo" for r in ranks):
        return "intra-host" if len(hosts) == 1 else "tcp"
    votes = {vote for r in ranks for vote in _votes(r)}
    net = any(link.transport == "NET" for r in ranks for link in r.links)
    if len(hosts) == 1 and _all_on_one_host(ranks, expectation):
        # NCCL without shared memory sends through sockets inside a host too: slow, and worth its name.
        return "tcp" if {link.network for r in ranks for link in r.links if link.transport == "NET"} == {SOCKET} else "intra-host"
    if len(votes) > 1 and "tcp" in votes:
        # Without a channel, a network that was only chosen has carried nothing on a single host.
        return "mixed" if net or len(hosts) > 1 else "unknown"
    if not net:
        whole = len(hosts) > 1 and not _hosts_missing(ranks) and all(r.links for r in ranks)
        return "intra-host" if whole else "unknown"
    if votes == {"tcp"}:
        return "tcp"
    # The tail of a log has channels and no start-up lines; the host's other ranks must speak for it.
    named = {vote for r in ranks if r.networks or r.providers for vote in _votes(r)}
    if named != {"efa"} or "other" in votes or len(hosts) < 2 or any(r.folded for r in ranks) or _hosts_missing(ranks):
        return "unknown"
    return "efa" if not _hosts_without_channel(ranks, "efa") else "unknown"


# ---- facts about evidence


def _speaks(rank: RankEvidence) -> bool:
    return rank.backend == "gloo" or bool(rank.networks or rank.providers or rank.communicators or rank.links or rank.problems or rank.connected)


def _started(rank: RankEvidence) -> bool:
    """Whether every communicator of the rank is up. Where no end of a start-up was printed at all, a finished ring or tree stands for it."""
    complete = [c.complete for c in rank.communicators]
    return all(complete) if any(complete) else rank.connected


def _hosts(ranks: Iterable[RankEvidence]) -> list[str]:
    return sorted({r.host for r in ranks})


def _net_names(rank: RankEvidence) -> set[str]:
    return set(rank.networks) | {link.network for link in rank.links if link.transport == "NET"}


def _votes(rank: RankEvidence) -> set[str]:
    """What this rank's networks are: efa, tcp, other, or unproven for the plugin without a provider."""
    if rank.backend == "gloo":
        return {"tcp"}
    votes = set()
    for name in _net_names(rank):
        if name == SOCKET:
            votes.add("tcp")
        elif name not in PLUGIN_NETWORKS:
            votes.add("other")
        elif not rank.providers:
            votes.add("unproven")
        else:
            votes |= {"efa" if p.name == "efa" else "tcp" for p in rank.providers}
    return votes


def _hosts_without_channel(ranks: Sequence[RankEvidence], transport: str) -> list[str]:
    """Hosts where no rank has proved that its networks are ``transport``, or none has a NET channel over them."""
    proved = {r.host for r in ranks if _votes(r) == {transport}}
    having = {r.host for r in ranks if r.backend == "gloo" or (_votes(r) <= {transport, "unproven"} and any(link.transport == "NET" for link in r.links))}
    return [host for host in _hosts(ranks) if host not in proved & having]


def _world(ranks: Iterable[RankEvidence]) -> int | None:
    """Size of the largest communicator."""
    return max((c.nranks for r in ranks for c in r.communicators), default=None)


def _all_on_one_host(ranks: Sequence[RankEvidence], expectation: Expectation | None) -> bool:
    """For ranks of one host: whether no rank of the run can be elsewhere, and something was set up."""
    world = expectation.ranks if expectation and expectation.ranks else _world(ranks)
    if world == 1:
        # A communicator of one says nothing of the run that it belongs to; only who started the run knows.
        return expectation is not None and expectation.hosts == 1 and any(_started(r) for r in ranks)
    if world is None or not any(r.links for r in ranks):
        return False
    if len({r.rank for r in ranks if r.rank is not None}) >= world:
        return True
    # NCCL counts ranks without shared memory or P2P between them as nodes of their own, so more than one proves nothing.
    if {c.nodes for r in ranks for c in r.communicators if c.nranks == world} == {1}:
        return True
    # Ranks are numbered host by host: rank 7 on device 7 leaves no room for another host below it.
    return any(source == device == world - 1 for r in ranks for source, device in _ends(r.links) if source == r.rank)


def _ends(links: Iterable[Link]) -> Iterable[tuple[int, int]]:
    """(rank, device) of both ends of each link, where the device is known."""
    for link in links:
        if link.source_device is not None:
            yield link.source, link.source_device
        if link.target_device is not None:
            yield link.target, link.target_device


def _hosts_missing(ranks: Sequence[RankEvidence]) -> bool:
    """Whether a host of the largest communicator has left no evidence at all, as far as NCCL's own numbers tell."""
    world = _world(ranks)
    if world is None:
        return False
    hosts = len(_hosts(ranks))
    numbered = {(r.rank, r.host) for r in ranks if r.rank is not None}
    if len({rank for rank, _ in numbered}) >= world:
        return False
    if any(c.nodes is not None and c.nodes > hosts for r in ranks for c in r.communicators):
        return True
    # Some ranks are unseen. With equal blocks of ranks on each host, every rank seen and every end of a channel must fall into its block.
    if world % hosts:
        return True
    size = world // hosts
    blocks = {(rank // size, host) for rank, host in numbered}
    if len(blocks) != len({block for block, _ in blocks}) or len(blocks) != len({host for _, host in blocks}):
        return True
    return any((rank - device) % size for r in ranks for rank, device in _ends(r.links))


# ---- rules


def _proof(ranks: Sequence[RankEvidence], expectation: Expectation, observed: str) -> list[Reason]:
    speaking = [r for r in ranks if _speaks(r)]
    if not speaking:
        return [
            Reason(
                "evidence",
                "all ranks",
                "no line of NCCL's",
                "set NCCL_DEBUG=INFO and a NCCL_DEBUG_FILE for each rank, and give these files whole; NCCL may also not have started yet",
                against=False,
            )
        ]
    if all(r.backend == "gloo" for r in speaking):
        return [*_gloo(speaking, expectation), *_counts(ranks, expectation), *_host_count(speaking, expectation, observed)]
    rules: tuple[Callable[..., list[Reason]], ...] = (_errors, _networks, _channels, _host_count, _nics, _gpudirect, _unfinished, _text)
    found = [reason for rule in rules for reason in rule(speaking, expectation, observed)]
    return [*found, *_counts(ranks, expectation)]


def _gloo(ranks: Sequence[RankEvidence], expectation: Expectation) -> list[Reason]:
    if expectation.transport == "tcp":
        return []
    hosts = _hosts(ranks)
    saw = f"the job used gloo inside one host ({hosts[0]})" if len(hosts) == 1 else f"the job used gloo over TCP between {', '.join(hosts)}"
    do = "EFA needs NCCL, and so GPUs: run on EFA GPU nodes, or set transport to any"
    return [Reason("backend", _where(ranks), saw, do, against=True)]


_ERRORS = {
    "unreachable": "the security group of the EFA interfaces lacks a rule to itself: allow all traffic from and to the group itself, egress too"
    " (0.0.0.0/0 doesn't cover EFA)",
    "transfer": "read the error; if it names a peer, check its security group, then replace the node",
    "stopped": "NCCL found no network under the pinned name and stopped, as it should",
    "memory": "raise the locked-memory limit (ulimit -l unlimited), and the pod's memory",
    "failed": "another rank or the network failed; find the first rank that stopped",
}


def _errors(ranks: Sequence[RankEvidence], expectation: Expectation, observed: str) -> list[Reason]:
    found: dict[tuple[str, str], list[RankEvidence]] = defaultdict(list)
    texts: dict[tuple[str, str], str] = {}
    for r in ranks:
        for problem in r.problems:
            if problem.kind in _ERRORS:
                do = _ERRORS[problem.kind]
                if problem.kind == "stopped":
                    do += "; " + _why_no_plugin(r)
                found[problem.kind, do].append(r)
                texts.setdefault((problem.kind, do), problem.text)
    return [Reason("error", _where(who), texts[key], key[1], against=key[0] != "failed") for key, who in found.items()]


def _why_no_plugin(rank: RankEvidence) -> str:
    """The likeliest cause that this rank did not run over EFA, as an instruction."""
    kinds = {p.kind for p in rank.problems}
    environment = dict(rank.environment)
    pinned = environment.get("NCCL_NET")
    if pinned == SOCKET or environment.get("NCCL_NET_PLUGIN") == "none":
        return "unset NCCL_NET=Socket and NCCL_NET_PLUGIN=none, which turn EFA off; pin NCCL_NET to 'AWS Libfabric'"
    if "device" in kinds:
        return "the pod has no EFA device: request vpc.amazonaws.com/efa in its limits, and see that the EFA device plugin's DaemonSet is above 0 on the node"
    if pinned and pinned.lower() not in {name.lower() for name in PLUGIN_NETWORKS}:
        return f"NCCL_NET={pinned} names no network of the plugin; use 'AWS Libfabric'"
    if "image" in kinds or not (rank.plugin or "plugin" in kinds):
        return "no aws-ofi-nccl was loaded: use an image that has it (the AWS Deep Learning Container), with its folder in LD_LIBRARY_PATH"
    return "aws-ofi-nccl was loaded and failed; its WARN lines in the rank's log say why"


def _networks(ranks: Sequence[RankEvidence], expectation: Expectation, observed: str) -> list[Reason]:
    """Every rank names the network that is expected and, for the plugin, the provider."""
    found: dict[tuple[str, str, str, bool], list[RankEvidence]] = defaultdict(list)
    for r in ranks:
        names, providers = sorted(_net_names(r)), sorted({p.name for p in r.providers})
        seen = f"network {' and '.join(names)}" + (f", provider {' and '.join(providers)}" if providers else "")
        if not r.networks and SOCKET not in names:
            # A rank that stopped with an error has its reason already.
            if not any(p.kind in _FATAL for p in r.problems):
                found["network", "no 'Using network' line", "give the rank's output from its start, with NCCL_DEBUG=INFO", False].append(r)
            if not set(providers) - {"efa"}:
                continue
        if expectation.transport == "tcp":
            if _votes(r) - {"tcp", "unproven"}:
                found["network", seen, "set NCCL_NET=Socket and NCCL_NET_PLUGIN=none for a run over TCP", True].append(r)
            elif "unproven" in _votes(r):
                found["provider", f"{seen}, no provider line", "give the rank's output from its start", False].append(r)
            continue
        if SOCKET in names:
            found["network", seen, _why_no_plugin(r), True].append(r)
        elif set(names) - PLUGIN_NETWORKS:
            found["network", seen, "pin NCCL_NET to 'AWS Libfabric'", True].append(r)
        elif set(providers) - {"efa"}:
            found["provider", seen, "set FI_PROVIDER=efa: libfabric's other providers run over TCP under the plugin's name", True].append(r)
        elif names and not providers:
            do = "give the rank's output from its start, with NCCL_DEBUG_SUBSYS including INIT and NET"
            found["provider", f"{seen}, no 'Selected provider' line", do, False].append(r)
    return [Reason(rule, _where(who), saw, do, against) for (rule, saw, do, against), who in found.items()]


def _channels(ranks: Sequence[RankEvidence], expectation: Expectation, observed: str) -> list[Reason]:
    if len(_hosts(ranks)) < 2:
        return []
    # A host on another network has its reason already.
    elsewhere = {r.host for r in ranks if _votes(r) - {expectation.transport, "unproven"}}
    without = [host for host in _hosts_without_channel(ranks, expectation.transport) if host not in elsewhere]
    if not without:
        return []
    name = "NET/Socket" if expectation.transport == "tcp" else "NET/Libfabric"
    do = "judge after the first collective between hosts; if the run hangs here, check the security group's rules to itself"
    return [Reason("channel", _list("host", without), f"no channel via {name} on a host whose network is proved", do, against=False)]


def _host_count(ranks: Sequence[RankEvidence], expectation: Expectation, observed: str) -> list[Reason]:
    hosts = _hosts(ranks)
    if len(hosts) < 2:
        sure = observed == "intra-host" or _all_on_one_host(ranks, expectation)
        saw = "one host: all ranks ran on it, so nothing crossed a network" if sure else "evidence of one host only"
        do = "spread the ranks over two hosts or more, or set transport to any" if sure else "give the output of every host's ranks"
        return [Reason("hosts", f"host {hosts[0]}", saw, do, against=sure)]
    if expectation.hosts is not None and len(hosts) != expectation.hosts:
        saw = f"{len(hosts)} of {expectation.hosts} hosts left evidence"
        if len(hosts) > expectation.hosts:
            saw = f"{len(hosts)} hosts, {expectation.hosts} expected"
        return [Reason("hosts", _list("host", hosts), saw, "give the output of every host of one run, and of no other run", against=False)]
    if _hosts_missing(ranks):
        saw = "NCCL's rank numbers point to hosts that left no evidence"
        return [Reason("hosts", _list("host", hosts), saw, "give the output of every rank", against=False)]
    return []


def _nics(ranks: Sequence[RankEvidence], expectation: Expectation, observed: str) -> list[Reason]:
    wanted = expectation.nics_per_host
    if wanted is None or expectation.transport != "efa":
        return []
    few: dict[int, list[RankEvidence]] = defaultdict(list)
    for r in ranks:
        found = max((p.nics for p in r.providers if p.name == "efa"), default=None)
        if found is not None and found < wanted:
            few[found].append(r)
    do = f"request vpc.amazonaws.com/efa: {wanted} in the pod's limits, and give the node all its EFA interfaces"
    return [Reason("nics", _where(who), f"found {found} of {wanted} EFA NICs", do, against=True) for found, who in sorted(few.items())]


def _gpudirect(ranks: Sequence[RankEvidence], expectation: Expectation, observed: str) -> list[Reason]:
    if not expectation.gpudirect or expectation.transport != "efa":
        return []
    direct = {r.host for r in ranks if any(link.gpudirect and link.network in PLUGIN_NETWORKS for link in r.links)}
    without = [host for host in _hosts(ranks) if host not in direct and any(k.transport == "NET" for r in ranks if r.host == host for k in r.links)]
    if not without:
        return []
    do = "use an image and driver with GPUDirect RDMA (DMA-BUF) on; on a type without it (g6 and older) don't demand it"
    return [Reason("gpudirect", _list("host", without), "no channel with GPUDirect RDMA", do, against=True)]


def _unfinished(ranks: Sequence[RankEvidence], expectation: Expectation, observed: str) -> list[Reason]:
    """A channel is printed when it is set up, before it is connected; only a finished start-up shows that it could be."""
    hung = [r for r in ranks if r.communicators and not _started(r)]
    if not hung:
        return []
    do = "judge after the first step; a start-up that never ends is a blocked network (security group without rules to itself) or a rank that died"
    return [Reason("start-up", _where(hung), "'Init START' without 'Init COMPLETE' or 'Connected all rings'", do, against=False)]


def _text(ranks: Sequence[RankEvidence], expectation: Expectation, observed: str) -> list[Reason]:
    reasons = []
    if folded := [r for r in ranks if r.folded]:
        do = "read each rank's own NCCL_DEBUG_FILE, or set RAY_DEDUP_LOGS=0 in the driver's environment"
        reasons.append(Reason("folded", _where(folded), "Ray merged lines of several ranks into one, which hides a rank on another network", do, against=False))
    if garbled := [r for r in ranks if r.garbled]:
        do = "give each rank its own NCCL_DEBUG_FILE"
        reasons.append(Reason("garbled", _where(garbled), "lines of several processes run into each other", do, against=False))
    if lossy := [r for r in ranks if any(what.startswith(_LOSSY) for what in r.cut)]:
        saw = next(what for r in lossy for what in r.cut if what.startswith(_LOSSY))
        reasons.append(Reason("truncated", _where(lossy), f"the log {saw}", "give the rank's complete output of this run only", against=False))
    return reasons


def _counts(ranks: Sequence[RankEvidence], expectation: Expectation) -> list[Reason]:
    """Every rank of one run, once."""
    reasons = []
    silent = [r for r in ranks if not _speaks(r)]
    if silent:
        saw = "no line of NCCL's" + (f": {silent[0].cut[0]}" if silent[0].cut else "")
        reasons.append(Reason("evidence", _where(silent), saw, "see that NCCL_DEBUG_FILE of each rank can be written, and give all of them", against=False))
    speaking = list({(r.host, r.pid): r for r in ranks if _speaks(r)}.values())
    nccl = [r for r in speaking if r.backend == "nccl"]
    strangers = [r for r in nccl if not r.communicators and r.links]
    if strangers:
        do = "give the rank's output from its start"
        reasons.append(Reason("evidence", _where(strangers), "channels, but no communicator line that says whose they are", do, against=False))
    members: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for r in nccl:
        for c in r.communicators:
            if c.id:
                members[c.id].add(c.rank)
                sizes[c.id] = max(c.nranks, sizes.get(c.id, 0))
    world = expectation.ranks or _world(ranks) or 0
    short = {identity for identity, seen in members.items() if len(seen) < sizes[identity]}
    if len(speaking) < world or short:
        seen, of = (len(speaking), world) if len(speaking) < world else min((len(members[i]), sizes[i]) for i in short)
        do = "give the output of every rank: an unseen one may be on another network"
        reasons.append(Reason("ranks", "the run", f"{seen} of {of} ranks left evidence", do, against=False))
    elif len(speaking) > world > 0 and (expectation.ranks or _runs(nccl) > 1):
        do = "give the output of one attempt of one run; files of an earlier one lie among these"
        reasons.append(Reason("one-run", "the run", f"{len(speaking)} processes for {_count(world, 'rank')}", do, against=False))
    elif _runs(nccl) > 1:
        do = "give the output of one attempt of one run"
        reasons.append(Reason("one-run", "the run", f"{_runs(nccl)} groups of ranks that share no communicator", do, against=False))
    elif not world:
        do = "give the output from its start, with NCCL_DEBUG_SUBSYS including INIT"
        reasons.append(Reason("ranks", "the run", "no communicator line, so the number of ranks isn't known", do, against=False))
    return reasons


def _runs(ranks: Sequence[RankEvidence]) -> int:
    """How many groups of processes share no communicator: two attempts of a run are two."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = name = parent[parent[name]]
        return name

    for r in ranks:
        shared: list[Communicator] = [c for c in r.communicators if c.id]
        for c in shared:
            parent[root(c.id)] = root(shared[0].id)
    return len({root(name) for name in list(parent)})


def _preflight(preflight: Sequence[Preflight]) -> list[Reason]:
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for worker in preflight:
        for check in worker.checks:
            if not check.ok:
                found[check.rule, check.saw, check.do].append(worker.host)
    return [Reason(f"preflight-{rule}", _list("host", sorted(set(hosts))), saw, do, against=True) for (rule, saw, do), hosts in found.items()]


def _bytes(
    ranks: Sequence[RankEvidence], expectation: Expectation, counters: Mapping[str, Moved] | None, expected: ExpectedBytes | None
) -> tuple[str, list[Reason], list[str]]:
    """The byte layer: pass, fail or unproven; reasons that count against the run; and what to tell."""
    hosts = _hosts(ranks)
    if counters is None:
        return "unproven", [], ["unproven by bytes: no counters were read"]
    kind = "nic" if expectation.transport == "tcp" else "efa"
    name = "EFA" if kind == "efa" else "NIC"
    unknown, silent, short, long = [], [], [], []
    for host in hosts:
        total = counters[host].total(kind) if host in counters else None
        if total is None:
            unknown.append(host)
        elif min(total) == 0 and len(hosts) > 1:
            silent.append(host)
        elif expected is not None and min(total) < expected.per_host * (1 - expected.tolerance):
            short.append(host)
        elif expected is not None and min(total) > expected.per_host * (1 + expected.tolerance):
            long.append(host)
    reasons = []
    if silent:
        saw = f"the {name} counters did not move" + _instead(silent, counters, kind)
        do = "the traffic went another way: look for a second communicator on sockets, and for another plugin or job"
        reasons.append(Reason("bytes", _list("host", silent), saw, do, against=True))
    if short and expected:
        lowest = min((min(counters[host].total(kind) or (0, 0)) for host in short), default=0)
        saw = f"{_size(lowest)} over {name} where the plan moves {_size(expected.per_host)}" + _instead(short, counters, kind)
        do = "a part of the traffic went another way: look for a second communicator on sockets"
        reasons.append(Reason("bytes", _list("host", short), saw, do, against=True))
    if long and expected:
        highest = max((min(counters[host].total(kind) or (0, 0)) for host in long), default=0)
        saw = f"{_size(highest)} over {name} where the plan moves {_size(expected.per_host)}"
        reasons.append(Reason("bytes", _list("host", long), saw, "another job shares the device, or the plan is not the one that ran", against=False))
    if reasons:
        return ("fail" if any(r.against for r in reasons) else "unproven"), reasons, []
    if unknown or not hosts:
        why = next((counters[host].unknown for host in unknown if host in counters), "not read")
        return "unproven", [], [f"unproven by bytes: {why} on {_list('host', unknown)}"]
    if len(hosts) < 2:
        return "unproven", [], ["unproven by bytes: one host moves nothing between hosts"]
    if expected is None:
        return "unproven", [], [f"{name} counters moved on every host; no plan says how far they must"]
    return "pass", [], [f"bytes over {name} agree with the plan within {expected.tolerance:.0%} on every host"]


def _instead(hosts: Sequence[str], counters: Mapping[str, Moved], kind: str) -> str:
    other = "nic" if kind == "efa" else "efa"
    totals = [total for host in hosts if (total := counters[host].total(other)) is not None]
    return f"; {_size(max(max(t) for t in totals))} over {'the ordinary NIC' if other == 'nic' else 'EFA'}" if totals else ""


# ---- what a person reads


def _carried(ranks: Sequence[RankEvidence], observed: str) -> str:
    hosts = _hosts(r for r in ranks if _speaks(r))
    gloo = bool(ranks) and all(r.backend == "gloo" for r in ranks)
    between = f"between {' and '.join(hosts)}" if len(hosts) <= 3 else f"between {len(hosts)} hosts"
    if observed == "intra-host" or (observed == "tcp" and len(hosts) == 1):
        carriers = sorted({k.transport if k.transport != "NET" else f"NET/{k.network}" for r in ranks for k in r.links}) or (["gloo"] if gloo else [])
        place = f"inside host {hosts[0]}" if len(hosts) == 1 else f"inside each of {len(hosts)} hosts"
        return f"carried {place}" + (f" by {', '.join(carriers)}" if carriers else "") + "; nothing crossed a network"
    if observed == "tcp":
        return f"carried by {'gloo over ' if gloo else ''}TCP {between}" if len(hosts) > 1 else "carried by TCP"
    if observed == "efa":
        return f"carried by EFA {between}"
    return "part of the run is on EFA, part on TCP" if observed == "mixed" else "the evidence does not show what carried the run"


def _missing_text(ranks: Sequence[RankEvidence]) -> list[str]:
    found: dict[str, list[RankEvidence]] = defaultdict(list)
    for r in ranks:
        if _speaks(r):
            for what in r.cut:
                found[what].append(r)
    return [f"log of {_where(who)}: {what}" for what, who in found.items()]


def _rank_row(rank: RankEvidence) -> dict[str, Any]:
    nics = [p.nics for p in rank.providers]
    channels = sorted({(k.transport if k.transport != "NET" else f"NET/{k.network}") + ("/GDRDMA" if k.gpudirect else "") for k in rank.links})
    return {
        "rank": rank.rank,
        "host": rank.host,
        "pid": rank.pid,
        "backend": rank.backend,
        "networks": list(rank.networks),
        "providers": sorted({p.name for p in rank.providers}),
        "nics": max(nics) if nics else None,
        "channels": channels,
        "nccl": rank.nccl,
        "plugin": rank.plugin,
        "problems": [{"kind": p.kind, "text": p.text} for p in rank.problems],
    }


def _host_row(host: str, counters: Mapping[str, Moved] | None, expected: ExpectedBytes | None) -> dict[str, Any]:
    moved = counters.get(host) if counters else None
    efa, nic = (moved.total("efa"), moved.total("nic")) if moved else (None, None)
    return {
        "host": host,
        "efaTx": efa[0] if efa else None,
        "efaRx": efa[1] if efa else None,
        "nicTx": nic[0] if nic else None,
        "nicRx": nic[1] if nic else None,
        "expected": expected.per_host if expected else None,
        "devices": {name: list(both) for name, both in (moved.efa or {}).items()} if moved else {},
    }


def _where(ranks: Sequence[RankEvidence]) -> str:
    """``ranks 4-7 on gpu-b``, several hosts joined by "; " and shortened."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for r in ranks:
        by_host[r.host].append(r.rank if r.rank is not None else -1)
    parts = []
    for host, numbers in sorted(by_host.items()):
        known = sorted({n for n in numbers if n >= 0})
        unknown = sum(n < 0 for n in numbers)
        words = [_list("rank", _spans(known))] if known else []
        words += [_count(unknown, "process", "processes")] if unknown else []
        parts.append(f"{' and '.join(words)} on {host}")
    return "; ".join(parts[:4]) + (f"; and {len(parts) - 4} more hosts" if len(parts) > 4 else "")


def rank_spans(numbers: Iterable[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3 and 7."""
    return ", ".join(_spans(sorted(set(numbers))))


def _spans(numbers: Sequence[int]) -> list[str]:
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return [str(a) if a == b else f"{a}-{b}" for a, b in spans]


def _list(noun: str, names: Sequence[str]) -> str:
    plural = len(names) > 1 or "-" in "".join(names if noun == "rank" else ())
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"{noun}{'s' if plural else ''} {shown}"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _size(number: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number} B"
