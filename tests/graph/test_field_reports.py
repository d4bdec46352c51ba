"""What went wrong for other people, and the right behaviour here. The numbers are those of the collection of reports."""

from __future__ import annotations

import json

import recorder
from recorder import ATTACHMENT, CLUSTER, EKS, ENDPOINT, GROUP, INSTANCES, NAT, ROLE_POLICY, SECURITY_GROUP, SUBNET, TEMPLATE, VPC, Account

import config


def built(settings=None, **how):
    graph = recorder.run(settings, **how)
    assert graph.error is None, str(graph.error)
    return graph


def test_fr01_a_zone_that_can_not_host_a_control_plane_is_never_used_for_it():
    zones = (("us-east-1e", "use1-az3"), ("us-east-1a", "use1-az6"), ("us-east-1b", "use1-az1"))
    graph = built({"network": {"zone": "us-east-1e"}}, account=Account(region="us-east-1", zones=zones))
    control_plane = {s.inputs["availabilityZone"] for s in graph.of(SUBNET) if "control-plane" in s.name}
    assert control_plane == {"us-east-1a", "us-east-1b"}
    assert graph.one(SUBNET, "nodes").inputs["availabilityZone"] == "us-east-1e", "nodes may live there"
    assert len(graph.one(GROUP, "gpu").inputs["subnetIds"]) == 1
    renamed = (("us-east-1a", "use1-az3"), ("us-east-1b", "use1-az1"), ("us-east-1e", "use1-az2"))
    graph = built(account=Account(region="us-east-1", zones=renamed))
    assert {s.inputs["availabilityZone"] for s in graph.of(SUBNET) if "control-plane" in s.name} == {"us-east-1b", "us-east-1e"}, "the letter is per account"


def test_fr02_a_quota_too_small_stops_before_any_resource():
    graph = recorder.run(account=Account(quota=64))
    assert graph.nodes == {}
    text = str(graph.error)
    assert "2 x g6.12xlarge need 96 vCPUs, the quota L-DB2E81BA of us-west-2 allows 64" in text
    assert "gpu.nodes" in text


def test_fr02_a_quota_that_may_not_be_read_is_a_warning():
    graph = built(account=Account(quota=None))
    assert any("L-DB2E81BA could not be read" in line for line in graph.logs)


def test_fr03_two_zones_for_efa_nodes_are_refused_by_name():
    graph = recorder.run({"network": {"zone": ["us-west-2a", "us-west-2b"]}})
    assert "ray-train-efa:network.zone" in str(graph.error)


def test_fr03_a_zone_that_does_not_offer_the_type_is_refused_with_those_that_do():
    graph = recorder.run({"network": {"zone": "us-west-2c"}}, account=Account(offered={"g6.12xlarge": ("us-west-2a", "us-west-2b")}))
    assert graph.nodes == {}
    assert "does not offer gpu.instanceType g6.12xlarge; zones that do: us-west-2a, us-west-2b" in str(graph.error)


def test_fr03_a_new_zone_of_aws_does_not_move_the_nodes():
    more = (("us-west-2", "x"), *Account().zones)[1:]
    before = built(account=Account(zones=more[1:], offered={"g6.12xlarge": ("us-west-2b", "us-west-2c")}))
    after = built(account=Account(zones=more))
    first, second = before.one(SUBNET, "nodes"), after.one(SUBNET, "nodes")
    assert first.inputs["availabilityZone"] != second.inputs["availabilityZone"], "the case is real"
    assert list(second.request.ignoreChanges) == ["availabilityZone"], "and the state's zone wins"


def test_fr04_gpu_nodes_have_the_nvidia_image_and_system_nodes_the_standard_one():
    graph = built({"gpu": {"instanceType": "g6e.48xlarge"}})
    assert graph.one(GROUP, "gpu").inputs["amiType"] == "AL2023_x86_64_NVIDIA"
    assert graph.one(GROUP, "system").inputs["amiType"] == "AL2023_x86_64_STANDARD"
    assert "pulumi-aws==7.51.1" in (recorder.ROOT / "requirements.txt").read_text()


def test_fr06_there_is_no_half_supported_way_without_nat():
    graph = recorder.run({"network": {"natMode": "none"}})
    assert "ray-train-efa:network.natMode is no setting" in str(graph.error)
    whole = built()
    assert len(whole.of(NAT)) == 1
    assert len(whole.of(ENDPOINT)) == 1
    assert "associatePublicIpAddress" not in whole.one(TEMPLATE, "gpu").inputs["networkInterfaces"][0]
    assert "NAT" in (recorder.ROOT / "docs/aws.md").read_text(), "the cost of pulling images through NAT is written down"


def test_fr07_a_first_preview_on_an_empty_account_succeeds():
    assert built(preview=True).of(GROUP)


def test_fr09_the_profile_is_not_frozen_into_outputs_and_account_and_region_are_said():
    graph = built(aws={"profile": "team-b"})
    assert "team-b" not in json.dumps(graph.outputs)
    assert "kubeconfig" not in graph.outputs
    assert any(line.startswith("account 123456789012, region us-west-2") for line in graph.logs)
    stopped = recorder.run(aws={"profile": "team-b", "allowedAccountIds": ["210987654321"]})
    assert "use the right AWS_PROFILE" in str(stopped.error)


def test_fr10_what_lets_us_in_outlives_the_nodes():
    admin = "arn:aws:iam::123456789012:role/ci"
    graph = built({"cluster": {"admins": [admin]}})
    assert [e["principalArn"] for e in graph.one(CLUSTER).inputs["accessEntries"].values()] == [admin]
    for group in graph.of(GROUP):
        assert graph.one(CLUSTER).urn in graph.before(group), "access entries are children of the cluster component"
    assert "state delete" in (recorder.ROOT / "docs/aws.md").read_text(), "the rescue is documented"


def test_fr11_nodes_then_cluster_then_network_and_policies_last():
    graph = built()
    groups, cluster = graph.of(GROUP), graph.one(EKS)
    for attachment in graph.of(ATTACHMENT):
        users = groups if "-node-" in attachment.name else [cluster]
        assert all(graph.wave(attachment) < graph.wave(user) for user in users), attachment.name
    assert all(graph.wave(cluster) < graph.wave(group) for group in groups)
    assert graph.wave(graph.one(VPC)) < min(graph.wave(s) for s in graph.of(SUBNET)) < graph.wave(cluster)
    interfaces = graph.one(TEMPLATE, "gpu").inputs["networkInterfaces"]
    assert all(i["deleteOnTermination"] == "true" for i in interfaces), "else the interface stays and blocks the subnet"


def test_fr14_efa_uses_the_group_that_eks_gave_both_self_rules():
    graph = built()
    for interface in graph.one(TEMPLATE, "gpu").inputs["networkInterfaces"]:
        assert interface["securityGroups"] == ["sg-cluster"], "a group of our own would need egress to itself; 0.0.0.0/0 does not cover EFA"
    assert graph.of(SECURITY_GROUP) == []


def test_fr15_efa_nodes_are_labelled_so_that_the_plugin_need_not_know_the_type():
    labels = built({"gpu": {"instanceType": "p5en.48xlarge"}}).one(GROUP, "gpu").inputs["labels"]
    assert labels[config.EFA_LABEL[0]] == "true"


def test_fr16_system_nodes_have_neither_the_efa_label_nor_the_taint():
    graph = built()
    system, gpu = graph.one(GROUP, "system").inputs, graph.one(GROUP, "gpu").inputs
    assert config.EFA_LABEL[0] not in system["labels"], "the EFA plugin would crash there"
    assert "taints" not in system
    assert [(t["key"], t["value"]) for t in gpu["taints"]] == [config.GPU_TAINT[:2]]


def test_fr18_a_type_without_efa_is_refused_with_the_sizes_that_have_it():
    graph = recorder.run({"gpu": {"instanceType": "g6.4xlarge"}})
    assert graph.nodes == {}
    assert "ray-train-efa:gpu.instanceType = 'g6.4xlarge' has no EFA; types of this family that have it: g6.12xlarge, g6.24xlarge, g6.48xlarge" in str(
        graph.error
    )


def test_fr18_groups_are_on_the_interfaces_only_and_eks_gets_no_subnet_from_the_template():
    template = built().one(TEMPLATE, "gpu").inputs
    assert "vpcSecurityGroupIds" not in template
    assert not any("subnetId" in i for i in template["networkInterfaces"])


def test_fr19_a_disk_too_small_for_the_image_is_refused():
    graph = recorder.run({"gpu": {"diskGiB": 20}, "system": {"diskGiB": 20}})
    assert "2 problems" in str(graph.error)
    assert "ray-train-efa:gpu: diskGiB = 20" in str(graph.error)


def test_fr45_another_type_changes_everything_that_follows_from_it_and_nothing_else():
    one, other = built(), built({"gpu": {"instanceType": "p5.48xlarge"}})
    assert other.one(GROUP, "gpu").inputs["nodeGroupName"] == "gpu-p5-48xlarge" != one.one(GROUP, "gpu").inputs["nodeGroupName"]
    assert other.one(GROUP, "gpu").inputs["instanceTypes"] == ["p5.48xlarge"]
    assert sum(i["interfaceType"] != "interface" for i in other.one(TEMPLATE, "gpu").inputs["networkInterfaces"]) == INSTANCES["p5.48xlarge"][4]
    assert other.outputs["costPerHour"]["usd"] > 110
    changed = {n.name for urn, n in other.nodes.items() if one.nodes[urn].inputs != n.inputs}
    workloads = {"ray-train-efa-dev-ray-cluster", "ray-train-efa-dev-ray-ready", "ray-train-efa-dev-plugins-efa"}
    assert changed == {"ray-train-efa-dev-gpu", *workloads}, "template and group of the GPU nodes, and what fills them"
    assert set(one.nodes) == set(other.nodes), "the same resources"


def test_fr45_the_stop_schedule_follows_the_group_of_another_type():
    graph = built({"gpu": {"instanceType": "p5.48xlarge"}, "budget": {"stopAfter": "8h"}})
    assert json.loads(graph.one(recorder.SCHEDULE).inputs["target"]["input"])["NodegroupName"] == "gpu-p5-48xlarge"
    assert "nodegroup/ray-train-efa-dev/gpu-p5-48xlarge/*" in graph.one(ROLE_POLICY, "stop").inputs["policy"]


def test_fr45_another_number_of_nodes_is_a_change_of_size_alone():
    budget = {"budget": {"stopAfter": "8h"}}
    one, other = built(budget), built({"gpu": {"nodes": 4}, **budget})
    changed = [urn for urn, n in other.nodes.items() if one.nodes[urn].inputs != n.inputs and n.type != recorder.SCHEDULE]
    assert one.one(recorder.SCHEDULE).inputs["target"] == other.one(recorder.SCHEDULE).inputs["target"], "only its time differs, which is kept"
    ready = other.one("kubernetes:core/v1:ConfigMap", "ray-ready")  # which is waited for anew
    assert changed == [other.one(GROUP, "gpu").urn, other.one("kubernetes:ray.io/v1:RayCluster").urn, ready.urn]
    before, after = one.one(GROUP, "gpu").inputs, other.one(GROUP, "gpu").inputs
    assert {key for key in after if before[key] != after[key]} == {"scalingConfig"}


def test_fr46_the_program_shows_all_problems_of_the_configuration_at_once():
    graph = recorder.run({"gpu": {"nodeCount": "two", "nodeCout": 4, "nodes": 0}, "owner": ""})
    text = str(graph.error)
    assert all(part in text for part in ("gpu.nodeCount", "did you mean ray-train-efa:gpu.nodes?", "gpu.nodes = 0", "ray-train-efa:owner"))
