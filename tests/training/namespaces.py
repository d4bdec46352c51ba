"""Two hosts on one machine, made of network namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


def _sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """Two command prefixes, each of which runs a program as on a host of its own: own network, own host name."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("two hosts are made of network namespaces, which needs root, ip and unshare")
    names = [f"gate-{os.getpid()}-{letter}" for letter in "ab"]
    with contextlib.ExitStack() as undo:
        try:
            for name in names:
                _sh("ip", "netns", "add", name)
                undo.callback(_sh, "ip", "netns", "del", name)
            _sh("ip", "link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
            for number, name in enumerate(names, start=1):
                _sh("ip", "-n", name, "addr", "add", f"192.0.2.{number}/24", "dev", "eth0")
                _sh("ip", "-n", name, "link", "set", "eth0", "up")
                _sh("ip", "-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
        yield [
            # ip netns exec mounts a /sys that shows the namespace's own interfaces
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname host-{letter} && exec "$@"', "sh"]
            for name, letter in zip(names, "ab", strict=True)
        ]
