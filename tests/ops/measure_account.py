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

from tests.ops.account_server import KEYS, Account, Server, specification, tags

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
    """Seconds, peak MiB, and the last line of the output."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return time.monotonic() - began, int(done.stderr.split()[-1]) / 1024, (done.stdout or done.stderr).strip().splitlines()[-1]


def fill(account: Account, count: int) -> None:
    ec2 = account.backend("ec2")
    marked = {tag["Key"]: tag["Value"] for tag in tags()}
    vpc = account.client("ec2").create_vpc(CidrBlock="10.0.0.0/16", TagSpecifications=specification("vpc"))["Vpc"]["VpcId"]
    subnet = account.client("ec2").create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/16")["Subnet"]["SubnetId"]
    account.many_instances(count // 5, "m7i.xlarge", marked)
    for i in range(count // 5):
        ec2.create_security_group(f"group-{i}", "d", vpc_id=vpc, tags=marked)
        ec2.create_network_interface(ec2.get_subnet(subnet), private_ip_address=[], tags=marked)
        ec2.allocate_address("vpc", tags=marked)
        volume = ec2.create_volume(size=10, zone_name="us-west-2a", snapshot_id=None, encrypted=False, kms_key_id=None, volume_type="gp3")
        volume.add_tags(marked)


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
