"""What a worker must have before NCCL starts, and the environment that makes NCCL stop rather than fall back."""

from __future__ import annotations

import dataclasses
import resource
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.transport.counters import VIRTUAL_INTERFACES

_MEMLOCK_ENOUGH = 1 << 30  # bytes; NCCL and the plugin register hundreds of MB of buffers, and the usual limits of a container are 64 KiB and 8 MiB


@dataclasses.dataclass(frozen=True)
class Check:
    """One check: ``rule`` device, provider, memlock or interface; what was seen; and, where it failed, what to do."""

    rule: str
    ok: bool
    saw: str
    do: str = ""


@dataclasses.dataclass(frozen=True)
class Preflight:
    """All checks of one host."""

    host: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data; :func:`from_dict` is the inverse."""
        return dataclasses.asdict(self)


def from_dict(data: Mapping[str, Any]) -> Preflight:
    """The checks that :meth:`Preflight.as_dict` wrote, perhaps through JSON."""
    return Preflight(data["host"], tuple(Check(**check) for check in data["checks"]))


def check_worker(host: str, nics: int, *, root: str | Path = "/", fi_info: str = "fi_info", timeout: float = 30.0, memlock: int | None = None) -> Preflight:
    """Checks this worker for ``nics`` EFA devices and all that they need.

    ``root`` is where /dev and /sys are looked for. ``fi_info`` is libfabric's tool (on PATH, or where the EFA installer puts it), given ``timeout`` seconds.
    ``memlock`` stands in for the process's own soft limit in bytes (-1: unlimited). Raises nothing: what can't be checked has failed.
    """
    return Preflight(
        host.split(".")[0],
        (
            _device(Path(root), nics),
            _provider(fi_info, timeout),
            _memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if memlock is None else memlock),
            _interface(Path(root)),
        ),
    )


def _device(root: Path, nics: int) -> Check:
    found = len(list((root / "dev/infiniband").glob("uverbs*")))
    saw = f"{found} of {nics} EFA devices in /dev/infiniband"
    if found >= nics:
        return Check("device", True, saw)
    return Check(
        "device",
        False,
        saw,
        f"request vpc.amazonaws.com/efa: {nics} in the worker's limits, and see that the EFA device plugin's DaemonSet has a pod on the node (DESIRED above 0)",
    )


def _provider(fi_info: str, timeout: float) -> Check:
    tool = shutil.which(fi_info) or shutil.which("/opt/amazon/efa/bin/fi_info")
    if tool is None:
        return Check("provider", False, "no fi_info", "use an image with the EFA software, such as the AWS Deep Learning Container for Ray")
    try:
        done = subprocess.run([tool, "-p", "efa"], capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return Check("provider", False, f"fi_info -p efa gave no answer in {timeout:g} s", "replace the node: its EFA device hangs")
    except OSError as error:
        return Check("provider", False, f"fi_info can't be run ({error.strerror})", "use an image whose EFA software fits the node's processor")
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode == 0 and any(line.split() == ["provider:", "efa"] for line in text.splitlines()):
        return Check("provider", True, "fi_info -p efa answers")
    words = " ".join((done.stderr.decode("utf-8", "replace") or text).split())[:120]
    return Check(
        "provider",
        False,
        f"fi_info -p efa ended with {done.returncode}" + (f": {words}" if words else ""),
        "give the pod an EFA device, and an EFA driver on the node no older than the image's libfabric",
    )


def _memlock(limit: int) -> Check:
    if limit in (-1, resource.RLIM_INFINITY):
        return Check("memlock", True, "memlock unlimited")
    saw = f"memlock {limit // 1024} KiB"
    if limit >= _MEMLOCK_ENOUGH:
        return Check("memlock", True, saw)
    return Check("memlock", False, saw, "set LimitMEMLOCK=infinity for the node's containerd, or run the container with ulimit -l unlimited")


def _interface(root: Path) -> Check:
    names = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    real = [name for name in names if not name.startswith(VIRTUAL_INTERFACES) and _up(root / "sys/class/net" / name)]
    if real:
        return Check("interface", True, f"bootstrap over {real[0]}")
    saw = f"no real interface that is up (there are: {', '.join(names) or 'none'})"
    return Check("interface", False, saw, "start NCCL where it has a real network interface, such as a pod's eth0")


def _up(interface: Path) -> bool:
    try:
        return (interface / "operstate").read_text().strip() in ("up", "unknown")
    except OSError:
        return False


def log_file(log_folder: str | Path, run: str, attempt: int, rank: int) -> Path:
    """Where one rank of one attempt writes its NCCL output. :func:`training.transport.judge.files_in` knows the name's form."""
    return Path(log_folder, f"nccl.{run}.attempt-{attempt}.rank-{rank}.log")


def environment(expect: str, log_folder: str | Path, run: str, attempt: int, rank: int) -> dict[str, str]:
    """What a worker's environment must hold before NCCL starts, for ``expect`` efa, tcp or any. The folder must exist.

    efa pins the network by a name that every plugin version answers to, so that NCCL ends with an error where it would go on over sockets; libfabric's
    tcp provider hides behind the same name, which FI_PROVIDER excludes. Sources: NCCL ``src/plugin/net.cc`` (ncclNetInit), aws-ofi-nccl
    ``src/nccl_ofi_interface_nvidia.cpp`` and ``src/platform-aws.cpp``.
    """
    common = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET",
        "NCCL_DEBUG_FILE": str(log_file(log_folder, run, attempt, rank)),
        # Prefixes. EKS Pod Identity's link-local interface answers to nobody on another host.
        "NCCL_SOCKET_IFNAME": "^" + ",".join(VIRTUAL_INTERFACES),
    }
    pinned = {
        "efa": {"NCCL_NET": "AWS Libfabric", "FI_PROVIDER": "efa"},
        "tcp": {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"},
        "any": {},
    }
    return {**common, **pinned[expect]}
