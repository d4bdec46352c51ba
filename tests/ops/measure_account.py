"""How long `doctor` takes with two regions, and `leftovers` with 5,000 things, against moto: python -m tests.ops.measure_account

A measurement, not a test: it prints numbers. Client and server share the machine; each command is a process of its own.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from tests.ops.account_server import KEYS, Account, Server, paged, tag_set

ROOT = Path(__file__).parents[2]
THINGS = 5_000
# Reports its own peak memory, without this process's.
COMMAND = """
import resource, sys
from ops import cli
code = cli.main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def measured(*arguments: str) -> tuple[float, float, str]:
    """Seconds, peak MiB, and the line that sums up."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return time.monotonic() - began, int(done.stderr.split()[-1]) / 1024, next((line for line in lines if "in account" in line), lines[-1])


def fill(account: Account, count: int) -> None:
    """moto takes minutes to list so many tagged things, so these come as AWS words them, in its pages."""
    each, marked = count // 5, tag_set()
    state = "<instanceState><code>16</code><name>running</name></instanceState><launchTime>2026-11-29T10:00:00.000Z</launchTime>"
    every = {
        ("DescribeVolumes", "volumeSet"): "<volumeId>vol-{i:017x}</volumeId><size>100</size><volumeType>gp3</volumeType><status>available</status>",
        ("DescribeNetworkInterfaces", "networkInterfaceSet"): "<networkInterfaceId>eni-{i:017x}</networkInterfaceId><status>available</status>",
        ("DescribeSecurityGroups", "securityGroupInfo"): "<groupId>sg-{i:017x}</groupId><groupName>group-{i}</groupName>",
        ("DescribeSnapshots", "snapshotSet"): "<snapshotId>snap-{i:017x}</snapshotId><volumeSize>100</volumeSize>",
    }
    for (operation, container), item in every.items():
        account.answers["ec2", operation] = paged(operation, container, [item.format(i=i) + marked for i in range(each)])
    instance = "<reservationId>r-{i:017x}</reservationId><instancesSet><item><instanceId>i-{i:017x}</instanceId><instanceType>g6.12xlarge</instanceType>"
    instances = [instance.format(i=i) + state + marked + "</item></instancesSet>" for i in range(each)]
    account.answers["ec2", "DescribeInstances"] = paged("DescribeInstances", "reservationSet", instances)


def main() -> None:
    server = Server()
    os.environ.update({**KEYS, "AWS_ENDPOINT_URL": server.url})
    account = server.reset()
    measured("leftovers", "dev")  # moto loads each service at its first call
    for _ in range(2):
        seconds, mib, last = measured("doctor", "dev", "--regions", "us-east-1")
        print(f"doctor, 2 regions: {seconds:.1f} s, {mib:.0f} MiB; {last}", flush=True)
    seconds, small, last = measured("leftovers", "dev")
    print(f"leftovers, nothing: {seconds:.1f} s, {small:.0f} MiB; {last}", flush=True)
    fill(account, THINGS)
    for _ in range(2):
        seconds, mib, last = measured("leftovers", "dev")
        print(f"leftovers, {THINGS:,} things: {seconds:.1f} s, {mib:.0f} MiB ({mib - small:+.0f}); {last}", flush=True)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, server {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    server.stop()


if __name__ == "__main__":
    main()
