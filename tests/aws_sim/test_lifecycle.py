"""`up`, `up` again, changes, `destroy`: the whole round in a simulated account, and the same with the worst timing AWS may have."""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.aws_sim.api_server import Kubernetes
from tests.aws_sim.simulated import LAB, ROOT, Account

pytestmark = pytest.mark.aws_sim

STRESS = LAB / "aws_sim" / "stress.yaml"
NODE_GROUP = "aws:eks/nodeGroup:NodeGroup"
# The job's name and its code's are hashes of what they are.
OF_THE_JOB = {"kubernetes:core/v1:ConfigMap", "kubernetes:ray.io/v1:RayJob"}
# What the default stack's critical path can't go below, in simulated seconds: control plane 540, GPU node group 240.
BOUND = 540 + 240


@dataclasses.dataclass
class Round:
    """What each step of the round said."""

    preview: str
    up: str
    report_up: dict[str, Any]
    again: str
    more_nodes: str
    other_type: str
    audit: str
    drift: str
    refreshed: str
    destroy: str
    left: list[str]
    report: dict[str, Any]


@pytest.fixture(scope="module")
def round_trip(new_account: Callable[..., Account]) -> Round:
    account = new_account()
    preview = account.pulumi("preview")
    up = account.up()
    report_up = account.report()
    again = account.up()
    account.configure({"gpu": {"nodes": 4}, "budget": {"maxHourlyUsd": 50}})
    more_nodes = account.pulumi("preview")
    account.configure({"gpu": {"nodes": 2, "instanceType": "g6.24xlarge"}})
    other_type = account.pulumi("preview")
    account.configure({"gpu": {"instanceType": "g6.12xlarge"}})
    audit = account.audit()
    # Someone removed the S3 endpoint by hand.
    account.sim("forget", endpoint(account))
    drift = account.pulumi("refresh", "--yes")
    refreshed = account.up()
    account.sim("put-object", bucket(account), "runs/demo/checkpoint")
    destroy = account.destroy()
    return Round(preview, up, report_up, again, more_nodes, other_type, audit, drift, refreshed, destroy, left(account), account.report())


def listed(account: Account, token: str) -> list[dict[str, Any]]:
    return [left for left in account.report()["leftovers"] if left["token"] == token]


def endpoint(account: Account) -> str:
    return str(listed(account, "aws:ec2/vpcEndpoint:VpcEndpoint")[0]["id"])


def bucket(account: Account) -> str:
    return str(listed(account, "aws:s3/bucket:Bucket")[0]["id"])


def resources(text: str) -> set[tuple[str, str]]:
    """(change, kind) of each resource line of a preview (create, update, replace, delete) or of an update (created, ...)."""
    found = re.findall(r"^ [ +~-]{1,3}((?:aws|eks|kubernetes|pulumi:providers):\S+) \S+ ((?:create|update|replace|delete)d?)\b", text, re.M)
    return {(change, kind) for kind, change in found}


def test_a_preview_of_an_empty_account_shows_everything_that_up_then_creates(round_trip: Round) -> None:
    planned = re.search(r"^ +\+ (\d+) to create", round_trip.preview, re.M)
    created = re.search(r"^ +\+ (\d+) created", round_trip.up, re.M)
    assert planned, round_trip.preview
    assert created, round_trip.up
    assert planned[1] == created[1]


def test_up_creates_everything_in_one_go(round_trip: Round) -> None:
    assert re.search(r"^ +\+ \d+ created", round_trip.up, re.M), round_trip.up
    assert "errored" not in round_trip.up


def test_up_tells_account_zone_pins_cost_and_stop_time(round_trip: Round) -> None:
    for text in ("account 123456789012, region us-west-2", "a new stack takes us-west-2a", "not pinned:", "costPerHour", "stopsAt", "kubeconfigCommand"):
        assert text in round_trip.up


def test_a_second_up_changes_nothing(round_trip: Round) -> None:
    assert re.search(r"^ +\d+ unchanged", round_trip.again, re.M)
    assert not re.search(r"^ +[+~-].* (created|updated|deleted|replaced)", round_trip.again, re.M), round_trip.again


def test_more_nodes_are_an_update_and_never_a_replacement(round_trip: Round) -> None:
    changes = resources(round_trip.more_nodes)
    assert {change for change, kind in changes if kind.startswith("aws:")} == {"update"}, round_trip.more_nodes
    assert ("update", "kubernetes:ray.io/v1:RayCluster") in changes, "more workers for them"
    assert {kind for change, kind in changes if change == "replace"} <= OF_THE_JOB, "other settings are another job"


def test_another_instance_type_replaces_the_gpu_group_and_nothing_else(round_trip: Round) -> None:
    replaced = [line for line in round_trip.other_type.splitlines() if re.search(r"\breplace\b", line) and "aws:" in line]
    assert all("aws:eks:NodeGroup" in line and "-gpu" in line for line in replaced)
    assert replaced
    others = {kind for change, kind in resources(round_trip.other_type) if change == "replace" and not kind.startswith("aws:")}
    assert others <= OF_THE_JOB, "the connection to Kubernetes and all else stays"
    assert "another instance type replaces them all and stops a running job" in round_trip.other_type, "the preview says what it means"


def test_no_dependency_is_missing(round_trip: Round) -> None:
    assert "missing dependencies: 0" in round_trip.audit, round_trip.audit


def test_a_change_from_outside_is_seen_and_repaired(round_trip: Round) -> None:
    assert "VpcEndpoint" in round_trip.drift
    assert re.search(r"^ +- 1 deleted", round_trip.drift, re.M), round_trip.drift
    assert re.search(r"^ +\+ 1 created", round_trip.refreshed, re.M), round_trip.refreshed


def test_destroy_leaves_nothing_and_aws_complains_of_nothing(round_trip: Round) -> None:
    assert round_trip.report["leftovers"] == []
    assert round_trip.report["findings"] == []
    assert round_trip.report["usd_per_hour_now"] == 0
    assert round_trip.report["unknown_tokens"].keys() <= {"aws:scheduler/schedule:Schedule"}, "the simulator has no rule for schedules"


def test_destroy_takes_every_kubernetes_object_before_the_first_node(round_trip: Round) -> None:
    assert_kubernetes_goes_first(round_trip.destroy)
    assert round_trip.left == []


def assert_kubernetes_goes_first(destroy: str) -> None:
    lines = destroy.splitlines()
    gone = [i for i, line in enumerate(lines) if re.search(r" kubernetes:\S+ .*deleted", line)]
    first = min(i for i, line in enumerate(lines) if re.search(r" aws:eks:NodeGroup .*deleting", line))
    assert gone, destroy
    assert max(gone) < first, destroy


def left(account: Account) -> list[str]:
    """What the stack's Kubernetes still holds of what the program makes there."""
    assert account.kubeconfig is not None
    kubernetes = Kubernetes(account.kubeconfig)
    kinds = ("apis/ray.io/v1/rayclusters", "apis/ray.io/v1/rayjobs", "apis/rbac.authorization.k8s.io/v1/clusterroles", "api/v1/namespaces", "api/v1/secrets")
    names = [item["metadata"]["name"] for kind in kinds for item in kubernetes.items(kind)]
    return [name for name in names if name == "ray" or "ray-train-efa" in name or "helm" in name]


def test_nothing_stands_between_network_control_plane_addons_and_gpu_nodes(round_trip: Round) -> None:
    run = round_trip.report_up["runs"][-1]
    steps = {(step["token"].split(":")[-1], step["name"]): step for step in run["timeline"]}
    begin = min(step["start"] for step in steps.values())

    def step(kind: str, name: str = "") -> dict[str, Any]:
        return next(found for (token, called), found in steps.items() if token == kind and name in called)

    vpc, subnet, cluster, gpu = step("Vpc"), step("Subnet", "control-plane-0"), step("Cluster"), step("NodeGroup", "-gpu")
    addons = max(found["end"] for (kind, name), found in steps.items() if kind == "Addon" and "coredns" not in name)
    assert vpc["start"] == begin
    assert subnet["start"] == vpc["end"]
    assert cluster["start"] - subnet["end"] <= 10, "its role, policy and log group come at the same time as the subnets"
    assert gpu["start"] == addons, "nodes need the add-ons, and wait for nothing else of ours"
    assert addons - cluster["end"] <= 40, "all add-ons at once"
    assert gpu["end"] == begin + run["seconds"], "nothing comes after the GPU nodes"
    assert run["seconds"] <= BOUND * 1.1


def test_both_node_groups_are_deleted_at_the_same_time(round_trip: Round) -> None:
    deleted = {step["name"]: step for step in round_trip.report["runs"][-1]["timeline"] if step["token"] == NODE_GROUP and step["op"] == "delete"}
    starts = {step["start"] for step in deleted.values()}
    assert len(deleted) == 2
    assert len(starts) == 1, "one after the other takes three and a half minutes more"


QUOTAS = {name: {"code": code, "value": 10_000} for name, code in {"g": "L-DB2E81BA", "p": "L-417A185B", "g-spot": "L-3819A6DF"}.items()}
RESERVATION = {"id": "cr-0123456789abcdef0"}


@pytest.mark.parametrize(
    "settings",
    [
        {"gpu": {"minNodes": 0, "maxNodes": 2}, "budget": {"idleStopMinutes": 10, "stopAfter": "8h"}},
        {"gpu": {"capacity": {"kind": "spot"}}},
        {"gpu": {"instanceType": "p5.48xlarge", "nodes": 4, "capacity": {"kind": "reservation", **RESERVATION}}, "network": {"zone": "us-west-2b"}},
        {"gpu": {"instanceType": "p4d.24xlarge", "capacity": {"kind": "capacity-block", **RESERVATION}}, "network": {"zone": "us-west-2b"}},
        {"gpu": {"instanceType": "g6e.48xlarge"}, "storage": {"fsx": {"capacityGiB": 1200}}},
    ],
    ids=["autoscaled", "spot", "p5-reservation", "p4d-block", "g6e-fsx"],
)
def test_every_kind_of_stack_survives_the_worst_legal_timing(new_account: Callable[..., Account], settings: dict[str, Any]) -> None:
    account = new_account({**settings, "storage": {"onDestroy": "delete", **settings.get("storage", {})}})
    slow = yaml.safe_load(STRESS.read_text()) | {"quotas": QUOTAS}
    up = account.up(simulation=slow)
    assert re.search(r"^ +\+ \d+ created", up, re.M), up
    assert "missing dependencies: 0" in account.audit()
    assert re.search(r"^ +\d+ unchanged", account.up(simulation=slow), re.M)
    assert_kubernetes_goes_first(account.destroy(simulation=slow))
    report = account.report()
    assert report["leftovers"] == []
    assert report["findings"] == []
    assert left(account) == []


def test_the_default_stack_survives_the_worst_legal_timing(new_account: Callable[..., Account]) -> None:
    account = new_account()
    assert re.search(r"^ +\+ \d+ created", account.up(simulation=STRESS), re.M)
    account.destroy(simulation=STRESS)
    report = account.report()
    assert (report["leftovers"], report["findings"]) == ([], [])


def test_an_interrupted_up_goes_on_where_it_stopped(new_account: Callable[..., Account]) -> None:
    account = new_account()
    command = account.command("up", "--yes", "--skip-preview")
    process = subprocess.Popen(
        command, cwd=account.project, env=account.environment(None, time_scale=0.02), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.search(r"aws:eks:Cluster .*creating", line):
            process.send_signal(signal.SIGINT)
            break
    seen += process.stdout.readlines()
    assert process.wait() != 0, "it was told to stop:\n" + "".join(seen)
    up = account.up()
    assert re.search(r"^ +\+ \d+ created", up, re.M), up
    assert "missing dependencies: 0" in account.audit()
    account.destroy()
    report = account.report()
    assert (report["leftovers"], report["findings"]) == ([], [])


@pytest.mark.parametrize("at", ["start", "end"])
def test_missing_capacity_is_explained_and_the_next_up_goes_on(new_account: Callable[..., Account], at: str) -> None:
    account = new_account()
    fault = {"token": NODE_GROUP, "name": "gpu", "op": "create", "error": "InsufficientInstanceCapacity", "times": 1, "at": at}
    failed = account.up(simulation={"faults": [fault]}, code=None)
    assert "EC2 has no capacity for 2 x g6.12xlarge in us-west-2a" in failed, failed
    assert "network.zone" in failed
    assert "gpu.placementGroup: false" in failed
    urn = re.search(r"pulumi up --replace '(urn:[^']+)'", failed)
    assert urn, failed
    again = account.pulumi("up", "--yes", "--skip-preview", *(["--replace", urn[1]] if at == "end" else []))
    assert "errored" not in again
    assert re.search(r"^ +\d+ unchanged", account.up(), re.M)
    account.destroy()
    report = account.report()
    assert (report["leftovers"], report["findings"]) == ([], [])


def test_another_instance_type_and_size_come_with_one_up(new_account: Callable[..., Account]) -> None:
    quotas = {"quotas": QUOTAS}
    account = new_account({"storage": {"onDestroy": "delete"}, "budget": {"stopAfter": "8h"}})
    account.up(simulation=quotas)
    schedule = listed(account, "aws:scheduler/schedule:Schedule")
    account.configure({"gpu": {"instanceType": "p5.48xlarge", "nodes": 4}})
    changed = account.up(simulation=quotas)
    replaced = {kind for change, kind in resources(changed) if change == "replaced"}
    assert replaced == {"aws:eks:NodeGroup", *OF_THE_JOB}, changed
    assert ("updated", "kubernetes:ray.io/v1:RayCluster") in resources(changed)
    assert {left["id"] for left in listed(account, NODE_GROUP)} >= {"ray-train-efa-dev:gpu-p5-48xlarge"}
    assert listed(account, "aws:scheduler/schedule:Schedule") == schedule, "the stop time does not move"
    assert re.search(r"^ +\d+ unchanged", account.up(simulation=quotas), re.M)
    account.configure({"budget": {"stopAfter": "2h"}})
    moved = account.up(simulation=quotas)
    assert re.search(r"^ +\+ 1 created", moved, re.M), "another stopAfter is another schedule"
    assert re.search(r"^ +- 1 deleted", moved, re.M)
    account.destroy(simulation=quotas)
    report = account.report()
    assert (report["leftovers"], report["findings"]) == ([], [])


def changed(text: str) -> list[str]:
    """The lines of a summary that say what an update did."""
    assert re.search(r"^ +\d+ unchanged", text, re.M), text
    return re.findall(r"^ +[+~-]+ ?\d+ (?:created|updated|deleted|replaced)$", text, re.M)


def test_fr03_the_chosen_zone_stays_when_aws_offers_others_and_writing_it_down_changes_nothing(new_account: Callable[..., Account]) -> None:
    unpinned = {"storage": {"onDestroy": "delete"}, "budget": {"stopAfter": "8h"}}
    account = new_account(unpinned, workloads=False)
    assert "a new stack takes us-west-2a" in account.up()
    elsewhere = account.up(simulation={"offerings": {"us-west-2": {"g6.12xlarge": ["b", "c"]}}})
    assert "a new stack takes us-west-2b" in elsewhere, "the case is real: the program would choose another zone now"
    assert changed(elsewhere) == []
    assert re.search(r'zone +: "us-west-2a"', elsewhere), "the output tells the zone that is"
    account.configure({"network": {"zone": "us-west-2a"}})
    assert changed(account.up()) == []


def test_another_zone_moves_the_nodes_and_keeps_the_control_plane(new_account: Callable[..., Account]) -> None:
    account = new_account()
    account.up()
    account.configure({"network": {"zone": "us-west-2b"}})
    moved = account.up()
    assert "errored" not in moved
    assert not re.search(r"aws:eks:Cluster .*replac", moved), moved
    subnets = {left["name"]: left for left in listed(account, "aws:ec2/subnet:Subnet")}
    assert len(subnets) == 4
    account.destroy()
    report = account.report()
    assert (report["leftovers"], report["findings"]) == ([], [])


def test_a_destroy_whose_kubernetes_is_gone_goes_on_as_the_docs_say(new_account: Any) -> None:
    account = new_account({"storage": {"onDestroy": "delete"}})
    account.up()
    new_account.stop_kubernetes()
    assert "cluster is unreachable" in account.destroy(code=1)
    block = re.search(r"\*The cluster is gone.*?```sh\n(.*?)```", (ROOT / "docs" / "aws.md").read_text(), re.S)
    assert block
    said = account.shell(block[1].replace("pulumi destroy", "pulumi destroy --yes --skip-preview"))
    assert "resources in the stack have been deleted" in said, said
    report = account.report()
    assert (report["leftovers"], report["findings"]) == ([], [])


def test_two_stacks_live_side_by_side(new_account: Callable[..., Account]) -> None:
    one = new_account(workloads=False)  # each would have a Kubernetes of its own
    two = dataclasses.replace(one, stack="two")
    two.write({"storage": {"onDestroy": "delete"}, "owner": "someone else"})
    two.init()
    one.up()
    two.up()
    two.destroy()
    assert re.search(r"^ +\d+ unchanged", one.up(), re.M), "destroying one touches nothing of the other"
    one.destroy()
    report = one.report()
    assert (report["leftovers"], report["findings"]) == ([], [])


def test_a_kept_bucket_stays_with_its_checkpoints(new_account: Callable[..., Account]) -> None:
    account = new_account({"storage": {"onDestroy": "keep"}}, workloads=False)
    up = account.up()
    assert "stays with everything in it" in up
    name = bucket(account)
    account.sim("put-object", name, "runs/demo/checkpoint")
    account.destroy()
    left = {left["token"] for left in account.report()["leftovers"]}
    assert left, "the bucket is there"
    assert all(token.startswith("aws:s3/") for token in left), left
