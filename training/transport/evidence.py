"""What NCCL and aws-ofi-nccl said about the network of each rank, read from their debug output into plain data.

Reads NCCL 2.18 to 2.29 with aws-ofi-nccl 1.7 to 1.21 (format strings of their sources at those tags), raw or behind the prefixes of Ray, CRI,
kubectl, torchrun, mpirun and srun. Only lines of NCCL's own shape count: ``host:pid:tid [device] NCCL INFO message`` and
``host:pid:tid [device] function:line NCCL WARN message``. The order of lines and their repetition change nothing but :attr:`Communicator.network`.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

PLUGIN_NETWORKS = frozenset({"Libfabric", "AWS Libfabric", "OFI"})  # aws-ofi-nccl: "AWS Libfabric" to 1.12, "Libfabric" since, either or "OFI" on demand
SOCKET = "Socket"

# What a line may begin with before NCCL's own text; anything else in front makes it somebody's quotation.
_PREFIX = re.compile(
    r"(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)? +(?:std(?:out|err) [FP] )?"  # CRI, kubectl --timestamps
    r"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})?\] "  # NCCL_DEBUG_TIMESTAMP_LEVELS
    r"|\([\w.:<>-]+(?:\([^()]{0,200}\))? pid=\d+(?:, ip=[\w.:]+)?\) +"  # Ray's driver stream
    r"|\[pod/\S+\] "  # kubectl logs --prefix
    r"|\[(?:default|rank)?\d+\]: ?|\[\d+,\d+\](?:<std\w+>)?: ?|\d+: +)*"  # torchrun, mpirun --tag-output, srun --label
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*", re.DOTALL)
_LINE = re.compile(
    r"(?P<host>[^\s:\[\]()]{1,255}):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) \[-?\d+\] "
    r"(?:NCCL INFO (?P<info>.*)|\S.*?:\d+ NCCL WARN (?P<warn>.*))",
    re.DOTALL,
)
# Finds candidate lines in a whole block at once, so that the rest of a log costs one substring search.
_INTEREST = re.compile(
    rb"NCCL (?:WARN |INFO (?:Channel \d+(?:/\d+)? ?: ?\d+\[|Using network |NET/|Bootstrap|NCCL_|NCCL version |Connected |Assigned NET |Failed to "
    rb"|Error: |\[Rank \d|(?:\w+ )?comm 0x))"
)
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? ?: ?(\d{1,9})\[([0-9a-f]+)\] -> (\d{1,9})\[([0-9a-f]+)\](?: \[(send|receive)\])? via (.+)", re.DOTALL)
_NET = re.compile(r"NET/(.+?)/-?\d+(.*)", re.DOTALL)
_INIT = re.compile(r"(?:\[Rank \d+\] )?(?:\w+ )?comm (0x[0-9a-f]+) rank (\d{1,9}) nranks (\d{1,9}) (.*?)- ?Init (START|COMPLETE)\s*", re.DOTALL)
_COMM_ID = re.compile(r"commId (0x[0-9a-f]+)")
_NODES = re.compile(r"comm (0x[0-9a-f]+) rank \d+ nRanks \d+ nNodes (\d{1,9}) ")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([^,()]+?)(?:, fabric is ([^()]*?))? \(found (\d{1,6}) nics\)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using ([^:\s]+):")
_BY_ENVIRONMENT = re.compile(r"(NCCL_\w+) set by environment to (.*)")
_ASSIGNED = re.compile(r"Assigned NET plugin (.+) to comm")

_BLOCK = 1 << 20  # bytes read at once, and the longest line kept
_SEEN = 8192  # lines remembered, to skip repetitions cheaply
# Bounds of what is kept, so that no log can fill the memory; "all" over all processes of a reading.
_MOST = {"ranks": 4096, "links": 4096, "communicators": 512, "few": 32, "all": 200_000}


@dataclasses.dataclass(frozen=True)
class Provider:
    """A libfabric provider that the plugin selected, its fabric name ("" where the version doesn't say), and how many NICs it found."""

    name: str
    fabric: str
    nics: int


@dataclasses.dataclass(frozen=True)
class Communicator:
    """One communicator as this process saw it.

    ``id`` is the commId that its members share ("" for one made by a split); ``handle`` the process's own pointer; ``nodes`` NCCL's count of hosts, None
    where it isn't printed; ``network`` the network named just before it ("" where none was); ``complete`` whether initialisation ended.
    """

    id: str
    handle: str
    rank: int
    nranks: int
    nodes: int | None
    network: str
    complete: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """Channels from rank ``source`` to rank ``target`` (with their device numbers; None in versions that print bus ids).

    ``transport`` is NET, P2P, SHM, ...; ``network`` the name after ``NET/``; ``side`` send or receive for NET, else "".
    """

    transport: str
    network: str
    gpudirect: bool
    source: int
    source_device: int | None
    target: int
    target_device: int | None
    side: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that went wrong, by kind (see :func:`_kind_of_problem`), with NCCL's own words."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class RankEvidence:
    """What one process left behind. Names are NCCL's: ``host`` is the (pod) host name up to the first dot.

    ``rank`` is the one in the largest communicator, or the one that the job gave; None where nothing tells. ``connected``: a ring or tree is up.
    ``folded``: Ray merged lines of several ranks into these. ``garbled``: lines of several processes run into each other. ``cut``: in words, what of
    the log is missing. ``backend`` gloo: the job's own statement that torch.distributed used gloo, over TCP, through ``interface``.
    """

    host: str
    pid: int
    rank: int | None = None
    source: str = ""
    backend: str = "nccl"
    nccl: str = ""
    plugin: str = ""
    interface: str = ""
    networks: tuple[str, ...] = ()
    providers: tuple[Provider, ...] = ()
    communicators: tuple[Communicator, ...] = ()
    links: tuple[Link, ...] = ()
    connected: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    problems: tuple[Problem, ...] = ()
    folded: bool = False
    garbled: bool = False
    cut: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data; :func:`from_dict` is the inverse."""
        return dataclasses.asdict(self)


def from_dict(data: Mapping[str, Any]) -> RankEvidence:
    """The evidence that :meth:`RankEvidence.as_dict` wrote, perhaps through JSON. Raises KeyError or TypeError for anything else."""
    plain = dict(data)
    plain["providers"] = tuple(Provider(**item) for item in plain["providers"])
    plain["communicators"] = tuple(Communicator(**item) for item in plain["communicators"])
    plain["links"] = tuple(Link(**item) for item in plain["links"])
    plain["problems"] = tuple(Problem(**item) for item in plain["problems"])
    plain["environment"] = tuple((str(key), str(value)) for key, value in plain["environment"])
    plain["networks"], plain["cut"] = tuple(plain["networks"]), tuple(plain["cut"])
    return RankEvidence(**plain)


def gloo_rank(host: str, pid: int, rank: int, interface: str = "") -> RankEvidence:
    """The evidence of a rank whose process group is gloo: it moves bytes over TCP between hosts, and over the loopback inside one."""
    return RankEvidence(host=host, pid=pid, rank=rank, backend="gloo", interface=interface, connected=True)


def read_files(paths: Iterable[str | Path]) -> list[RankEvidence]:
    """The evidence of every process that speaks in these files, sorted by host and pid. Raises OSError where a file can't be read."""
    reader = _Reader()
    for path in paths:
        with open(path, "rb", buffering=0) as stream:
            reader.read(stream, str(path))
    return reader.ranks()


def read_text(text: str | bytes, source: str = "") -> list[RankEvidence]:
    """As :func:`read_files`, from memory."""
    reader = _Reader()
    reader.read(io.BytesIO(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text), source)
    return reader.ranks()


def collect_rank(log_file: str | Path, host: str, pid: int, rank: int) -> RankEvidence:
    """The evidence of one rank from its own NCCL_DEBUG_FILE; a missing file is evidence that says so, not an error.

    ``host``, ``pid`` and ``rank`` are the caller's own. Lines of other processes in the file are left out, and said.
    """
    host = host.split(".")[0]
    nothing = RankEvidence(host=host, pid=pid, rank=rank, source=str(log_file))
    try:
        found = read_files([log_file])
    except OSError as error:
        return dataclasses.replace(nothing, cut=(f"no log file ({error.strerror})",))
    own = next((item for item in found if item.pid == pid), None)
    if own is None:
        return dataclasses.replace(nothing, cut=("the log file holds no NCCL line of this process",))
    if len(found) > 1:
        own = dataclasses.replace(own, cut=(*own.cut, f"the file also holds lines of {len(found) - 1} other processes"))
    return dataclasses.replace(own, rank=rank)


class _Process:
    """The growing evidence of one (host, pid)."""

    def __init__(self, host: str, pid: int, source: str, reader: _Reader) -> None:
        self.host, self.pid, self.source, self.reader = host, pid, source, reader
        self.nccl = self.plugin = self.interface = ""
        self.networks: dict[str, None] = {}
        self.providers: dict[Provider, None] = {}
        self.starts: dict[tuple[str, str], tuple[int, int, str]] = {}  # (commId, handle) -> rank, nranks, network
        self.ends: dict[tuple[str, str], tuple[int, int, str]] = {}
        self.nodes: dict[str, int] = {}
        self.links: dict[Link, None] = {}
        self.connected = self.folded = self.garbled = False
        self.environment: dict[str, str] = {}
        self.problems: dict[Problem, None] = {}
        self.cut: dict[str, None] = {}
        self.latest_network = ""

    def keep(self, store: dict[Any, Any], key: Any, value: Any = None, bound: str = "few") -> None:
        if key in store:
            return
        if len(store) < _MOST[bound] and self.reader.kept < _MOST["all"]:
            store[key] = value
            self.reader.kept += 1
        else:
            self.cut["holds more than is kept here"] = None

    def evidence(self) -> RankEvidence:
        alone = next(iter(self.networks)) if len(self.networks) == 1 else None
        started, ended = {handle for _, handle in self.starts}, {handle for _, handle in self.ends}
        # A split names its commId at the end only, so that its two lines meet by the handle.
        known = {**{key: value for key, value in self.ends.items() if key[1] not in started}, **self.starts}
        communicators = tuple(
            sorted(
                (
                    Communicator(
                        id=identity,
                        handle=handle,
                        rank=rank,
                        nranks=nranks,
                        nodes=self.nodes.get(handle),
                        network=alone if alone is not None else network,
                        complete=handle in ended,
                    )
                    for (identity, handle), (rank, nranks, network) in known.items()
                ),
                key=lambda c: (-c.nranks, c.id, c.handle),
            )
        )
        links = tuple(sorted(self.links, key=lambda link: (link.transport, link.network, link.source, link.target, link.side, link.gpudirect)))
        return RankEvidence(
            host=self.host,
            pid=self.pid,
            rank=communicators[0].rank if communicators else _own_rank(links),
            source=self.source,
            nccl=self.nccl,
            plugin=self.plugin,
            interface=self.interface,
            networks=tuple(sorted(self.networks)),
            providers=tuple(sorted(self.providers, key=lambda p: (p.name, p.fabric, p.nics))),
            communicators=communicators,
            links=links,
            connected=self.connected,
            environment=tuple(sorted(self.environment.items())),
            problems=tuple(sorted(self.problems, key=lambda p: (p.kind, p.text))),
            folded=self.folded,
            garbled=self.garbled,
            cut=tuple(sorted(self.cut)),
        )


def _own_rank(links: Iterable[Link]) -> int | None:
    """NCCL prints a channel at the rank that sets it up: the target of a receive, the source of anything else."""
    return next((link.target if link.side == "receive" else link.source for link in links), None)


class _Reader:
    """Reads files one after the other, keeping what the processes said and nothing of the text."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], _Process] = {}
        self.seen: set[bytes] = set()
        self.kept = 0

    def ranks(self) -> list[RankEvidence]:
        return [self.processes[key].evidence() for key in sorted(self.processes)]

    def read(self, stream: BinaryIO, source: str) -> None:
        here: set[tuple[str, int]] = set()
        self.seen.clear()
        cut: set[str] = set()
        rest = b""
        skipping = False
        while block := stream.read(_BLOCK):
            if skipping:
                newline = block.find(b"\n")
                if newline < 0:
                    continue
                block, skipping = block[newline + 1 :], False
            end = block.rfind(b"\n") + 1
            if end:
                self._lines(rest + block[:end], source, here, cut)
                rest = block[end:]
            else:
                rest += block
            if len(rest) > _BLOCK:
                cut.add("a line longer than 1 MiB was left out")
                rest, skipping = b"", True
        if rest:
            # A tail without a newline may be half a line: it counts when its message is whole, which the patterns decide.
            if b"NCCL" in rest:
                cut.add("ends without a newline, perhaps in the middle of a line")
            self._lines(rest, source, here, cut, unfinished=True)
        for key in here:
            self.processes[key].cut.update(dict.fromkeys(cut))

    def _lines(self, block: bytes, source: str, here: set[tuple[str, int]], cut: set[str], unfinished: bool = False) -> None:
        end = 0
        for match in _INTEREST.finditer(block):
            at = match.start()
            if at < end:
                continue
            start = block.rfind(b"\n", end, at) + 1 or end
            end = block.find(b"\n", at)
            if end < 0:
                end = len(block)
            line = block[start:end]
            if line in self.seen:
                continue
            if len(line) < 1024 and b"network " not in line:  # which network is the latest depends on every such line
                if len(self.seen) >= _SEEN:
                    self.seen.clear()
                self.seen.add(line)
            if b"\0" in line:
                cut.add("has a hole of NUL bytes, as a log that was truncated while being written")
                line = line.replace(b"\0", b"")
            for part in line.decode("utf-8", "replace").split("\r"):
                self._line(part, source, here, cut, unfinished)

    def _line(self, text: str, source: str, here: set[tuple[str, int]], cut: set[str], unfinished: bool) -> None:
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        prefix = _PREFIX.match(text)
        match = _LINE.match(text, prefix.end() if prefix else 0)
        if match is None:
            return
        key = (match["host"], int(match["pid"]))
        process = self.processes.get(key)
        if process is None:
            if len(self.processes) >= _MOST["ranks"]:
                cut.add("holds more than is kept here")
                return
            process = self.processes[key] = _Process(*key, source, self)
        here.add(key)
        message = match["info"] if match["info"] is not None else match["warn"]
        if " [repeated " in message:
            message, times = _REPEATED.subn("", message)
            process.folded = process.folded or times > 0
        if "NCCL INFO" in message or "NCCL WARN" in message:
            # Whose line the rest is can't be known; what it says against EFA must not be lost with it.
            process.garbled = True
            if "network Socket" in message or "NET/Socket/" in message:
                process.networks[SOCKET] = None
            return
        if match["info"] is not None:
            _info(process, message.rstrip(), unfinished)
        else:
            _problem(process, message.rstrip(), warning=True)


def _info(process: _Process, message: str, unfinished: bool) -> None:
    if message.startswith("Channel"):
        _channel(process, message)
    elif message.startswith("Using network "):
        _network(process, message[len("Using network ") :].strip(), unfinished)
    elif assigned := _ASSIGNED.fullmatch(message):
        _network(process, assigned[1], unfinished)
    elif init := _INIT.fullmatch(message):
        handle, rank, nranks, middle, stage = init.groups()
        identity = _COMM_ID.search(middle)
        store = process.starts if stage == "START" else process.ends
        process.keep(store, (identity[1] if identity else "", handle), (int(rank), int(nranks), process.latest_network), "communicators")
    elif nodes := _NODES.match(message):
        process.keep(process.nodes, nodes[1], int(nodes[2]), "communicators")
    elif message.startswith("Connected all ") or message.startswith("Connected binomial"):
        process.connected = True
    elif version := re.match(r"NCCL version (\S+)", message):
        process.nccl = version[1][:64]
    elif by_environment := _BY_ENVIRONMENT.fullmatch(message):
        process.keep(process.environment, by_environment[1][:64], by_environment[2].rstrip(".")[:200])
    elif bootstrap := _BOOTSTRAP.match(message):
        process.interface = bootstrap[1][:64]
    elif provider := _PROVIDER.match(message):
        process.keep(process.providers, Provider(provider[1].strip()[:64], (provider[2] or "")[:64], int(provider[3])))
    elif version := re.match(r"NET/OFI Initializing aws-ofi-nccl (\S+)", message):
        process.plugin = version[1][:64]
    else:
        _problem(process, message, warning=False)


def _network(process: _Process, name: str, unfinished: bool) -> None:
    if not name or (unfinished and name not in PLUGIN_NETWORKS | {SOCKET, "IB"}):
        return
    process.latest_network = name[:64]
    process.keep(process.networks, name[:64])


def _channel(process: _Process, message: str) -> None:
    channel = _CHANNEL.fullmatch(message)
    if channel is None:
        return
    source, source_device, target, target_device, side, via = channel.groups()
    net = _NET.fullmatch(via)
    if net is None and (via.startswith("NET/") or "/" not in via):
        return  # cut off in the middle of the transport's name
    process.keep(
        process.links,
        Link(
            transport="NET" if net else via.split("/")[0].strip()[:16],
            network=net[1][:64] if net else "",
            gpudirect=bool(net) and "/GDRDMA" in via,
            source=int(source),
            source_device=_device(source_device),
            target=int(target),
            target_device=_device(target_device),
            side=side or "",
        ),
        bound="links",
    )
    if net and net[1] == SOCKET and process.cut:
        process.networks[SOCKET] = None  # must be known even where no more links are kept


def _device(text: str) -> int | None:
    """The device number, or None for a bus id (hexadecimal, in NCCL up to 2.18)."""
    return int(text) if text.isdecimal() and len(text) <= 2 else None


# kind -> what NCCL or the plugin says; the first that fits. Texts: aws-ofi-nccl 1.7.4 to 1.21.1 and NCCL 2.18.5 to 2.29.7.
_PROBLEMS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("unreachable", r"completed with error.*(?:err: 113\b|4126)|no route to host|host is unreachable"),
        ("transfer", r"completed with error"),
        ("stopped", r"failed to initialize any net plugin|error: network .* not found"),
        ("device", r"no eligible providers|couldn't find any optimal provider|unable to find a protocol|fi_getinfo\(\) call failed|efa output empty list"),
        ("memory", r"cannot allocate memory|failed to post receive|memlock"),
        ("plugin", r"aws-ofi-nccl initialization failed|initializing plugin failed|failed to initialize (?:sendrecv|rdma) protocol"
                   r"|failed to initialize net plugin (?!ib\b)|requires at least libfabric|disabling gdr|gdr disabled on"),
        ("image", r"no plugin found|could not find: .*libnccl-net|plugin load .* returned"),
    )
)  # fmt: skip
_FAILURE = re.compile(r"closed by remote peer|connect\w*\b.*(?:failed|timed out|refused)|remote process exited", re.IGNORECASE)


def _kind_of_problem(text: str, warning: bool) -> str | None:
    """unreachable, transfer, stopped, device, memory, plugin, image: as in docs/gate.md; failed: another failure; warning: any other WARN; None: no problem."""
    for kind, pattern in _PROBLEMS:
        if pattern.search(text) and (warning or kind != "memory"):
            return kind
    if not warning:
        return None
    return "failed" if _FAILURE.search(text) else "warning"


def _problem(process: _Process, message: str, warning: bool) -> None:
    kind = _kind_of_problem(message[:2000], warning)
    if kind is not None:
        process.keep(process.problems, Problem(kind, " ".join(message.split())[:300]))
