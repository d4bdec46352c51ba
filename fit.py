"""Does a stack fit an account: what AWS said of it as plain data, and the pure checks against it.

The program asks through its provider (infra/facts.py), `python -m ops doctor` with boto3; both judge with what is here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import versions
from config import PROJECT, Stack

# Zones that can't host a control plane, by zone id, for letters differ per account.
# https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html
ZONES_WITHOUT_CONTROL_PLANE = frozenset({"use1-az3", "usw1-az2", "cac1-az3"})

# Running instances in vCPU, Service Quotas code: (on-demand, spot).
QUOTAS = {"g": ("L-DB2E81BA", "L-3819A6DF"), "p": ("L-417A185B", "L-7212CCBC"), "p5": ("L-417A185B", "L-C4BD4855")}

# What else runs on the system nodes: operator 512 MiB, CoreDNS twice 170, submitter 1 GiB, autoscaler 600, agents.
SYSTEM_PODS_GIB = 3.0
# What the kernel and firmware keep of an instance's nominal memory (Karpenter's vmMemoryOverheadPercent default).
VM_OVERHEAD = 0.075


@dataclasses.dataclass(frozen=True)
class Instance:
    """An instance type by EC2's DescribeInstanceTypes."""

    name: str
    vcpus: int
    memory_gib: float
    gpus: int
    gpu_memory_gib: float  # each
    efa_interfaces: int
    network_cards: int
    architectures: tuple[str, ...]

    @property
    def allocatable_gib(self) -> float:
        """Memory left for pods: nodeadm reserves 255 MiB + 11 MiB a pod (110 pods up to 30 vCPU, else 250), the kubelet evicts below 100 MiB."""
        pods = 110 if self.vcpus <= 30 else 250
        return self.memory_gib * (1 - VM_OVERHEAD) - (255 + 11 * pods + 100) / 1024


@dataclasses.dataclass(frozen=True)
class Zone:
    name: str
    id: str


@dataclasses.dataclass(frozen=True)
class Facts:
    account: str
    partition: str
    region: str
    gpu: Instance
    system: Instance
    zones: tuple[Zone, ...]
    gpu_zones: tuple[str, ...]
    system_zones: tuple[str, ...]
    quota_vcpus: float | None  # None: not known (no right to ask, or no such quota)
    efa_sizes: tuple[str, ...] = ()  # EFA sizes of the GPU type's family; asked only where the type has no EFA


@dataclasses.dataclass(frozen=True)
class Zones:
    """Where things go: all nodes in one zone, the control plane in two others or the same."""

    nodes: str
    control_plane: tuple[str, str]


def _no_room_to_prepare(stack: Stack, system: Instance) -> list[str]:
    """Whether no system node could take a pod that prepares data (workloads.manifests): the job would wait for it for ever."""
    beside = (SYSTEM_PODS_GIB + stack.ray.head_memory_gib, 1 + stack.ray.head_cpu) if stack.system.nodes == 1 else (1.0, 1)
    memory, cpus = system.allocatable_gib - beside[0], system.vcpus - beside[1]
    if stack.ray.worker_memory_gib <= memory and stack.ray.worker_cpu <= cpus:
        return []
    return [
        f"{PROJECT}:training.prepare wants a pod with {stack.ray.worker_cpu:g} CPUs and {stack.ray.worker_memory} on a system node, and {system.name}"
        f" has {max(0, cpus)} CPUs and {max(0.0, memory):.1f} GiB left; use system.nodes: 2, a bigger system.instanceType, or less in ray.workerCpu"
        " and ray.workerMemory"
    ]


def problems(stack: Stack, facts: Facts, allowed_accounts: Sequence[str] = ()) -> list[str]:
    """What of a well-formed stack this account and region can't do; each with key, value and way out."""
    gpu, system, region = facts.gpu, facts.system, facts.region
    found: list[str] = []
    if allowed_accounts and facts.account not in allowed_accounts:
        found.append(f"aws:allowedAccountIds = {', '.join(allowed_accounts)}, but these credentials are of account {facts.account}; use the right AWS_PROFILE")
    key = f"{PROJECT}:gpu.instanceType = {gpu.name!r}"
    if not gpu.efa_interfaces:
        ask = f"aws ec2 describe-instance-types --region {region} --filters Name=network-info.efa-supported,Values=true"
        sizes = ", ".join(facts.efa_sizes) or f"none known; ask {ask}"
        found.append(f"{key} has no EFA; types of this family that have it: {sizes}")
    if not gpu.gpus:
        found.append(f"{key} has no whole NVIDIA GPU; use a type such as g6.12xlarge")
    for part, instance in (("gpu", gpu), ("system", system)):
        if "x86_64" not in instance.architectures:
            found.append(f"{PROJECT}:{part}.instanceType = {instance.name!r} is {' or '.join(instance.architectures)}; the images are x86_64")
    head = stack.ray.head_memory_gib
    if head + SYSTEM_PODS_GIB > system.allocatable_gib:
        found.append(
            f"{PROJECT}:ray.headMemory = {stack.ray.head_memory!r} does not fit {system.name}: {system.allocatable_gib:.1f} GiB for pods, of which"
            f" operator, DNS and submitter take {SYSTEM_PODS_GIB:.0f}; use {max(0, int(system.allocatable_gib - SYSTEM_PODS_GIB))}Gi or less,"
            f" or a bigger system.instanceType"
        )
    if stack.ray.head_cpu > system.vcpus - 1:
        found.append(f"{PROJECT}:ray.headCpu = {stack.ray.head_cpu} does not fit {system.name} with {system.vcpus} vCPUs, one of them for the rest; lower it")
    if stack.training.prepare is not None and stack.gpu.autoscaled:
        found += _no_room_to_prepare(stack, system)
    if stack.zone and stack.zone not in [z.name for z in facts.zones]:
        found.append(f"{PROJECT}:network.zone = {stack.zone!r} is not open to this account; zones: {', '.join(z.name for z in facts.zones)}")
    elif stack.zone:
        for part, instance, offered in (("gpu", gpu, facts.gpu_zones), ("system", system, facts.system_zones)):
            if stack.zone not in offered:
                others = ", ".join(offered) or f"none in {region}"
                found.append(f"{PROJECT}:network.zone = {stack.zone!r} does not offer {part}.instanceType {instance.name}; zones that do: {others}")
    elif not set(facts.gpu_zones) & set(facts.system_zones):
        found.append(f"{key}: no zone of {region} offers it together with {system.name}; choose another region (aws:region) or type")
    able = len(_control_plane_zones(facts.zones))
    if able < 2:
        found.append(f"aws:region = {region}: a control plane needs two zones that can host one, and this account has {able}; choose another region")
    cni = stack.pins.addons.get("vpc-cni")
    if cni and gpu.network_cards > 1 and _numbers(cni) < _numbers(versions.OLDEST_VPC_CNI_FOR_EFA_ONLY):
        oldest = versions.OLDEST_VPC_CNI_FOR_EFA_ONLY
        found.append(f"{PROJECT}:pins.addonVersions.vpc-cni = {cni!r} does not know the efa-only interfaces of {gpu.name}; use v{oldest} or newer")
    needed = gpu.vcpus * stack.gpu.size[1]
    code = quota_code(stack)
    if code and facts.quota_vcpus is not None and needed > facts.quota_vcpus:
        found.append(
            f"{PROJECT}:gpu: {stack.gpu.size[1]} x {gpu.name} need {needed} vCPUs, the quota {code} of {region} allows {facts.quota_vcpus:g};"
            f" lower gpu.nodes (or gpu.maxNodes), or ask: aws service-quotas request-service-quota-increase --service-code ec2"
            f" --quota-code {code} --desired-value {needed} --region {region}"
        )
    return found


def choose_zones(stack: Stack, facts: Facts) -> Zones:
    """The stack's zone, or the first by name that offers both types; the control plane there too where that zone can host one, and in the next."""
    nodes = stack.zone or sorted(set(facts.gpu_zones) & set(facts.system_zones))[0]
    able = sorted(_control_plane_zones(facts.zones), key=lambda name: (name != nodes, name))
    return Zones(nodes, (able[0], able[1]))


def quota_code(stack: Stack) -> str | None:
    """The vCPU quota that launching the GPU nodes counts against; None for reserved capacity, whose quota was spent when it was reserved."""
    family = stack.gpu.instance_type.split(".")[0]
    codes = QUOTAS["p5" if family.startswith("p5") else "p" if family.startswith("p") else "g"]
    return {"on-demand": codes[0], "spot": codes[1]}.get(stack.gpu.capacity.kind)


def _control_plane_zones(zones: Sequence[Zone]) -> list[str]:
    return [zone.name for zone in zones if zone.id not in ZONES_WITHOUT_CONTROL_PLANE]


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in match.groups()) if match else ()
