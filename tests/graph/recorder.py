"""Runs the program under Pulumi's mocks and keeps every registration, so that order, pins, tags and rights become plain asserts."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
import logging
import runpy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pulumi
from google.protobuf import json_format
from pulumi.runtime.mocks import MockCallArgs, MockMonitor, MockResourceArgs, Mocks, set_mocks
from pulumi.runtime.settings import get_root_resource
from pulumi.runtime.stack import run_pulumi_func
from pulumi.runtime.sync_await import _sync_await

ROOT = Path(__file__).parents[2]
RESOURCE_REFERENCE = {"4dabf18193072939515e22adb298388d": "5cf8f73096256a8f31e491e813e4eb8e"}

VPC, SUBNET, NAT, ROUTE = "aws:ec2/vpc:Vpc", "aws:ec2/subnet:Subnet", "aws:ec2/natGateway:NatGateway", "aws:ec2/route:Route"
LINK, IGW, EIP = "aws:ec2/routeTableAssociation:RouteTableAssociation", "aws:ec2/internetGateway:InternetGateway", "aws:ec2/eip:Eip"
ENDPOINT, TEMPLATE, PLACEMENT = "aws:ec2/vpcEndpoint:VpcEndpoint", "aws:ec2/launchTemplate:LaunchTemplate", "aws:ec2/placementGroup:PlacementGroup"
GROUP, ADDON, EKS, CLUSTER = "aws:eks/nodeGroup:NodeGroup", "aws:eks/addon:Addon", "aws:eks/cluster:Cluster", "eks:index:Cluster"
ROLE, ATTACHMENT, ROLE_POLICY = "aws:iam/role:Role", "aws:iam/rolePolicyAttachment:RolePolicyAttachment", "aws:iam/rolePolicy:RolePolicy"
ASSOCIATION, BUCKET, LOGS = "aws:eks/podIdentityAssociation:PodIdentityAssociation", "aws:s3/bucket:Bucket", "aws:cloudwatch/logGroup:LogGroup"
SCHEDULE, ASG_TAG, SECURITY_GROUP = "aws:scheduler/schedule:Schedule", "aws:autoscaling/tag:Tag", "aws:ec2/securityGroup:SecurityGroup"
FSX = "aws:fsx/lustreFileSystem:LustreFileSystem"

# EC2 DescribeInstanceTypes: vCPUs, GiB, GPUs, GiB a GPU, EFA interfaces, network cards, architecture.
INSTANCES: dict[str, tuple[int, int, int, int, int, int, str]] = {
    "m7i.xlarge": (4, 16, 0, 0, 0, 1, "x86_64"),
    "m7i.2xlarge": (8, 32, 0, 0, 0, 1, "x86_64"),
    "m7g.xlarge": (4, 16, 0, 0, 0, 1, "arm64"),
    "g6.4xlarge": (16, 64, 1, 22, 0, 1, "x86_64"),
    "g6.12xlarge": (48, 192, 4, 22, 1, 1, "x86_64"),
    "g6.24xlarge": (96, 384, 4, 22, 1, 1, "x86_64"),
    "g6.48xlarge": (192, 768, 8, 22, 1, 1, "x86_64"),
    "g6e.48xlarge": (192, 1536, 8, 44, 4, 4, "x86_64"),
    "p4d.24xlarge": (96, 1152, 8, 40, 4, 4, "x86_64"),
    "p5.48xlarge": (192, 2048, 8, 80, 32, 32, "x86_64"),
    "p5en.48xlarge": (192, 2048, 8, 141, 16, 16, "x86_64"),
    "p6-b300.48xlarge": (192, 4096, 8, 268, 16, 17, "x86_64"),
}
SHAPES = ("g6.12xlarge", "g6.48xlarge", "g6e.48xlarge", "p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge")


@dataclasses.dataclass
class Account(Mocks):
    """An AWS account's answers. ``outputs`` gives what AWS computes of a new resource."""

    number: str = "123456789012"
    region: str = "us-west-2"
    zones: tuple[tuple[str, str], ...] = (("us-west-2a", "usw2-az1"), ("us-west-2b", "usw2-az2"), ("us-west-2c", "usw2-az3"))
    offered: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # type -> zones; all where it is missing
    quota: float | None = 10_000.0  # None: the call is denied

    def call(self, args: MockCallArgs) -> Any:
        answer = self.answers()[args.token.split(":")[-1]]
        return answer(args.args)

    def answers(self) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        return {
            "getCallerIdentity": lambda a: {"accountId": self.number, "arn": f"arn:aws:iam::{self.number}:user/someone", "userId": "AIDA", "id": self.number},
            "getRegion": lambda a: {"region": self.region, "id": self.region, "description": "", "endpoint": "", "name": self.region},
            "getPartition": lambda a: {"partition": "aws", "id": "aws", "dnsSuffix": "amazonaws.com", "reverseDnsPrefix": "com.amazonaws"},
            "getAvailabilityZones": lambda a: {"names": [z[0] for z in self.zones], "zoneIds": [z[1] for z in self.zones], "groupNames": [], "id": "zones"},
            "getInstanceType": self.instance_type,
            "getInstanceTypeOfferings": self.offerings,
            "getInstanceTypes": lambda a: {
                "instanceTypes": sorted(n for n, i in INSTANCES.items() if n.startswith(a["filters"][0]["values"][0][:-1]) and i[4]),
                "id": "types",
            },
            "getServiceQuota": self.service_quota,
        }

    def instance_type(self, args: dict[str, Any]) -> dict[str, Any]:
        name = args["instanceType"]
        if name not in INSTANCES:
            raise Exception(f"InvalidInstanceType: The following supplied instance types do not exist: [{name}]")
        vcpus, gib, gpus, gpu_gib, efa, cards, architecture = INSTANCES[name]
        return {
            "id": name,
            "instanceType": name,
            "defaultVcpus": vcpus,
            "memorySize": gib * 1024,
            "gpuses": [{"count": gpus, "manufacturer": "NVIDIA", "memorySize": gpu_gib * 1024, "name": "GPU"}] if gpus else [],
            "efaSupported": bool(efa),
            "efaMaximumInterfaces": efa,
            "maximumNetworkCards": cards,
            "supportedArchitectures": [architecture],
        }

    def offerings(self, args: dict[str, Any]) -> dict[str, Any]:
        name = args["filters"][0]["values"][0]
        places = list(self.offered.get(name, tuple(zone for zone, _ in self.zones)))
        return {"instanceTypes": [name] * len(places), "locations": places, "locationTypes": ["availability-zone"] * len(places), "id": "offerings"}

    def service_quota(self, args: dict[str, Any]) -> dict[str, Any]:
        if self.quota is None:
            raise Exception("AccessDeniedException: not authorized to perform servicequotas:GetServiceQuota")
        return {"value": self.quota, "quotaCode": args["quotaCode"], "serviceCode": args["serviceCode"], "id": "quota"}

    def new_resource(self, args: MockResourceArgs) -> tuple[str, dict[str, Any]]:
        inputs, name = args.inputs, args.name
        given = inputs.get("name") or inputs.get("bucket") or inputs.get("nodeGroupName") or f"{name}-1234567"
        computed: dict[str, Any] = {"name": given, "arn": f"arn:aws:any:::{name}", "id": f"{name}-id"}
        if args.typ == TEMPLATE:
            computed["latestVersion"] = 1
        if args.typ == BUCKET:
            computed |= {"bucket": f"{name}-1234567", "arn": f"arn:aws:s3:::{name}-1234567"}
        if args.typ == GROUP:
            computed |= {"nodeGroupName": given, "resources": [{"autoscalingGroups": [{"name": f"eks-{given}"}]}]}
        if args.typ == CLUSTER:
            computed |= {"kubeconfigJson": "{}", "kubeconfig": {}}
        return f"{name}-id", {**computed, **inputs}


@dataclasses.dataclass(frozen=True)
class Node:
    urn: str
    type: str
    name: str
    parent: str
    inputs: dict[str, Any]
    depends: frozenset[str]
    request: Any
    order: int

    @property
    def custom(self) -> bool:
        return bool(self.request is None or self.request.custom)


class Recorder(MockMonitor):
    def __init__(self, mocks: Mocks) -> None:
        super().__init__(mocks)
        self.nodes: dict[str, Node] = {}
        self.invokes: list[str] = []

    def Invoke(self, request: Any) -> Any:
        self.invokes.append(request.tok)
        return super().Invoke(request)

    def RegisterResource(self, request: Any) -> Any:
        if request.type == "pulumi:pulumi:Stack":
            return super().RegisterResource(request)
        urn = self.make_urn(request.parent, request.type, request.name)
        depends = set(request.dependencies) | {d for p in request.propertyDependencies.values() for d in p.urns}
        self.nodes[urn] = Node(
            urn, request.type, request.name, request.parent, json_format.MessageToDict(request.object), frozenset(depends), request, len(self.nodes)
        )
        if request.type == CLUSTER:
            return self._register_cluster(request, urn, frozenset(depends))
        return super().RegisterResource(request)

    def _register_cluster(self, request: Any, urn: str, depends: frozenset[str]) -> Any:
        """The component's own child, which the mocks do not make: the one that matters for order."""
        child = self.make_urn(urn, EKS, f"{request.name}-eksCluster")
        state = {
            "name": request.name,
            "arn": f"arn:aws:eks:::cluster/{request.name}",
            "endpoint": "https://eks",
            "vpcConfig": {"clusterSecurityGroupId": "sg-cluster"},
        }
        self.resources[child] = MockMonitor.ResourceRegistration(child, request.name, state)
        self.nodes[child] = Node(child, EKS, f"{request.name}-eksCluster", urn, state, depends, None, len(self.nodes))
        # A resource among the inputs would be read back on a thread with an event loop of its own.
        del request.object["serviceRole"]
        response = super().RegisterResource(request)
        reference = {**RESOURCE_REFERENCE, "urn": child, "id": request.name}
        response.object.update({"eksCluster": reference})
        return response


@dataclasses.dataclass
class Graph:
    """What a program registered. Edges as the engine sees them: dependencies, the parent, and all children of a component depended on."""

    nodes: dict[str, Node]
    outputs: dict[str, Any]
    logs: list[str]
    invokes: list[str]
    error: BaseException | None = None

    def of(self, type_: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.type == type_]

    def one(self, type_: str, name: str = "") -> Node:
        found = [node for node in self.of(type_) if name in node.name]
        assert len(found) == 1, f"{len(found)} of {type_} with {name!r} in their name: {[n.name for n in self.of(type_)]}"
        return found[0]

    def descendants(self, urn: str) -> set[str]:
        children = {n.urn for n in self.nodes.values() if n.parent == urn}
        return children.union(*(self.descendants(child) for child in children)) if children else set()

    def edges(self, node: Node) -> set[str]:
        found = set(node.depends) | ({node.parent} if node.parent in self.nodes else set())
        if node.request is not None and node.request.provider:
            found.add(node.request.provider.rpartition("::")[0])  # the engine orders by a resource's provider, too
        for urn in list(node.depends):
            target = self.nodes.get(urn)
            if target is not None and not target.custom:
                found |= {u for u in self.descendants(urn) if self.nodes[u].order < node.order}
        return {urn for urn in found if urn in self.nodes and urn != node.urn}

    def before(self, node: Node) -> set[str]:
        """URNs that exist before ``node`` is made, and outlive it."""
        seen: set[str] = set()
        pending = [node]
        while pending:
            for urn in self.edges(pending.pop()):
                if urn not in seen:
                    seen.add(urn)
                    pending.append(self.nodes[urn])
        return seen

    def waits(self, user: Node, used: Iterable[Node]) -> None:
        before = self.before(user)
        missing = [node.name for node in used if node.urn not in before]
        assert not missing, f"{user.type} {user.name} does not wait for {missing}"

    def waves(self) -> list[set[str]]:
        """Layers of creation; deletion takes them from the last to the first, each after the whole one before (ScheduleDeletes)."""
        left, waves = set(self.nodes), []
        while left:
            ready = {urn for urn in left if not self.edges(self.nodes[urn]) & left}
            assert ready, "a cycle"
            waves.append(ready)
            left -= ready
        return waves

    def wave(self, node: Node) -> int:
        return next(i for i, wave in enumerate(self.waves()) if node.urn in wave)


def run(
    settings: Mapping[str, Any] | None = None,
    *,
    account: Account | None = None,
    stack: str = "dev",
    preview: bool = False,
    aws: Mapping[str, Any] | None = None,
) -> Graph:
    """Runs __main__.py with a stack file's settings ({"gpu": {...}}) in a context of its own; an error of the program lands in ``error``."""
    return contextvars.Context().run(_run, settings or {}, account or Account(), stack, preview, aws or {})


def _run(settings: Mapping[str, Any], account: Account, stack: str, preview: bool, aws: Mapping[str, Any]) -> Graph:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    logs: list[str] = []
    logger = logging.Logger("program")
    logger.addHandler(_Collect(logs))
    recorder = Recorder(account)
    set_mocks(account, project="ray-train-efa", stack=stack, preview=preview, logger=logger, monitor=recorder)
    values = {f"ray-train-efa:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    values |= {"aws:region": account.region, **{f"aws:{key}": json.dumps(value) for key, value in aws.items()}}
    pulumi.runtime.set_all_config(values)
    outputs: dict[str, Any] = {}
    error: BaseException | None = None

    def program() -> None:
        nonlocal error
        try:
            runpy.run_path(str(ROOT / "__main__.py"), run_name="__main__")
        except pulumi.RunError as found:
            error = found

    try:
        _sync_await(run_pulumi_func(program))
        root = get_root_resource()
        for key, value in (root.outputs if root else {}).items():  # type: ignore[attr-defined]
            outputs[key] = _sync_await(pulumi.Output.from_input(value).future())
    finally:
        loop.close()
        asyncio.set_event_loop(None)
    return Graph(recorder.nodes, outputs, logs, recorder.invokes, error)


class _Collect(logging.Handler):
    def __init__(self, logs: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self.logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.INFO:
            self.logs.append(record.getMessage())
