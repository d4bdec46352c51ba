"""Writes NCCL output as it would look for a run that is described by a few words. Hosts, addresses and ids are made up; the forms are NCCL's."""

from __future__ import annotations

import dataclasses

HOSTS = ("alder-gpu-0", "birch-gpu-0")


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank of a described run, and its lines."""

    host: str
    pid: int
    rank: int
    device: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(line + "\n" for line in self.lines)


def run(
    hosts: tuple[str, ...] = HOSTS,
    per_host: int = 4,
    *,
    network: str = "Libfabric",
    provider: str | None = "efa",
    fabric: str | None = "efa",
    nics: int = 1,
    suffix: str = "",
    comm_id: str = "0x51d07be2c4419aa3",
    nccl: str = "2.29",
    finished: bool = True,
    first_pid: int = 700,
    channels: bool = True,
) -> list[Rank]:
    """All ranks of a job whose ring goes through the hosts in order; ``nccl`` is the version whose wording is used (2.18, 2.22 or 2.29)."""
    world = len(hosts) * per_host
    ranks = []
    for rank in range(world):
        host, device, pid = hosts[rank // per_host], rank % per_host, first_pid + rank
        lines = _start_up(network, provider, fabric, nics, nccl)
        name = {"2.18": "", "2.22": "ncclCommInitRank ", "2.29": "ncclCommInitRankConfig "}[nccl]
        comm = f"{name}comm 0x7e{rank:04x} rank {rank} nranks {world} cudaDev {device} nvmlDev {device} busId {device + 16:x}0 commId {comm_id}"
        lines.append((f"[Rank {rank}] " if nccl == "2.29" else "") + f"{comm} - Init START")
        if channels:
            lines += _ring(rank, world, per_host, network, suffix)
        if finished:
            lines.append("Connected all rings, use ring PXN 0 GDR 0" if nccl == "2.29" else "Connected all rings")
            lines.append(f"{comm} - Init COMPLETE")
        ranks.append(Rank(host, pid, rank, device, tuple(f"{host}:{pid}:{pid + 50} [{device}] NCCL INFO {line}" for line in lines)))
    return ranks


def _start_up(network: str, provider: str | None, fabric: str | None, nics: int, nccl: str) -> list[str]:
    lines = [f"Bootstrap{' ' if nccl != '2.29' else ''}: Using eth0:10.77.4.9<0>"]
    if network in ("Libfabric", "AWS Libfabric", "OFI"):
        lines.append("NET/OFI Initializing aws-ofi-nccl " + ("1.20.0" if nccl == "2.29" else "1.9.1-aws"))
        if provider is not None:
            if fabric is None:
                lines.append(f"NET/OFI Selected Provider is {provider} (found {nics} nics)")
            else:
                lines.append(f"NET/OFI Selected provider is {provider}, fabric is {fabric} (found {nics} nics)")
    elif network == "Socket":
        lines.append("NET/Socket : Using [0]eth0:10.77.4.9<0>")
    return [*lines, f"Using network {network}"]


def _ring(rank: int, world: int, per_host: int, network: str, suffix: str) -> list[str]:
    before, after = (rank - 1) % world, (rank + 1) % world
    me, left, right = f"{rank}[{rank % per_host}]", f"{before}[{before % per_host}]", f"{after}[{after % per_host}]"
    lines = []
    if before // per_host != rank // per_host:
        lines.append(f"Channel 00/0 : {left} -> {me} [receive] via NET/{network}/0{suffix}")
    if after // per_host != rank // per_host:
        lines.append(f"Channel 00/0 : {me} -> {right} [send] via NET/{network}/0{suffix}")
    elif after != rank:
        lines.append(f"Channel 00 : {me} -> {right} via SHM/direct/direct")
    return lines


def lines_of(ranks: list[Rank]) -> list[str]:
    return [line for rank in ranks for line in rank.lines]


def text_of(ranks: list[Rank]) -> str:
    return "".join(rank.text for rank in ranks)


def without(ranks: list[Rank], *needles: str, who: int | None = None) -> list[Rank]:
    """The same run without the lines that hold one of ``needles`` (of rank ``who`` alone, where given)."""
    return [
        rank if who is not None and rank.rank != who else dataclasses.replace(rank, lines=tuple(x for x in rank.lines if not any(n in x for n in needles)))
        for rank in ranks
    ]


def plus(ranks: list[Rank], who: int, *messages: str) -> list[Rank]:
    """The same run with more INFO lines at the end of rank ``who``."""
    return [
        dataclasses.replace(r, lines=(*r.lines, *(f"{r.host}:{r.pid}:{r.pid + 50} [{r.device}] NCCL INFO {m}" for m in messages))) if r.rank == who else r
        for r in ranks
    ]


def warn(host: str, pid: int, message: str, where: str = "net.cc:77") -> str:
    """A WARN line as NCCL 2.26 and later print it, the empty line before it included."""
    return f"\n[2026-04-02 17:20:11] {host}:{pid}:{pid + 50} [0] {where} NCCL WARN {message}"


def ray(ranks: list[Rank]) -> list[str]:
    """The lines in Ray's driver stream, coloured, folding off."""
    return [f"\x1b[36m(RayTrainWorker pid={r.pid}, ip=10.77.4.{9 + r.rank})\x1b[0m {line}" for r in ranks for line in r.lines]


def cri(ranks: list[Rank]) -> list[str]:
    """The lines in a container runtime's log file."""
    return [f"2026-04-02T17:20:11.{i:09d}Z stderr F {line}" for i, line in enumerate(lines_of(ranks))]
