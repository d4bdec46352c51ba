"""The whole program under mocks: what is registered, in which order it comes and goes, and with which pins, tags, zones and rights."""

from __future__ import annotations

import functools
import json
import re

import pulumi_aws
import pytest
import recorder
from recorder import (
    ADDON,
    ASG_TAG,
    ASSOCIATION,
    ATTACHMENT,
    BUCKET,
    CLUSTER,
    EIP,
    EKS,
    ENDPOINT,
    FSX,
    GROUP,
    IGW,
    INSTANCES,
    LINK,
    LOGS,
    NAT,
    PLACEMENT,
    ROLE,
    ROLE_POLICY,
    ROUTE,
    SCHEDULE,
    SECURITY_GROUP,
    SHAPES,
    SUBNET,
    TEMPLATE,
    VPC,
    Account,
)

import config
import versions

RESERVED = {"id": "cr-0123456789abcdef0"}
KINDS = {
    "on-demand": {"capacity": {"kind": "on-demand"}},
    "spot": {"capacity": {"kind": "spot"}},
    "reservation": {"capacity": {"kind": "reservation", **RESERVED}},
    "capacity-block": {"capacity": {"kind": "capacity-block", **RESERVED}},
}
AUTOSCALED = {"gpu": {"minNodes": 0, "maxNodes": 4}, "budget": {"stopAfter": "8h", "idleStopMinutes": 10}}


def built(settings=None, **how):
    graph = recorder.run(settings, **how)
    assert graph.error is None, str(graph.error)
    return graph


@functools.cache
def default():
    return built({"budget": {"stopAfter": "8h"}})


@functools.cache
def autoscaled():
    return built(AUTOSCALED)


# -- order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [default, autoscaled], ids=["fixed", "autoscaled"])
def test_nodes_wait_for_policies_ways_out_and_addons_and_so_go_before_them(graph):
    graph = graph()
    node_policies = [a for a in graph.of(ATTACHMENT) if "node" in a.name.split("-Amazon")[0]]
    assert len(node_policies) == 3
    addons = [a for a in graph.of(ADDON) if a.inputs["addonName"] != "coredns"]
    for group in graph.of(GROUP):
        graph.waits(group, node_policies)
        graph.waits(group, [graph.one(ROUTE, "private"), graph.one(ROUTE, "public"), graph.one(NAT), graph.one(IGW), graph.one(ENDPOINT), *graph.of(LINK)])
        graph.waits(group, [graph.one(EKS), *addons])


def test_the_control_plane_waits_for_its_policy_and_its_log_group():
    graph = default()
    graph.waits(graph.one(EKS), [graph.one(ATTACHMENT, "AmazonEKSClusterPolicy"), graph.one(LOGS), *[s for s in graph.of(SUBNET) if "control-plane" in s.name]])


def test_the_control_plane_waits_for_nothing_that_could_run_beside_it():
    graph = default()
    before = {graph.nodes[urn].type for urn in graph.before(graph.one(CLUSTER))}
    assert not before & {NAT, ROUTE, EIP, ENDPOINT, PLACEMENT, BUCKET, GROUP, ADDON, SCHEDULE}, "nine minutes are long enough alone"


def test_coredns_comes_after_the_system_nodes():
    graph = default()
    graph.waits(graph.one(ADDON, "coredns"), [graph.one(GROUP, "system")])


def test_the_nat_gateway_waits_for_the_way_out_of_its_subnet():
    graph = default()
    graph.waits(graph.one(NAT), [graph.one(IGW), graph.one(ROUTE, "public"), graph.one(LINK, "public"), graph.one(EIP)])
    graph.waits(graph.one(EIP), [graph.one(IGW)])


@pytest.mark.parametrize("graph", [default, autoscaled], ids=["fixed", "autoscaled"])
def test_both_node_groups_are_deleted_in_one_layer(graph):
    graph = graph()
    assert graph.wave(graph.one(GROUP, "gpu")) == graph.wave(graph.one(GROUP, "system")), "else destroy waits for one after the other"


def test_destroy_goes_from_the_nodes_to_the_vpc():
    graph = default()
    order = [graph.one(ADDON, "coredns"), graph.one(GROUP, "gpu"), graph.one(TEMPLATE, "gpu"), graph.one(EKS), graph.one(SUBNET, "nodes"), graph.one(VPC)]
    waves = [graph.wave(node) for node in order]
    assert waves == sorted(waves, reverse=True), "deletion takes the layers from the last to the first"
    assert len(set(waves)) == len(waves)


def test_the_nat_gateway_goes_no_later_than_the_control_plane():
    graph = default()
    assert graph.wave(graph.one(NAT)) >= graph.wave(graph.one(EKS)), "its minute of deletion should hide behind the cluster's"


def test_the_stop_schedule_stands_before_the_nodes_that_it_stops():
    graph = default()
    schedule = graph.one(SCHEDULE)
    graph.waits(graph.one(GROUP, "gpu"), [schedule, graph.one(ROLE_POLICY, "stop")])
    assert graph.one(EKS).urn not in graph.before(schedule), "it works on names alone"


def test_everything_for_kubernetes_can_wait_for_the_infrastructure():
    graph = default()
    graph.waits(graph.one(ASSOCIATION, "training"), [graph.one(ROLE_POLICY, "training")])


def test_no_resource_is_made_outside_a_component():
    graph = default()
    assert [n.name for n in graph.nodes.values() if n.custom and not n.parent.split("::")[2].split("$")[-1].startswith(("ray-train-efa:", "eks:"))] == []


# -- network -----------------------------------------------------------------------------------


def test_all_nodes_live_in_one_private_subnet_of_one_zone():
    graph = default()
    nodes = graph.one(SUBNET, "nodes")
    for group in graph.of(GROUP):
        assert group.inputs["subnetIds"] == [f"{nodes.name}-id"]
    assert not nodes.inputs.get("mapPublicIpOnLaunch")
    assert graph.one(LINK, "nodes").inputs["routeTableId"] == graph.one(ROUTE, "private").inputs["routeTableId"]


def test_the_control_plane_is_in_two_zones_and_in_subnets_of_its_own():
    graph = default()
    subnets = [s for s in graph.of(SUBNET) if "control-plane" in s.name]
    assert len({s.inputs["availabilityZone"] for s in subnets}) == 2
    assert sorted(graph.one(CLUSTER).inputs["subnetIds"]) == sorted(f"{s.name}-id" for s in subnets)


def test_a_zone_chosen_by_the_program_is_kept_and_said():
    graph = default()
    assert all(list(s.request.ignoreChanges) == ["availabilityZone"] for s in graph.of(SUBNET))
    assert any("network.zone is not set: a new stack takes us-west-2a and keeps it" in line for line in graph.logs)


def test_a_zone_named_by_the_stack_can_be_changed_by_the_stack():
    graph = built({"network": {"zone": "us-west-2c"}})
    nodes = graph.one(SUBNET, "nodes")
    assert nodes.inputs["availabilityZone"] == "us-west-2c"
    assert list(nodes.request.ignoreChanges) == []
    assert nodes.request.deleteBeforeReplace, "its successor has the same addresses"
    assert graph.outputs["zone"] == "us-west-2c"


def test_one_nat_gateway_and_a_free_endpoint_for_s3():
    graph = default()
    assert len(graph.of(NAT)) == 1
    endpoint = graph.one(ENDPOINT)
    assert (endpoint.inputs["vpcEndpointType"], endpoint.inputs["serviceName"]) == ("Gateway", "com.amazonaws.us-west-2.s3")


# -- control plane -----------------------------------------------------------------------------


def test_the_control_plane_has_api_authentication_and_nothing_superfluous():
    inputs = default().one(CLUSTER).inputs
    assert inputs["authenticationMode"] == "API"
    assert inputs["skipDefaultNodeGroup"] is True
    assert inputs["skipDefaultSecurityGroups"] is True
    assert inputs["bootstrapSelfManagedAddons"] is False
    assert inputs["version"] == versions.KUBERNETES
    assert inputs["upgradePolicy"] == {"supportType": "STANDARD"}
    assert (inputs["endpointPrivateAccess"], inputs["endpointPublicAccess"]) == (True, True)
    assert "createOidcProvider" not in inputs, "Pod Identity needs none"
    assert default().of(SECURITY_GROUP) == []


def test_endpoint_admins_logs_and_key_come_from_config():
    admin = "arn:aws:iam::123456789012:role/admin"
    key = "arn:aws:kms:us-west-2:123456789012:key/1"
    graph = built({"cluster": {"publicAccessCidrs": ["203.0.113.7/32"], "admins": [admin], "logs": ["audit"], "logRetentionDays": 3, "secretsKeyArn": key}})
    inputs = graph.one(CLUSTER).inputs
    assert inputs["publicAccessCidrs"] == ["203.0.113.7/32"]
    (entry,) = inputs["accessEntries"].values()
    assert entry["principalArn"] == admin
    assert entry["accessPolicies"]["admin"]["policyArn"].endswith("AmazonEKSClusterAdminPolicy")
    assert inputs["enabledClusterLogTypes"] == ["audit"]
    assert inputs["encryptionConfigKeyArn"] == key
    logs = graph.one(LOGS).inputs
    assert (logs["name"], logs["retentionInDays"]) == ("/aws/eks/ray-train-efa-dev/cluster", 3)
    assert not any("answers the whole internet" in line for line in graph.logs)


def test_the_log_group_has_the_name_that_eks_writes_to():
    graph = default()
    assert graph.one(LOGS).inputs["name"] == f"/aws/eks/{graph.one(CLUSTER).inputs['name']}/cluster"


def test_addons_are_ours_so_that_no_later_up_updates_them_by_itself():
    graph = default()
    assert {a.inputs["addonName"] for a in graph.of(ADDON)} == {"vpc-cni", "kube-proxy", "eks-pod-identity-agent", "eks-node-monitoring-agent", "coredns"}
    cluster = graph.one(CLUSTER).inputs
    assert cluster["useDefaultVpcCni"] is True
    assert cluster["kubeProxyAddonOptions"]["enabled"] is False
    assert cluster["corednsAddonOptions"]["enabled"] is False
    assert json.loads(graph.one(ADDON, "vpc-cni").inputs["configurationValues"]) == {"enableNetworkPolicy": "true"}
    assert all("getAddonVersion" not in token and "getParameter" not in token for token in graph.invokes), "a lookup at each `up` would roll nodes by itself"


# -- pins --------------------------------------------------------------------------------------


def test_what_is_not_pinned_is_left_to_aws_and_said():
    graph = default()
    assert all("addonVersion" not in a.inputs for a in graph.of(ADDON))
    assert all("releaseVersion" not in g.inputs and g.inputs["version"] == versions.KUBERNETES for g in graph.of(GROUP))
    assert any(line.startswith("not pinned: AMI release, image digest, add-on vpc-cni") for line in graph.logs)


def test_pins_are_used_and_then_nothing_is_said():
    addons = dict.fromkeys(("vpc-cni", "kube-proxy", "eks-pod-identity-agent", "eks-node-monitoring-agent", "coredns"), "v1.20.4-eksbuild.2")
    pins = {"zone": "us-west-2b", "amiRelease": "1.36.0-20261112", "addonVersions": addons, "imageDigest": "sha256:" + "a" * 64}
    graph = built({"pins": pins})
    assert all(a.inputs["addonVersion"] == "v1.20.4-eksbuild.2" for a in graph.of(ADDON))
    assert all(g.inputs["releaseVersion"] == "1.36.0-20261112" and "version" not in g.inputs for g in graph.of(GROUP))
    assert graph.one(SUBNET, "nodes").inputs["availabilityZone"] == "us-west-2b"
    assert not any("not pinned" in line or "is not set" in line for line in graph.logs)


# -- node groups -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHAPES)
def test_each_shape_gets_the_interfaces_that_its_type_takes(kind):
    graph = built({"gpu": {"instanceType": kind, "nodes": 4}})
    interfaces = graph.one(TEMPLATE, "gpu").inputs["networkInterfaces"]
    devices, cards = INSTANCES[kind][4:6]
    assert sum(i["interfaceType"] != "interface" for i in interfaces) == devices
    assert len(interfaces) == (devices if cards == 1 else devices + 1)
    assert all(i["securityGroups"] == ["sg-cluster"] for i in interfaces), "the cluster's own group is on every interface"
    assert "vpcSecurityGroupIds" not in graph.one(TEMPLATE, "gpu").inputs, "EC2 refuses groups in two places"
    group = graph.one(GROUP, "gpu").inputs
    assert group["instanceTypes"] == [kind]
    assert group["scalingConfig"] == {"minSize": 0, "desiredSize": 4, "maxSize": 4}
    assert group["amiType"] == "AL2023_x86_64_NVIDIA"


@pytest.mark.parametrize("graph", [default, autoscaled], ids=["fixed", "autoscaled"])
def test_the_gpu_group_is_replaced_before_it_is_doubled_and_updated_all_at_once(graph):
    group = graph().one(GROUP, "gpu")
    assert group.request.deleteBeforeReplace
    assert group.inputs["updateConfig"] == {"updateStrategy": "MINIMAL", "maxUnavailablePercentage": 100}
    assert group.inputs["nodeRepairConfig"] == {"enabled": True}
    assert (group.request.customTimeouts.create, group.request.customTimeouts.update, group.request.customTimeouts.delete) == ("40m", "90m", "40m")
    assert group.inputs["nodeGroupName"] == "gpu-g6-12xlarge"
    assert list(group.request.hooks.on_error) == ["gpu-nodes-ways-out"]


def test_gpu_nodes_are_labelled_and_tainted_by_the_one_constant():
    group = default().one(GROUP, "gpu").inputs
    key, value, effect = config.GPU_TAINT
    assert group["taints"] == [{"key": key, "value": value, "effect": {"NoSchedule": "NO_SCHEDULE"}[effect]}]
    assert group["labels"]["nvidia.com/gpu.present"] == "true"
    assert group["labels"][config.EFA_LABEL[0]] == config.EFA_LABEL[1]
    assert "taints" not in default().one(GROUP, "system").inputs


def test_nodes_have_encrypted_gp3_disks_and_imdsv2_with_one_hop():
    for name, size in (("gpu", 200), ("system", 100)):
        template = default().one(TEMPLATE, name).inputs
        (disk,) = template["blockDeviceMappings"]
        assert disk["deviceName"] == "/dev/xvda"
        assert disk["ebs"]["encrypted"] == "true"
        assert (disk["ebs"]["volumeType"], disk["ebs"]["volumeSize"]) == ("gp3", size)
        assert template["metadataOptions"] == {"httpEndpoint": "enabled", "httpTokens": "required", "httpPutResponseHopLimit": 1}
        assert not {"imageId", "iamInstanceProfile", "keyName"} & set(template)
    assert default().one(TEMPLATE, "gpu").inputs["blockDeviceMappings"][0]["ebs"]["throughput"] == 500
    assert default().one(TEMPLATE, "gpu").inputs["userData"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_capacity(kind):
    graph = built({"gpu": KINDS[kind], "network": {"zone": "us-west-2a"}})
    template, group = graph.one(TEMPLATE, "gpu").inputs, graph.one(GROUP, "gpu").inputs
    reserved = kind in ("reservation", "capacity-block")
    assert group["capacityType"] == {"spot": "SPOT", "capacity-block": "CAPACITY_BLOCK"}.get(kind, "ON_DEMAND")
    assert len(graph.of(PLACEMENT)) == (0 if reserved else 1)
    assert ("placement" in template) == (not reserved)
    target = {"capacityReservationTarget": {"capacityReservationId": RESERVED["id"]}} if reserved else None
    assert template.get("capacityReservationSpecification") == target
    block = kind == "capacity-block"
    assert template.get("instanceMarketOptions") == ({"marketType": "capacity-block"} if block else None), "EKS refuses spot options in a template"
    assert template.get("instanceType") == ("g6.12xlarge" if block else None)
    assert group.get("instanceTypes") == (None if block else ["g6.12xlarge"]), "the type is named in one place"


def test_a_placement_group_can_be_asked_for_and_refused():
    reserved = built({"gpu": {**KINDS["reservation"], "placementGroup": True}, "network": {"zone": "us-west-2a"}})
    assert reserved.one(PLACEMENT).inputs["strategy"] == "cluster"
    assert built({"gpu": {"placementGroup": False}}).of(PLACEMENT) == []


def test_an_autoscaled_group_may_be_empty_and_is_known_to_the_autoscaler():
    graph = autoscaled()
    group = graph.one(GROUP, "gpu")
    assert group.inputs["scalingConfig"] == {"minSize": 0, "desiredSize": 0, "maxSize": 4}
    assert list(group.request.ignoreChanges) == ["scalingConfig.desiredSize"], "the number belongs to the autoscaler"
    tags = {t.inputs["tag"]["key"]: t.inputs["tag"]["value"] for t in graph.of(ASG_TAG)}
    assert tags["k8s.io/cluster-autoscaler/node-template/resources/nvidia.com/gpu"] == "4"
    assert tags["k8s.io/cluster-autoscaler/node-template/resources/vpc.amazonaws.com/efa"] == "1"
    assert {t.inputs["autoscalingGroupName"] for t in graph.of(ASG_TAG)} == {"eks-gpu-g6-12xlarge"}, "on the Auto Scaling group itself"


def test_a_fixed_group_has_no_autoscaler_and_its_number_is_the_configs():
    graph = default()
    assert graph.of(ASG_TAG) == []
    assert list(graph.one(GROUP, "gpu").request.ignoreChanges) == []
    assert [a.inputs["serviceAccount"] for a in graph.of(ASSOCIATION)] == ["training"]


# -- rights ------------------------------------------------------------------------------------


def test_nodes_have_the_least_that_aws_manages():
    graph = default()
    policies = {a.inputs["policyArn"].rsplit("/", 1)[-1] for a in graph.of(ATTACHMENT) if a.inputs["role"].startswith("ray-train-efa-dev-node")}
    assert policies == {"AmazonEKSWorkerNodePolicy", "AmazonEKS_CNI_Policy", "AmazonEC2ContainerRegistryPullOnly"}
    assert len({g.inputs["nodeRoleArn"] for g in graph.of(GROUP)}) == 1


@pytest.mark.parametrize("graph", [default, autoscaled], ids=["fixed", "autoscaled"])
def test_no_inline_policy_has_a_wildcard_action(graph):
    for policy in graph().of(ROLE_POLICY):
        for statement in json.loads(policy.inputs["policy"])["Statement"]:
            assert not any("*" in action for action in statement["Action"]), policy.name


def test_pods_get_this_stacks_bucket_and_the_autoscaler_this_clusters_groups():
    graph = autoscaled()
    training = json.loads(graph.one(ROLE_POLICY, "training").inputs["policy"])
    bucket = graph.one(BUCKET).name + "-1234567"
    assert {r for s in training["Statement"] for r in s["Resource"]} == {f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/runs/*"}
    assert {(a.inputs["namespace"], a.inputs["serviceAccount"]) for a in graph.of(ASSOCIATION)} == {("ray", "training"), ("kube-system", "cluster-autoscaler")}
    autoscaler = json.loads(graph.one(ROLE_POLICY, "autoscaler").inputs["policy"])
    scale = next(s for s in autoscaler["Statement"] if s["Sid"] == "Scale")
    assert scale["Condition"] == {"StringEquals": {"aws:ResourceTag/k8s.io/cluster-autoscaler/ray-train-efa-dev": "owned"}}


# -- storage -----------------------------------------------------------------------------------


def s3(graph, kind):
    return graph.one(f"aws:s3/bucket{kind}:Bucket{kind}")


def test_the_bucket_is_private_encrypted_versioned_and_tls_only():
    graph = default()
    block = s3(graph, "PublicAccessBlock").inputs
    assert all(block[key] for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"))
    assert json.loads(s3(graph, "Policy").inputs["policy"])["Statement"][0]["Sid"] == "TlsOnly"
    rule = s3(graph, "ServerSideEncryptionConfiguration").inputs["rules"][0]
    assert rule["applyServerSideEncryptionByDefault"] == {"sseAlgorithm": "AES256"}
    assert s3(graph, "Versioning").inputs["versioningConfiguration"] == {"status": "Enabled"}
    graph.waits(s3(graph, "LifecycleConfiguration"), [s3(graph, "Versioning")])


@pytest.mark.parametrize(
    ("fate", "force", "retained", "protected", "says"),
    [
        ("keep", False, True, False, "stays with everything in it"),
        ("delete", True, False, False, "is emptied and deleted with the stack"),
        ("protect", False, False, True, "refuses the destroy of the stack"),
    ],
)
def test_fr43_what_destroy_does_with_the_checkpoints_is_chosen_and_said(fate, force, retained, protected, says):
    graph = built({"storage": {"onDestroy": fate}})
    bucket = graph.one(BUCKET)
    assert bool(bucket.inputs["forceDestroy"]) == force
    guards = [node for node in graph.nodes.values() if node.type.startswith("aws:s3/")]
    assert len(guards) == 6
    assert all(bool(node.request.retainOnDelete) == retained for node in guards), "a bucket that stays keeps its guards"
    assert bool(bucket.request.protect) == protected
    assert says in graph.outputs["bucketAfterDestroy"]
    assert graph.outputs["bucket"] in graph.outputs["bucketAfterDestroy"]


def test_an_existing_bucket_is_used_and_not_touched():
    graph = built({"storage": {"bucket": "mine", "prefix": "team/runs"}})
    assert [n for n in graph.nodes.values() if n.type.startswith("aws:s3/")] == []
    policy = json.loads(graph.one(ROLE_POLICY, "training").inputs["policy"])
    assert policy["Statement"][1]["Resource"] == ["arn:aws:s3:::mine/team/runs/*"]
    assert graph.outputs["bucketAfterDestroy"] == "mine is not this stack's and stays untouched"


def test_fsx_is_made_where_asked_for_in_the_nodes_subnet():
    graph = built({"storage": {"fsx": {"capacityGiB": 2400}}})
    system = graph.one(FSX).inputs
    assert system["subnetIds"] == graph.one(GROUP, "gpu").inputs["subnetIds"][0]
    assert system["storageCapacity"] == 2400
    ports = {(rule["fromPort"], rule["toPort"]) for rule in graph.one(SECURITY_GROUP).inputs["ingress"]}
    assert ports == {(988, 988), (1018, 1023)}
    graph.waits(graph.one(ADDON, "aws-fsx-csi-driver"), [graph.one(GROUP, "system"), graph.one(ADDON, "eks-pod-identity-agent")])
    assert graph.one(CLUSTER).urn not in graph.before(graph.one(FSX)), "seven minutes beside the control plane, not after it"
    assert graph.outputs["fsx"]["id"]


# -- stop and cost -----------------------------------------------------------------------------


def test_the_stop_time_is_fixed_at_creation_and_moved_by_another_stop_after():
    first, second = default().one(SCHEDULE), built({"budget": {"stopAfter": "2d"}}).one(SCHEDULE)
    assert list(first.request.ignoreChanges) == ["scheduleExpression"]
    assert first.name != second.name, "another time is another schedule"
    assert first.inputs["actionAfterCompletion"] == "NONE"
    assert first.inputs["target"]["arn"] == "arn:aws:scheduler:::aws-sdk:eks:updateNodegroupConfig"
    request = json.loads(first.inputs["target"]["input"])
    assert (request["ClusterName"], request["NodegroupName"]) == ("ray-train-efa-dev", default().one(GROUP, "gpu").inputs["nodeGroupName"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", default().outputs["stopsAt"])


def test_without_a_stop_time_there_is_no_schedule_and_the_outputs_say_never():
    graph = built()
    assert graph.of(SCHEDULE) == []
    assert graph.outputs["stopsAt"].startswith("never")


def test_a_stack_over_budget_is_refused_before_any_resource():
    graph = recorder.run({"gpu": {"instanceType": "p5.48xlarge", "nodes": 4}, "budget": {"maxHourlyUsd": 15}})
    assert [n.name for n in graph.nodes.values() if n.type.startswith(("aws:", "eks:", "ray-train-efa:infra"))] == []
    assert "budget.maxHourlyUsd = 15: this stack would cost $22" in str(graph.error)


def test_a_budget_that_can_not_be_held_is_refused_too():
    graph = recorder.run({"gpu": {"instanceType": "p6-b300.48xlarge"}, "budget": {"maxHourlyUsd": 1000}})
    assert [n.name for n in graph.nodes.values() if n.type.startswith(("aws:", "eks:", "ray-train-efa:infra"))] == []
    assert "no price of p6-b300.48xlarge" in str(graph.error)


# -- tags, names, outputs ----------------------------------------------------------------------


def taggable(type_):
    """Does the resource take a map of tags?"""
    package, kind = type_.split(":")[1].split("/")[0], type_.split(":")[-1]
    found = getattr(getattr(pulumi_aws, package), kind)
    return "tags" in found.__init__.__code__.co_varnames or hasattr(found, "tags_all")


@pytest.mark.parametrize("graph", [default, autoscaled], ids=["fixed", "autoscaled"])
def test_everything_taggable_says_whose_it_is(graph):
    wanted = {"project": "ray-train-efa", "stack": "dev", "owner": "unset"}
    tagged = 0
    for node in graph().nodes.values():
        if node.type.startswith("aws:") and node.type != EKS and taggable(node.type):
            assert wanted.items() <= node.inputs.get("tags", {}).items(), f"{node.type} {node.name} lacks tags"
            assert re.fullmatch("[0-9a-f]{8}", node.inputs["tags"]["deployment"])
            tagged += 1
    assert tagged >= 25
    assert wanted.items() <= graph().one(CLUSTER).inputs["tags"].items()


def test_instances_volumes_and_interfaces_carry_the_tags_too():
    for name in ("gpu", "system"):
        specifications = {s["resourceType"]: s["tags"] for s in default().one(TEMPLATE, name).inputs["tagSpecifications"]}
        assert set(specifications) == {"instance", "volume", "network-interface"}
        assert all(tags["stack"] == "dev" and tags["deployment"] for tags in specifications.values())


def test_every_name_carries_the_stacks():
    for node in default().nodes.values():
        assert node.name.startswith("ray-train-efa-dev"), node.name


def test_two_stacks_share_no_name_in_one_account_and_region():
    first, second = built({"owner": "a"}, stack="one"), built({"owner": "b"}, stack="two")
    names = [{n.name for n in g.nodes.values()} for g in (first, second)]
    assert not names[0] & names[1]

    def fixed(graph):
        return {
            n.inputs[key]
            for n in graph.nodes.values()
            for key in ("name", "bucket")
            if isinstance(n.inputs.get(key), str) and n.type in (CLUSTER, LOGS, BUCKET)
        }

    assert not fixed(first) & fixed(second)
    assert first.outputs["deployment"] != second.outputs["deployment"]
    assert first.outputs["kubeconfigCommand"] != second.outputs["kubeconfigCommand"]


def test_outputs_say_how_to_go_on_and_hold_no_credentials():
    outputs = default().outputs
    assert set(outputs) >= {"clusterName", "region", "kubeconfigCommand", "bucket", "costPerHour", "stopsAt"}
    assert outputs["kubeconfigCommand"] == "aws eks update-kubeconfig --region us-west-2 --name ray-train-efa-dev"
    assert outputs["costPerHour"]["usd"] == pytest.approx(9.65, abs=0.01)
    assert not any(re.search("token|secret|certificate|password", json.dumps(value), re.I) for value in outputs.values())


# -- preview, existing clusters, guards --------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, AUTOSCALED, {"storage": {"fsx": {}}}], ids=["fixed", "autoscaled", "fsx"])
def test_a_first_preview_tolerates_what_is_not_known_yet(settings):
    graph = built(settings, preview=True)
    assert len(graph.of(GROUP)) == 2
    assert len(graph.nodes) == len(built(settings).nodes), "no resource depends on a value that is unknown in a preview"


def test_an_existing_cluster_gets_nothing_from_aws():
    graph = built({"cluster": {"kind": "existing", "context": "kind-lab"}})
    assert [n.name for n in graph.nodes.values() if n.type.startswith(("aws:", "eks:", "ray-train-efa:infra"))] == []
    assert graph.invokes == []


def test_bad_configuration_is_one_error_before_aws_is_asked():
    graph = recorder.run({"gpu": {"nodes": "two"}, "gpus": {}})
    assert [n.name for n in graph.nodes.values() if n.type.startswith(("aws:", "eks:", "ray-train-efa:infra"))] == []
    assert graph.invokes == []
    assert "2 problems" in str(graph.error)


def test_the_wrong_account_is_refused():
    graph = recorder.run(aws={"allowedAccountIds": ["999999999999"]})
    assert [n.name for n in graph.nodes.values() if n.type.startswith(("aws:", "eks:", "ray-train-efa:infra"))] == []
    assert "but these credentials are of account 123456789012" in str(graph.error)
    assert recorder.run(aws={"allowedAccountIds": ["123456789012"]}).error is None


def test_a_long_stack_name_is_refused_before_names_get_too_long_for_iam():
    graph = recorder.run(stack="a" * 40)
    assert "choose a shorter one" in str(graph.error)
    longest = max((n.name for n in built(stack="s" * 26).of(ROLE)), key=len)
    assert len(longest) + len("-1234567") <= 64


def test_an_unknown_instance_type_is_one_sentence():
    graph = recorder.run({"gpu": {"instanceType": "g66.12xlarge"}})
    assert "ray-train-efa:gpu.instanceType = 'g66.12xlarge': EC2 has no such type in us-west-2" in str(graph.error)


def test_another_region_needs_no_other_edit():
    account = Account(region="us-east-2", zones=(("us-east-2a", "use2-az1"), ("us-east-2b", "use2-az2")))
    graph = built(account=account)
    assert graph.outputs["region"] == "us-east-2"
    assert graph.one(ENDPOINT).inputs["serviceName"] == "com.amazonaws.us-east-2.s3"


def test_a_preview_of_another_type_says_that_a_running_job_stops():
    text = "{}; another instance type replaces them all and stops a running job"
    assert default().outputs["gpuNodes"] == text.format("2 x g6.12xlarge")
    assert autoscaled().outputs["gpuNodes"] == text.format("0 to 4 x g6.12xlarge")


def test_the_aws_half_imports_neither_boto3_nor_the_workloads_nor_code_kept_in_the_state():
    for file in (recorder.ROOT / "infra").glob("*.py"):
        assert not re.search(r"^(import|from) (boto3|botocore|workloads|ops|pulumi_command|pulumi.dynamic)\b", file.read_text(), re.M), file.name


def test_the_program_is_short_enough_to_read_in_one_go():
    assert len((recorder.ROOT / "__main__.py").read_text().splitlines()) < 60
