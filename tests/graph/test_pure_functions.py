"""Every document that can be wrong, made by a pure function: interfaces, subnets, policies, user data, bill, schedule."""

import base64
import dataclasses
import datetime
import email
import ipaddress
import json
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from recorder import INSTANCES, ROOT, SHAPES

import config
import naming
import prices
import versions
from infra import autostop, efa, facts, identity, network, node_groups, storage


def shape(name):
    return efa.interfaces(INSTANCES[name][4], INSTANCES[name][5], ["sg-1"])


@pytest.mark.parametrize("name", ["g6.12xlarge", "g6.48xlarge"])
def test_a_type_with_one_card_has_one_interface_that_is_ena_and_efa(name):
    assert shape(name) == [{"network_card_index": 0, "device_index": 0, "interface_type": "efa", "delete_on_termination": "true", "security_groups": ["sg-1"]}]


@pytest.mark.parametrize(("name", "devices"), [("g6e.48xlarge", 4), ("p4d.24xlarge", 4), ("p5.48xlarge", 32), ("p5en.48xlarge", 16)])
def test_a_type_with_many_cards_has_one_address_and_efa_only_on_each_card(name, devices):
    layout = shape(name)
    assert [(i["network_card_index"], i["device_index"], i["interface_type"]) for i in layout[:3]] == [
        (0, 0, "interface"),
        (0, 1, "efa-only"),
        (1, 0, "efa-only"),
    ]
    assert efa.efa_count(layout) == devices
    assert sorted({i["network_card_index"] for i in layout}) == list(range(devices))
    assert sum(i["interface_type"] != "efa-only" for i in layout) == 1, "one address a node"


def test_fr18_the_count_is_the_efa_maximum_and_not_the_number_of_cards():
    assert efa.efa_count(efa.interfaces(4, 8, [])) == 4
    b300 = shape("p6-b300.48xlarge")
    assert efa.efa_count(b300) == 16
    assert [i["interface_type"] for i in b300 if i["network_card_index"] == 0] == ["interface"], "card 0 of p6-b300 has no EFA"


@given(devices=st.integers(1, 64), cards=st.integers(1, 64))
def test_interfaces_never_exceed_what_the_type_takes(devices, cards):
    layout = efa.interfaces(devices, cards, ["sg"])
    places = [(i["network_card_index"], i["device_index"]) for i in layout]
    assert len(set(places)) == len(places), "two interfaces in one place"
    assert (0, 0) in places, "no primary interface"
    assert 1 <= efa.efa_count(layout) <= devices
    assert efa.efa_count(layout) == min(devices, cards)
    assert all(card < cards for card, _ in places)
    assert layout[0]["interface_type"] != "efa-only", "the primary interface can't be efa-only"
    assert all(i["security_groups"] == ["sg"] and i["delete_on_termination"] == "true" for i in layout)
    assert not any({"subnet_id", "associate_public_ip_address"} & set(i) for i in layout), "EKS forbids them"


@pytest.mark.parametrize(("devices", "cards"), [(0, 1), (0, 4), (1, 0)])
def test_a_type_without_efa_has_no_layout(devices, cards):
    with pytest.raises(ValueError, match="no EFA"):
        efa.interfaces(devices, cards, [])


@given(prefix=st.integers(16, 24), third=st.integers(0, 255))
def test_subnets_lie_in_the_vpc_and_never_overlap(prefix, third):
    vpc = ipaddress.ip_network(f"10.{third}.0.0/{prefix}", strict=False)
    plan = network.subnets(str(vpc))
    parts = [ipaddress.ip_network(cidr) for cidr in (plan.nodes, plan.public, *plan.control_plane)]
    assert all(part.subnet_of(vpc) for part in parts)
    assert not any(a.overlaps(b) for i, a in enumerate(parts) for b in parts[:i])
    assert parts[0].prefixlen == prefix + 1, "nodes and pods get half of the VPC"
    assert all(part.prefixlen == 28 for part in parts[1:])


POLICIES = {
    "training": identity.training_policy("arn:aws:s3:::bucket", "runs"),
    "autoscaler": identity.autoscaler_policy("aws", "us-west-2", "123456789012", "demo"),
    "stop": identity.stop_policy("aws", "us-west-2", "123456789012", "demo", "gpu-g6-12xlarge"),
}
# Calls for which AWS knows no resource: https://docs.aws.amazon.com/service-authorization/latest/reference/
WITHOUT_RESOURCE = re.compile(r"(autoscaling|ec2):Describe\w+|ec2:GetInstanceTypesFromInstanceRequirements")


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_has_a_wildcard_where_aws_allows_less(name):
    for statement in POLICIES[name]["Statement"]:
        assert not [a for a in statement["Action"] if "*" in a], "a wildcard action"
        if "*" in statement["Resource"]:
            assert all(WITHOUT_RESOURCE.fullmatch(action) for action in statement["Action"]), f"{statement['Sid']} could name a resource"
    assert len(json.dumps(POLICIES[name])) < 6144


def allows(policy, action, resource, **context):
    """A small reading of IAM: enough for the documents above."""

    def like(pattern, text):
        return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text)

    for statement in policy["Statement"]:
        wanted = statement.get("Condition", {}).get("StringLikeIfExists", {})
        if any(key in context and not any(like(p, context[key]) for p in patterns) for key, patterns in wanted.items()):
            continue
        if action in statement["Action"] and any(like(r, resource) for r in statement["Resource"]):
            return True
    return False


def test_training_reaches_its_prefix_and_nothing_else():
    policy = POLICIES["training"]
    assert allows(policy, "s3:PutObject", "arn:aws:s3:::bucket/runs/a/b")
    assert allows(policy, "s3:ListBucket", "arn:aws:s3:::bucket", **{"s3:prefix": "runs/a/"})
    assert allows(policy, "s3:ListBucket", "arn:aws:s3:::bucket"), "HeadBucket carries no prefix"
    assert not allows(policy, "s3:PutObject", "arn:aws:s3:::bucket/other/a")
    assert not allows(policy, "s3:PutObject", "arn:aws:s3:::bucket/runs-of-others/a")
    assert not allows(policy, "s3:ListBucket", "arn:aws:s3:::bucket", **{"s3:prefix": "other/"})
    assert not allows(policy, "s3:GetObject", "arn:aws:s3:::elsewhere/runs/a")
    assert not any("Bucket" in a for s in policy["Statement"] for a in s["Action"] if a != "s3:ListBucket"), "no right over the bucket itself"


def test_the_stop_role_resizes_one_group_of_one_cluster():
    policy = POLICIES["stop"]
    arn = "arn:aws:eks:us-west-2:123456789012:nodegroup/demo/{}/some-id"
    assert allows(policy, "eks:UpdateNodegroupConfig", arn.format("gpu-g6-12xlarge"))
    assert not allows(policy, "eks:UpdateNodegroupConfig", arn.format("system"))
    assert not allows(policy, "eks:DeleteNodegroup", arn.format("gpu-g6-12xlarge"))


def test_roles_trust_exactly_one_service():
    assert identity.pod_trust()["Statement"][0]["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    trust = identity.scheduler_trust("aws", "us-west-2", "123456789012")["Statement"][0]
    assert trust["Condition"]["StringEquals"]["aws:SourceAccount"] == "123456789012"
    assert trust["Principal"] == {"Service": "scheduler.amazonaws.com"}


def test_a_bucket_answers_over_tls_only():
    (statement,) = identity.tls_only_policy("arn:aws:s3:::b")["Statement"]
    assert (statement["Effect"], statement["Principal"]) == ("Deny", "*")
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert statement["Resource"] == ["arn:aws:s3:::b", "arn:aws:s3:::b/*"]


def test_unfinished_uploads_and_old_checkpoints_do_not_stay():
    rules = {rule["id"]: rule for rule in storage.lifecycle_rules("runs", 30)}
    assert rules["unfinished-uploads"]["abort_incomplete_multipart_upload"] == {"days_after_initiation": 2}
    assert rules["old-checkpoints"] == {"id": "old-checkpoints", "status": "Enabled", "filter": {"prefix": "runs/"}, "expiration": {"days": 30}}
    assert "old-checkpoints" not in {rule["id"] for rule in storage.lifecycle_rules("runs", None)}, "nothing of the user's is deleted unasked"


def test_user_data_is_a_mime_part_that_eks_merges():
    message = email.message_from_bytes(base64.b64decode(node_groups.raid0_user_data()))
    (part,) = message.get_payload()
    assert part.get_content_type() == "application/node.eks.aws"
    node = yaml.safe_load(part.get_payload())
    assert (node["apiVersion"], node["kind"]) == ("node.eks.aws/v1alpha1", "NodeConfig")
    assert node["spec"] == {"instance": {"localStorage": {"strategy": "RAID0"}}}


def instance(name):
    vcpus, gib, gpus, gpu_gib, devices, cards, architecture = INSTANCES[name]
    return facts.Instance(name, vcpus, gib, gpus, gpu_gib, devices, cards, (architecture,))


@pytest.mark.parametrize("name", SHAPES)
def test_the_autoscaler_counts_gpus_and_efa_of_a_node_that_does_not_exist(name):
    kind = instance(name)
    tags = node_groups.autoscaler_tags("demo", kind, efa.efa_count(shape(name)), node_groups.labels("gpu", gpu=True))
    template = "k8s.io/cluster-autoscaler/node-template"
    assert tags[f"{template}/resources/nvidia.com/gpu"] == str(INSTANCES[name][2])
    assert tags[f"{template}/resources/vpc.amazonaws.com/efa"] == str(INSTANCES[name][4])
    assert tags[f"{template}/taint/nvidia.com/gpu"] == "present:NoSchedule"
    assert tags[f"{template}/label/nvidia.com/gpu.present"] == "true"
    assert tags["k8s.io/cluster-autoscaler/demo"] == "owned"


def stack(**sections):
    return config.load(sections, "us-west-2")


def account(gpu="g6.12xlarge", system="m7i.xlarge", **changes):
    zones = tuple(facts.Zone(f"us-west-2{letter}", f"usw2-az{i}") for i, letter in enumerate("abc", 1))
    everywhere = tuple(zone.name for zone in zones)
    found = facts.Facts("123456789012", "aws", "us-west-2", instance(gpu), instance(system), zones, everywhere, everywhere, 10_000.0)
    return dataclasses.replace(found, **changes)


def test_the_default_stack_fits():
    assert facts.problems(stack(), account()) == []


def test_a_pod_that_prepares_data_must_find_room_on_a_system_node():
    """The job would wait for it for ever, before its first step."""
    wanted = {"gpu": {"minNodes": 0, "maxNodes": 2}, "training": {"prepare": {"sources": ["s3://b/text"], "tokenizer": "train:4096"}}}
    (problem,) = facts.problems(stack(**wanted), account())
    assert "training.prepare wants a pod with 1 CPUs and 4Gi on a system node, and m7i.xlarge has 1 CPUs and 2.3 GiB left" in problem
    for way_out in ({"system": {"nodes": 2}}, {"ray": {"workerMemory": "2Gi"}}):
        assert facts.problems(stack(**wanted, **way_out), account()) == [], "the way out must be a way out"
    assert facts.problems(stack(**wanted, system={"instanceType": "m7i.2xlarge"}), account(system="m7i.2xlarge")) == []
    assert facts.problems(stack(**{**wanted, "gpu": {"nodes": 2}}), account()) == [], "GPU nodes that are there prepare themselves"


def test_a_head_that_does_not_fit_the_system_type_is_a_config_error():
    (problem,) = facts.problems(stack(ray={"headMemory": "14Gi"}), account())
    assert "ray-train-efa:ray.headMemory = '14Gi' does not fit m7i.xlarge" in problem
    limit = int(re.search(r"use (\d+)Gi or less", problem)[1])
    assert facts.problems(stack(ray={"headMemory": f"{limit}Gi"}), account()) == [], "the way out must be a way out"
    assert limit >= 8, "the default head fits the default type"
    assert facts.problems(stack(ray={"headMemory": "14Gi"}, system={"instanceType": "m7i.2xlarge"}), account(system="m7i.2xlarge")) == []


def test_more_cpus_than_the_system_type_has_are_refused():
    (problem,) = facts.problems(stack(ray={"headCpu": 4}), account())
    assert "ray.headCpu = 4 does not fit" in problem


def test_arm_types_are_refused_for_the_images_are_x86():
    (problem,) = facts.problems(stack(system={"instanceType": "m7g.xlarge"}), account(system="m7g.xlarge"))
    assert "system.instanceType = 'm7g.xlarge' is arm64" in problem


def test_a_gpu_type_without_a_gpu_is_refused():
    found = facts.problems(stack(gpu={"instanceType": "m7i.xlarge"}), account(gpu="m7i.xlarge"))
    assert any("no whole NVIDIA GPU" in line for line in found)


def test_an_old_cni_is_refused_where_efa_only_interfaces_are_needed():
    old = stack(gpu={"instanceType": "p5.48xlarge"}, pins={"addonVersions": {"vpc-cni": "v1.18.3-eksbuild.1"}})
    assert any("does not know the efa-only interfaces" in line for line in facts.problems(old, account(gpu="p5.48xlarge")))
    new = stack(gpu={"instanceType": "p5.48xlarge"}, pins={"addonVersions": {"vpc-cni": "v1.20.4-eksbuild.2"}})
    assert facts.problems(new, account(gpu="p5.48xlarge")) == []
    assert facts.problems(stack(pins={"addonVersions": {"vpc-cni": "v1.18.3-eksbuild.1"}}), account()) == [], "one card has no efa-only interface"


@pytest.mark.parametrize(
    ("gpu", "code"),
    [
        ({"instanceType": "g6.12xlarge"}, "L-DB2E81BA"),
        ({"instanceType": "p4d.24xlarge"}, "L-417A185B"),
        ({"instanceType": "p5.48xlarge"}, "L-417A185B"),
        ({"instanceType": "g6.12xlarge", "capacity": {"kind": "spot"}}, "L-3819A6DF"),
        ({"instanceType": "p4d.24xlarge", "capacity": {"kind": "spot"}}, "L-7212CCBC"),
        ({"instanceType": "p5.48xlarge", "capacity": {"kind": "spot"}}, "L-C4BD4855"),
        ({"capacity": {"kind": "reservation", "id": "cr-0123456789abcdef0"}}, None),
    ],
)
def test_each_family_has_its_quota(gpu, code):
    assert facts.quota_code(stack(gpu=gpu, network={"zone": "us-west-2a"})) == code


def test_zones_are_chosen_the_same_each_time_and_told_apart_by_id():
    found = account(gpu_zones=("us-west-2b", "us-west-2c"))
    assert facts.choose_zones(stack(), found) == facts.Zones("us-west-2b", ("us-west-2b", "us-west-2a"))
    turned = dataclasses.replace(found, zones=tuple(reversed(found.zones)), gpu_zones=("us-west-2c", "us-west-2b"))
    assert facts.choose_zones(stack(), turned) == facts.choose_zones(stack(), found)
    assert facts.choose_zones(stack(network={"zone": "us-west-2c"}), found).nodes == "us-west-2c"


def test_no_common_zone_is_said_before_anything_is_made():
    (problem,) = facts.problems(stack(), account(gpu_zones=("us-west-2a",), system_zones=("us-west-2b",)))
    assert "no zone of us-west-2 offers it together with m7i.xlarge" in problem


def test_a_region_with_one_zone_for_control_planes_is_refused():
    zones = (facts.Zone("us-west-1a", "usw1-az1"), facts.Zone("us-west-1b", "usw1-az2"))
    assert any("a control plane needs two zones" in line for line in facts.problems(stack(), account(zones=zones)))


def test_the_bill_of_the_default_stack_is_the_sum_of_its_parts():
    bill = prices.hourly(stack(), "us-west-2", prices.table())
    by_hand = 0.10 + 0.045 + 0.005 + 0.2016 + 2 * 4.6016 + 100 * 0.08 / 730 + 2 * (200 * 0.08 + 375 * 0.04) / 730
    assert bill.usd_hour == pytest.approx(by_hand, abs=1e-3)
    assert bill.unknown == ()


def test_autoscaled_groups_are_counted_at_their_largest_and_blocks_not_at_all():
    table = prices.table()
    assert prices.hourly(stack(gpu={"minNodes": 0, "maxNodes": 4}), "us-west-2", table).usd_hour > 4 * 4.6016
    block = stack(gpu={"instanceType": "p5.48xlarge", "capacity": {"kind": "capacity-block", "id": "cr-0123456789abcdef0"}}, network={"zone": "us-west-2a"})
    assert prices.hourly(block, "us-west-2", table).usd_hour < 1


def test_a_price_that_is_not_known_is_never_guessed():
    bill = prices.hourly(stack(gpu={"instanceType": "g7e.48xlarge"}), "us-west-2", prices.table())
    assert bill.unknown == ("g7e.48xlarge",)
    elsewhere = prices.hourly(stack(), "eu-central-1", prices.table())
    assert elsewhere.unknown == ("region eu-central-1",)
    assert elsewhere.usd_hour == 0
    limited = stack(gpu={"instanceType": "g7e.48xlarge"}, budget={"maxHourlyUsd": 1000})
    assert "can't be held: no price of g7e.48xlarge" in prices.over_budget(limited, prices.hourly(limited, "us-west-2", prices.table()))


def test_every_price_has_a_source_and_a_date():
    table = prices.table()
    datetime.date.fromisoformat(table["asOf"])
    assert {"instances", *table["hourly"], *table["monthly"]} == set(table["sources"])
    assert all(price > 0 for price in table["instances"].values())


def test_every_pin_says_where_it_comes_from():
    lines = (ROOT / "versions.py").read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"(    )?[\"A-Z].*(= \"|: \().*\d", line):
            above = next(text for text in reversed(lines[:number]) if not re.match(r"(    )?[\"A-Z].*(= \"|: \()", text))
            assert above.lstrip().startswith("#") or above.endswith("{"), f"versions.py: {line} has no source above it"
    assert all(re.fullmatch(r"v?\d+\.\d+\.\d+", version) for _, version in versions.CHARTS.values())


def test_the_stop_time_is_utc_and_in_the_schedulers_form():
    here = datetime.timezone(datetime.timedelta(hours=2))
    now = datetime.datetime(2026, 11, 30, 23, 30, tzinfo=here)
    assert autostop.stop_expression(now, datetime.timedelta(hours=8)) == "at(2026-12-01T05:30:00)"


def test_the_stop_request_is_spelt_as_the_scheduler_wants_it():
    assert autostop.stop_request("demo", "gpu-g6-12xlarge", False) == {
        "ClusterName": "demo",
        "NodegroupName": "gpu-g6-12xlarge",
        "ScalingConfig": {"MinSize": 0, "DesiredSize": 0},
    }


def test_an_autoscaled_group_is_barred_when_it_is_stopped():
    taints = autostop.stop_request("demo", "gpu-g6-12xlarge", True)["Taints"]
    assert taints == {"AddOrUpdateTaints": [{"Key": "ray-train-efa/stopped", "Value": "budget", "Effect": "NO_SCHEDULE"}]}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            "AsgInstanceLaunchFailures: ... InsufficientInstanceCapacity - We currently do not have sufficient capacity",
            "EC2 has no capacity for 2 x g6.12xlarge in us-west-2a",
        ),
        ("VcpuLimitExceeded - You have requested more vCPU capacity", "quota is too small"),
        ("NodeCreationFailure: Instances failed to join the kubernetes cluster", "did not join the cluster"),
        ("timeout while waiting for state to become 'ACTIVE'", "took longer than 40m"),
    ],
)
def test_a_failed_gpu_group_says_what_to_do_next(error, says):
    text = node_groups.ways_out([error], "urn:gpu", stack().gpu, "us-west-2a")
    assert says in text
    assert "pulumi up --replace 'urn:gpu'" in text, "an update in place repairs nothing"


def test_fr03_capacity_errors_name_zone_type_and_two_ways_out():
    text = node_groups.ways_out(["InsufficientInstanceCapacity"], "urn:gpu", stack().gpu, "us-west-2a")
    assert "us-west-2a" in text
    assert "network.zone" in text
    assert "gpu.placementGroup: false" in text
    assert "placementGroup" not in node_groups.ways_out(["InsufficientInstanceCapacity"], "u", stack(gpu={"placementGroup": False}).gpu, "z")


def test_errors_that_speak_for_themselves_get_no_advice():
    assert node_groups.ways_out(["AccessDenied: not authorized"], "urn:gpu", stack().gpu, "us-west-2a") is None


def test_names_are_fit_for_buckets_and_differ_between_deployments():
    assert naming.prefix("ray-train-efa", "Team_A.dev") == "ray-train-efa-team-a-dev"
    ids = {naming.deployment_id("p", s, a, r) for s in ("dev", "prod") for a in ("1", "2") for r in ("us-west-2", "us-east-1")}
    assert len(ids) == 8
    assert naming.deployment_id("p", "dev", "1", "us-west-2") == naming.deployment_id("p", "dev", "1", "us-west-2")


@pytest.mark.parametrize("name", INSTANCES)
def test_group_names_differ_by_type_and_fit_eks(name):
    assert re.fullmatch(r"[0-9A-Za-z][A-Za-z0-9_-]{0,62}", node_groups.group_name(name))
