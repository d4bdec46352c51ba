"""`up` and `down` as commands: the real engine, a simulated AWS for it, and a real HTTP server for what the commands themselves ask of AWS."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops import Stack, target
from ops.engine import Engine
from tests.aws_sim import simulated
from tests.aws_sim.conftest import new_account  # noqa: F401 - a fixture
from tests.ops.account_server import xml

reason = simulated.missing()
pytestmark = [pytest.mark.aws_sim, *([pytest.mark.skip(reason=reason)] if reason else [])]

GROUP = "aws:eks/nodeGroup:NodeGroup"
NO_CAPACITY = {"faults": [{"token": GROUP, "name": "gpu", "op": "create", "error": "InsufficientInstanceCapacity", "times": 1, "at": "end"}]}
BUSY_SUBNET = {"faults": [{"token": "aws:ec2/subnet:Subnet", "op": "delete", "error": "DependencyViolation", "times": 1}]}


class Ops:
    """`python -m ops` in a copy of the program with its own account, state and cache."""

    def __init__(self, account: simulated.Account) -> None:
        self.account = account
        shutil.copytree(simulated.ROOT / "ops", account.project / "ops", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)

    def environment(self, simulation: Any = None, time_scale: float | None = None) -> dict[str, str]:
        found = self.account.environment(simulation, time_scale)
        return {**found, "XDG_CACHE_HOME": str(self.account.home / "cache"), "AWS_REGION": "us-west-2"}

    def command(self, *arguments: str) -> list[str]:
        return [str(simulated.LAB / "aws_sim" / "run"), sys.executable, "-m", "ops", *arguments]

    def __call__(self, *arguments: str, simulation: Any = None, code: int = 0, limit: float = 400) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.account.project,
            env=self.environment(simulation),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        said = f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == code, said
        assert "Traceback" not in done.stdout + done.stderr, said
        return done


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Ops:
    made = simulated.Account(tmp_path_factory.mktemp("ops"))
    return Ops(made)


def test_before_the_first_up_every_command_says_so(ops: Ops, account: Any) -> None:
    assert "down" in ops("status", "dev").stdout
    assert "not up" in ops("explain", "dev", code=6).stdout
    assert "up dev" in ops("logs", "dev", code=2).stderr


def test_no_capacity_is_one_sentence_with_ways_out_and_no_trace(ops: Ops, account: Any) -> None:
    done = ops("up", "dev", simulation=NO_CAPACITY, code=5)
    assert "EC2 has no capacity" in done.stderr
    assert "network.zone" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "GPU nodes: failed" in done.stdout


def test_up_tells_parts_cost_and_stop_time(ops: Ops, account: Any) -> None:
    done = ops("up", "dev")
    assert "dev is up:" in done.stdout
    assert "costs $9.6" in done.stdout
    assert "an hour" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr, "no colour in a pipe"


def test_a_second_up_changes_nothing_and_as_json_is_one_document(ops: Ops, account: Any) -> None:
    found = json.loads(ops("up", "dev", "--json").stdout)
    assert set(found["changes"]) == {"same"}
    assert found["usdHour"] == pytest.approx(9.65, abs=0.1)


def test_status_tells_uptime_money_and_auto_stop(ops: Ops, account: Any) -> None:
    found = json.loads(ops("status", "dev", "--json").stdout)
    assert found["state"] == "up"
    assert found["upSince"]
    assert found["stopsAt"]
    assert found["usdSoFar"] >= 0
    shown = ops("status", "dev").stdout
    for word in ("up since", "an hour", "auto-stop"):
        assert word in shown


def test_plan_is_the_engines_preview_of_a_change_and_its_price(ops: Ops, account: Any) -> None:
    same = json.loads(ops("plan", "dev", "--json").stdout)
    assert (same["basis"], same["changes"]) == ("engine", {}), "nothing has changed"
    before = ops.account.stack_file.read_text()
    ops.account.configure({"gpu": {"instanceType": "g6.12xlarge", "nodes": 3}})
    try:
        more = json.loads(ops("plan", "dev", "--json").stdout)
    finally:
        ops.account.stack_file.write_text(before)
    assert {item["op"] for item in more["planned"]} == {"update"}, "a node more replaces nothing"
    assert more["cost"]["anHour"] - same["cost"]["anHour"] > 4, "a g6.12xlarge more"
    assert json.loads(ops("plan", "dev", "--json").stdout)["changes"] == {}, "a preview changes nothing"


@pytest.fixture
def here(ops: Ops, account: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process in the place of the command: its cache, its engine's state. Returns the program's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(ops.account.home / "cache"))
    monkeypatch.setenv("PATH", f"{simulated.TOOLS}:{ops.environment()['PATH']}")
    monkeypatch.setenv("PULUMI_BACKEND_URL", f"file://{ops.account.home}/sim/backend")
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE", "simulated")
    return ops.account.project


def test_the_library_has_the_same_verbs_and_prints_nothing(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = Stack("dev", here).status()
    assert (found.stack, found.state) == ("dev", "up")
    assert found.stops_at is not None
    assert found.up_since is not None
    assert found.stops_at > found.up_since
    assert capfd.readouterr() == ("", "")


def test_two_operations_on_one_stack_do_not_run_at_once(ops: Ops, here: Path) -> None:
    with Engine(target.read("dev", here)).lock("up"):
        done = ops("up", "dev", code=7)
    assert "`up` runs since" in done.stderr


def test_a_wrong_stack_file_is_every_problem_and_exit_2(ops: Ops, account: Any) -> None:
    before = ops.account.stack_file.read_text()
    ops.account.configure({"gpu": {"nodes": 0}, "system": {"diskGiB": 1}})
    try:
        said = ops("up", "dev", code=2).stderr
        assert "gpu.nodes" in said
        assert "diskGiB = 1" in said
    finally:
        ops.account.stack_file.write_text(before)


def test_credentials_of_another_account_touch_nothing(ops: Ops, account: Any) -> None:
    """There nothing of the stack exists, and a refresh would take it all out of the state."""
    account.answers["sts", "GetCallerIdentity"] = lambda _: xml(
        "GetCallerIdentity",
        "<GetCallerIdentityResult><Arn>arn:aws:iam::999999999999:user/x</Arn><UserId>U</UserId><Account>999999999999</Account></GetCallerIdentityResult>",
        "https://sts.amazonaws.com/doc/2011-06-15/",
    )
    for command in (["down", "dev", "--yes"], ["up", "dev", "--refresh"]):
        assert "lives in account 123456789012" in ops(*command, code=2).stderr
    account.answers.clear()
    assert json.loads(ops("status", "dev", "--json").stdout)["state"] == "up"


def test_down_asks_for_yes_where_nobody_can_be_asked(ops: Ops, account: Any) -> None:
    assert "--yes" in ops("down", "dev", code=2).stderr


def test_down_tries_again_what_aws_makes_succeed_later_and_proves_that_nothing_is_left(ops: Ops, account: Any) -> None:
    done = ops("down", "dev", "--yes", simulation=BUSY_SUBNET)
    assert "Trying again" in done.stdout
    assert "dev is down" in done.stdout
    assert ops.account.report()["leftovers"] == []
    again = json.loads(ops("down", "dev", "--yes", "--json").stdout)
    assert again["changes"] == {}
    assert again["leftovers"]["items"] == []


def test_ctrl_c_once_ends_well_and_up_goes_on(ops: Ops, account: Any) -> None:
    process = subprocess.Popen(
        ops.command("up", "dev"),
        cwd=ops.account.project,
        env=ops.environment(time_scale=0.02),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("control plane: making"):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    assert "run `python -m ops up dev` to go on" in err
    assert "Traceback" not in out + err
    assert "dev is up" in ops("up", "dev").stdout
    ops("down", "dev", "--yes")
    report = ops.account.report()
    assert (report["leftovers"], report["findings"]) == ([], [])


def test_down_goes_on_where_the_cluster_is_gone(new_account: Callable[..., simulated.Account], account: Any, tmp_path: Path) -> None:  # noqa: F811
    """The EKS cluster was deleted by hand: AWS says so, and its objects are taken out of the state instead of asked for."""
    lost = Ops(new_account())
    lost("up", "dev", limit=600)
    done = json.loads(lost("down", "dev", "--yes", "--json", limit=600).stdout)
    # The account behind the commands' own questions has no such cluster, which is how AWS answers then.
    assert done["forgotten"], "Kubernetes objects were only forgotten"
    with contextlib.suppress(KeyError):
        assert not [urn for urn in done["forgotten"] if "aws:" in urn.split("::")[2].split("$")[-1]]
    left = [item for item in lost.account.report()["leftovers"] if not item["token"].startswith("kubernetes:")]
    assert left == []
