"""`plan`: what would be built and cost; offline with neither account nor engine."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import config
from ops import cli, plan, recording, target
from ops.errors import BadInput
from tests.ops.account_server import write_stack

ROOT = Path(plan.__file__).parents[1]


@pytest.fixture(autouse=True)
def stack(tmp_path, monkeypatch):
    monkeypatch.setattr(target, "ROOT", tmp_path)
    (tmp_path / "__main__.py").symlink_to(ROOT / "__main__.py")
    write_stack(tmp_path, {"gpu": {"instanceType": "g6.12xlarge", "nodes": 2}, "budget": {"stopAfter": "8h"}})
    return tmp_path


def kinds(found):
    return {(item.part, item.kind): item.count for item in found.planned}


def test_offline_it_needs_no_account_no_engine_and_no_network(stack):
    """As a newcomer runs it: no credentials, no pulumi on PATH, and every proxy a dead end."""
    write_stack(stack)
    environment = {
        "PATH": "/nowhere",
        "HOME": str(stack),
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "ops", "plan", "dev", "--offline", "--json"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["basis"] == "offline"
    assert {"part": "GPU nodes", "kind": "NodeGroup", "op": "create", "count": 1} in document["planned"]


def test_every_part_of_the_program_is_in_the_plan_and_nothing_stays_of_the_recording():
    before = dict(os.environ)
    found = kinds(plan.plan("dev", offline=True))
    assert found["network", "Subnet"] == 4
    assert found["control plane", "Cluster"] == 1
    assert found["auto-stop", "Schedule"] == 1
    assert found["Ray cluster", "RayCluster"] == 1
    assert {part for part, _ in found} >= {"network", "storage", "control plane", "system nodes", "GPU nodes", "KubeRay operator", "Ray cluster"}
    assert "other" not in {part for part, _ in found}
    assert dict(os.environ) == before
    assert kinds(plan.plan("dev", offline=True)) == found, "a second recording in the same process"


def test_a_stack_on_an_existing_cluster_has_no_bill(stack):
    write_stack(stack, {"cluster": {"kind": "existing", "context": "kind"}, "storage": {"hostPath": "/var/runs"}}, region=None)
    found = plan.plan("dev", offline=True)
    assert found.cost is None
    assert {part for part, _ in kinds(found)} == {"Kubernetes access", "KubeRay operator", "Ray cluster"}


def test_encrypted_settings_need_no_passphrase(stack):
    (stack / "Pulumi.dev.yaml").write_text("encryptionsalt: v1:x\nconfig:\n  aws:region: us-west-2\n  ray-train-efa:huggingFaceToken:\n    secure: v1:abc\n")
    found = plan.plan("dev", offline=True)
    assert ("Ray cluster", "Secret") in kinds(found)
    assert "v1:abc" not in repr(found)


def test_what_the_program_refuses_is_refused_in_its_own_words(stack):
    write_stack(stack, {"gpu": {"instanceType": "g6.4xlarge"}})
    with pytest.raises(BadInput, match=r"has no EFA; types of this family that have it: g6\.12xlarge"):
        plan.plan("dev", offline=True)
    write_stack(stack, {"budget": {"maxHourlyUsd": 5}})
    with pytest.raises(BadInput, match=r"maxHourlyUsd = 5: this stack would cost \$9.65 an hour"):
        plan.plan("dev", offline=True)


def test_a_type_that_the_offline_list_lacks_is_said(stack):
    write_stack(stack, {"gpu": {"instanceType": "g99.12xlarge"}})
    with pytest.raises(BadInput, match="is not in the list that `plan --offline` uses"):
        plan.plan("dev", offline=True)


def test_the_offline_list_has_every_type_of_the_price_table():
    import prices

    listed = json.loads(plan.INSTANCES.read_text())["types"]
    assert set(prices.table()["instances"]) <= set(listed)
    vcpus, gib, gpus, _, efa, cards, architecture = listed["g6.12xlarge"]
    assert (vcpus, gib, gpus, efa, cards, architecture) == (48, 192.0, 4, 1, 1, "x86_64")


def stack_of(**settings):
    return config.load(settings, "us-west-2")


def test_the_cost_until_the_stop_and_over_a_weekend():
    found = plan.cost_of(stack_of(budget={"stopAfter": "8h"}), "us-west-2")
    assert found.an_hour == pytest.approx(9.65, abs=0.01)
    assert found.until_stop == pytest.approx(8 * found.an_hour, abs=0.01)
    assert found.after_stop_an_hour == pytest.approx(0.36, abs=0.01), "control plane, NAT gateway, system node"
    gpu = found.an_hour - found.after_stop_an_hour
    assert found.weekend == pytest.approx(8 * gpu + 63 * found.after_stop_an_hour, abs=0.02)


def test_without_a_stop_a_weekend_costs_all_of_it():
    found = plan.cost_of(stack_of(), "us-west-2")
    assert found.until_stop is None
    assert found.weekend == pytest.approx(63 * found.an_hour, abs=0.02)


def test_a_stop_after_the_weekend_saves_nothing_on_it():
    assert plan.cost_of(stack_of(budget={"stopAfter": "30d"}), "us-west-2").weekend == plan.cost_of(stack_of(), "us-west-2").weekend
    assert datetime.timedelta(hours=63) == plan.WEEKEND


def test_an_unknown_price_is_named(stack, capsys):
    write_stack(stack, {"gpu": {"instanceType": "p5e.48xlarge"}})
    assert plan.plan("dev", offline=True).cost.unknown == ("p5e.48xlarge",)
    assert cli.main(["plan", "dev", "--offline"]) == 0
    assert "without p5e.48xlarge, whose price is not known: `python -m ops cost dev --refresh`" in " ".join(capsys.readouterr().out.split())


def test_a_preview_counts_resources_and_not_what_groups_them():
    """As the engine tells its steps; a replacement is told of in up to three."""
    top = "urn:pulumi:dev::ray-train-efa::ray-train-efa:infra:GpuNodes"
    steps = [
        (f"{top}::gpu", "ray-train-efa:infra:GpuNodes", "create"),
        (f"{top}$aws:eks/nodeGroup:NodeGroup::gpu", "aws:eks/nodeGroup:NodeGroup", "create-replacement"),
        (f"{top}$aws:ec2/launchTemplate:LaunchTemplate::gpu", "aws:ec2/launchTemplate:LaunchTemplate", "update"),
        (f"{top}$aws:ec2/placementGroup:PlacementGroup::gpu", "aws:ec2/placementGroup:PlacementGroup", "same"),
        ("urn:pulumi:dev::ray-train-efa::pulumi:providers:aws::default", "pulumi:providers:aws", "create"),
    ]
    assert plan._counted(steps) == (plan.Planned("GPU nodes", "LaunchTemplate", "update", 1), plan.Planned("GPU nodes", "NodeGroup", "replace", 1))


def test_a_new_stack_is_checked_against_the_account(account, stack, monkeypatch):
    monkeypatch.setattr(plan, "_engine", lambda _: None)
    found = plan.plan("dev")
    assert found.basis == "account"
    assert any("account 123456789012, region us-west-2" in line for line in found.said)
    write_stack(stack, allowedAccountIds=["999999999999"])
    with pytest.raises(BadInput, match="aws:allowedAccountIds"):
        plan.plan("dev")


def test_the_table_and_the_sums_are_shown(capsys):
    assert cli.main(["plan", "dev", "--offline"]) == 0
    shown = capsys.readouterr().out
    for text in ("network", "GPU nodes", "until auto-stop (8h)", "forgotten from Friday 18:00 to Monday 09:00", "prices of"):
        assert text in shown


def test_a_program_that_hangs_is_a_sentence(stack, monkeypatch):
    (stack / "__main__.py").unlink()
    (stack / "__main__.py").write_text("import threading\nthreading.Event().wait(3)\n")
    monkeypatch.setattr(recording, "PROGRAM_SECONDS", 0.2)
    with pytest.raises(BadInput, match="did not end within"):
        plan.plan("dev", offline=True)
