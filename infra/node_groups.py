"""The system nodes and the GPU nodes: placement group, launch template, managed node group."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
import pulumi_aws as aws
from pulumi import ResourceOptions

import config
from infra import efa
from infra.cluster import addon
from infra.facts import Instance
from naming import Tags, named
from prices import GPU_DISK_IOPS, GPU_DISK_MIBPS

SYSTEM_AMI = "AL2023_x86_64_STANDARD"
GPU_AMI = "AL2023_x86_64_NVIDIA"
# EKS waits for the group, the provider for EKS; scarce capacity shows within the first half hour or not at all.
GPU_TIMEOUTS = pulumi.CustomTimeouts(create="40m", update="90m", delete="40m")
SYSTEM_TIMEOUTS = pulumi.CustomTimeouts(create="30m", update="60m", delete="30m")
EFFECTS = {"NoSchedule": "NO_SCHEDULE", "NoExecute": "NO_EXECUTE", "PreferNoSchedule": "PREFER_NO_SCHEDULE"}
CAPACITY_TYPES = {"on-demand": "ON_DEMAND", "spot": "SPOT", "reservation": "ON_DEMAND", "capacity-block": "CAPACITY_BLOCK"}


def group_name(instance_type: str) -> str:
    """``gpu-g6-12xlarge``: known before the group exists, and another for each type, so that a replacement never meets its own name."""
    return f"gpu-{instance_type.replace('.', '-')}"


def labels(role: str, gpu: bool) -> dict[str, str]:
    """``nvidia.com/gpu.present`` is set by the nodes themselves from Kubernetes 1.35 on, but too late for an autoscaler that counts on it at zero nodes."""
    own = {config.ROLE_LABEL: role}
    return {**own, "nvidia.com/gpu.present": "true", config.EFA_LABEL[0]: config.EFA_LABEL[1]} if gpu else own


def raid0_user_data() -> str:
    """A NodeConfig that puts images, pods and scratch on the instance store, striped; as the MIME part that EKS merges with its own (base64).

    https://awslabs.github.io/amazon-eks-ami/nodeadm/doc/api/ and https://docs.aws.amazon.com/eks/latest/userguide/launch-templates.html
    """
    text = "\n".join(
        [
            "MIME-Version: 1.0",
            'Content-Type: multipart/mixed; boundary="BOUNDARY"',
            "",
            "--BOUNDARY",
            "Content-Type: application/node.eks.aws",
            "",
            "apiVersion: node.eks.aws/v1alpha1",
            "kind: NodeConfig",
            "spec:",
            "  instance:",
            "    localStorage:",
            "      strategy: RAID0",
            "",
            "--BOUNDARY--",
            "",
        ]
    )
    return base64.b64encode(text.encode()).decode()


def autoscaler_tags(cluster: str, instance: Instance, efa_devices: int, node_labels: Mapping[str, str]) -> dict[str, str]:
    """What Cluster Autoscaler must read on an Auto Scaling group to know a node that does not exist yet, GPUs and EFA devices included.

    https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/cloudprovider/aws/README.md
    """
    template = "k8s.io/cluster-autoscaler/node-template"
    key, value, effect = config.GPU_TAINT
    return {
        "k8s.io/cluster-autoscaler/enabled": "true",
        f"k8s.io/cluster-autoscaler/{cluster}": "owned",
        f"{template}/resources/nvidia.com/gpu": str(instance.gpus),
        f"{template}/resources/vpc.amazonaws.com/efa": str(efa_devices),
        f"{template}/taint/{key}": f"{value}:{effect}",
        **{f"{template}/label/{label}": text for label, text in sorted(node_labels.items())},
    }


def ways_out(errors: Sequence[str], urn: str, gpu: config.Gpu, zone: str) -> str | None:
    """What to do after the GPU group failed, by the first of AWS's texts that tells; None for errors that speak for themselves."""
    text = " ".join(errors)
    again = f"then `pulumi up --replace '{urn}'`, for an update does not repair a group that failed to be created"
    where = f"{gpu.size[1]} x {gpu.instance_type} in {zone}"
    if "InsufficientInstanceCapacity" in text or "UnfulfillableCapacity" in text:
        placement = ", gpu.placementGroup: false" if gpu.placed else ""
        return (
            f"EC2 has no capacity for {where} ({gpu.capacity.kind}). Ways out: another zone (network.zone; it replaces the nodes' subnet and both groups),"
            f" fewer nodes{placement}, another instance type or region, capacity that is yours (gpu.capacity: {{kind: reservation, id: cr-...}} or"
            f" capacity-block), or simply later: `pulumi up` again. If the group is shown as CREATE_FAILED, {again}."
        )
    if "VcpuLimitExceeded" in text:
        return f"The account's vCPU quota is too small for {where}. Lower gpu.nodes or ask for more (`python -m ops doctor` gives the command); {again}."
    if "failed to join" in text or "NodeCreationFailure" in text:
        return f"The nodes of {where} started but did not join the cluster. `python -m ops doctor` reads their console; {again}."
    if "timeout while waiting" in text:
        return (
            f"{where} took longer than {GPU_TIMEOUTS.create}. Look at the group in the EKS console; if it became ACTIVE, `pulumi refresh` and `pulumi up`;"
            f" else {again}."
        )
    return None


def _explain_failure(gpu: config.Gpu, zone: str) -> pulumi.ErrorHook:
    def explain(args: pulumi.ErrorHookArgs) -> bool:
        message = ways_out(args.errors, args.urn, gpu, zone)
        if message:
            pulumi.log.error(message)
        return False  # no automatic retry: each attempt costs money and half an hour

    return pulumi.ErrorHook("gpu-nodes-ways-out", explain)


def _metadata() -> aws.ec2.LaunchTemplateMetadataOptionsArgs:
    # Hop limit 1: pods get credentials from Pod Identity, never the node's.
    return aws.ec2.LaunchTemplateMetadataOptionsArgs(http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1)


def _root_disk(gib: int, throughput: int | None = None, iops: int | None = None) -> list[Any]:
    disk = aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
        volume_size=gib, volume_type="gp3", encrypted="true", delete_on_termination="true", throughput=throughput, iops=iops
    )
    return [aws.ec2.LaunchTemplateBlockDeviceMappingArgs(device_name="/dev/xvda", ebs=disk)]


def _launched_tags(tags: Tags, name: str) -> list[Any]:
    # Default tags reach what the API call creates, not what an Auto Scaling group launches.
    return [aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type=kind, tags=named(tags, name)) for kind in ("instance", "volume", "network-interface")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesArgs:
    """What both groups share. ``after``: policies, ways out and add-ons, without which nodes neither join nor are cleaned up."""

    cluster_name: pulumi.Input[str]
    security_group_id: pulumi.Input[str]
    role_arn: pulumi.Input[str]
    subnet_id: pulumi.Input[str]
    kubernetes_version: str
    ami_release: str | None
    after: Sequence[pulumi.Resource]
    tags: Tags

    @property
    def version(self) -> str | None:
        """A pinned AMI release says its Kubernetes version too; without one EKS takes that version's newest release at creation and keeps it."""
        return None if self.ami_release else self.kubernetes_version


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemNodesArgs(NodesArgs):
    """``late_addons``: those that have pods of their own, and so need a node."""

    system: config.System
    late_addons: Sequence[str]
    addon_pins: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuNodesArgs(NodesArgs):
    gpu: config.Gpu
    instance: Instance
    zone: str
    cluster: str  # the name as a plain text, for the keys of tags


class SystemNodes(pulumi.ComponentResource):
    """On-demand nodes for the operator, the Ray head and the submitter; CoreDNS and other add-ons that need a node follow them."""

    def __init__(self, name: str, args: SystemNodesArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("ray-train-efa:infra:SystemNodes", name, None, opts)
        system = args.system
        template = aws.ec2.LaunchTemplate(
            f"{name}-system",
            block_device_mappings=_root_disk(system.disk_gib),
            metadata_options=_metadata(),
            vpc_security_group_ids=[args.security_group_id],
            tag_specifications=_launched_tags(args.tags, f"{name}-system"),
            tags=named(args.tags, f"{name}-system"),
            opts=ResourceOptions(parent=self),
        )
        self.group = aws.eks.NodeGroup(
            f"{name}-system",
            cluster_name=args.cluster_name,
            node_role_arn=args.role_arn,
            subnet_ids=[args.subnet_id],
            ami_type=SYSTEM_AMI,
            version=args.version,
            release_version=args.ami_release,
            capacity_type="ON_DEMAND",
            instance_types=[system.instance_type],
            labels=labels("system", gpu=False),
            scaling_config=aws.eks.NodeGroupScalingConfigArgs(min_size=system.nodes, desired_size=system.nodes, max_size=system.nodes),
            update_config=aws.eks.NodeGroupUpdateConfigArgs(max_unavailable=1),
            node_repair_config=aws.eks.NodeGroupNodeRepairConfigArgs(enabled=True),
            launch_template=aws.eks.NodeGroupLaunchTemplateArgs(id=template.id, version=template.latest_version.apply(lambda v: str(int(v)))),
            tags=named(args.tags, f"{name}-system"),
            opts=ResourceOptions(parent=self, depends_on=list(args.after), custom_timeouts=SYSTEM_TIMEOUTS),
        )
        # DEGRADED for twenty minutes, and then failed, without a node.
        self.addons = [addon(name, args.cluster_name, wanted, args.addon_pins, args.tags, self, [self.group]) for wanted in args.late_addons]
        self.register_outputs({})


class GpuNodes(pulumi.ComponentResource):
    """EFA nodes in one subnet. Another instance type replaces the group, another number of nodes scales it."""

    def __init__(self, name: str, args: GpuNodesArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("ray-train-efa:infra:GpuNodes", name, None, opts)
        gpu, instance = args.gpu, args.instance
        child = ResourceOptions(parent=self)
        node_labels = labels("gpu", gpu=True)
        key, value, effect = config.GPU_TAINT
        least, most = gpu.size
        self.interfaces = efa.interfaces(instance.efa_interfaces, instance.network_cards, [args.security_group_id])

        placement = None
        if gpu.placed:
            group = aws.ec2.PlacementGroup(f"{name}-gpu", strategy="cluster", tags=named(args.tags, f"{name}-gpu"), opts=child)
            placement = aws.ec2.LaunchTemplatePlacementArgs(group_name=group.name)
        reserved, block = gpu.capacity.reserved, gpu.capacity.kind == "capacity-block"
        template = aws.ec2.LaunchTemplate(
            f"{name}-gpu",
            instance_type=gpu.instance_type if block else None,  # EKS wants a block's type here, any other in the node group
            block_device_mappings=_root_disk(gpu.disk_gib, GPU_DISK_MIBPS, GPU_DISK_IOPS),
            metadata_options=_metadata(),
            network_interfaces=[aws.ec2.LaunchTemplateNetworkInterfaceArgs(**interface) for interface in self.interfaces],
            placement=placement,
            capacity_reservation_specification=_target(gpu.capacity.id) if reserved else None,
            instance_market_options=aws.ec2.LaunchTemplateInstanceMarketOptionsArgs(market_type="capacity-block") if block else None,
            user_data=raid0_user_data(),
            tag_specifications=_launched_tags(args.tags, f"{name}-gpu"),
            tags=named(args.tags, f"{name}-gpu"),
            opts=child,
        )
        self.group = aws.eks.NodeGroup(
            f"{name}-gpu",
            node_group_name=group_name(gpu.instance_type),
            cluster_name=args.cluster_name,
            node_role_arn=args.role_arn,
            subnet_ids=[args.subnet_id],
            ami_type=GPU_AMI,
            version=args.version,
            release_version=args.ami_release,
            capacity_type=CAPACITY_TYPES[gpu.capacity.kind],
            instance_types=None if block else [gpu.instance_type],
            labels=node_labels,
            taints=[aws.eks.NodeGroupTaintArgs(key=key, value=value, effect=EFFECTS[effect])],
            # A fixed group too may go to zero: that is how the stop schedule ends it.
            scaling_config=aws.eks.NodeGroupScalingConfigArgs(min_size=least if gpu.autoscaled else 0, desired_size=least, max_size=most),
            # GPUs are scarce: terminate first, then launch; all at once, for half a group trains nothing.
            update_config=aws.eks.NodeGroupUpdateConfigArgs(update_strategy="MINIMAL", max_unavailable_percentage=100),
            node_repair_config=aws.eks.NodeGroupNodeRepairConfigArgs(enabled=True),
            launch_template=aws.eks.NodeGroupLaunchTemplateArgs(id=template.id, version=template.latest_version.apply(lambda v: str(int(v)))),
            tags=named(args.tags, f"{name}-gpu"),
            opts=ResourceOptions(
                parent=self,
                depends_on=list(args.after),
                custom_timeouts=GPU_TIMEOUTS,
                delete_before_replace=True,  # two groups at once need twice the quota and the capacity
                ignore_changes=["scalingConfig.desiredSize"] if gpu.autoscaled else None,  # the autoscaler's
                hooks=pulumi.ResourceHookBinding(on_error=[_explain_failure(gpu, args.zone)]),
            ),
        )
        self.tags: list[pulumi.Resource] = []
        if gpu.autoscaled:
            scaling_group = self.group.resources[0].autoscaling_groups[0].name
            # A managed group does not pass its own tags on to its Auto Scaling group.
            for tag_key, text in autoscaler_tags(args.cluster, instance, efa.efa_count(self.interfaces), node_labels).items():
                data = aws.autoscaling.TagTagArgs(key=tag_key, value=text, propagate_at_launch=False)
                short = tag_key.removeprefix("k8s.io/cluster-autoscaler/")
                self.tags.append(aws.autoscaling.Tag(f"{name}-{short}", autoscaling_group_name=scaling_group, tag=data, opts=child))
        self.register_outputs({})


def _target(reservation: str | None) -> aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs:
    target = aws.ec2.LaunchTemplateCapacityReservationSpecificationCapacityReservationTargetArgs(capacity_reservation_id=reservation)
    return aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs(capacity_reservation_target=target)
