"""What only AWS knows, asked once at the top of the program, before any resource; fit.py judges it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pulumi
import pulumi_aws as aws
from pulumi.runtime.settings import _get_rpc_manager

from config import PROJECT, BadInput, Stack
from fit import Facts as Facts
from fit import Instance as Instance
from fit import Zone as Zone
from fit import Zones as Zones
from fit import choose_zones as choose_zones
from fit import problems as problems
from fit import quota_code as quota_code

T = TypeVar("T")


def lookup(stack: Stack) -> Facts:
    """Asks AWS through the provider. Raises BadInput for an instance type that the region does not know."""
    caller = aws.get_caller_identity()
    region = aws.get_region().region
    gpu, system = _instance("gpu", stack.gpu.instance_type, region), _instance("system", stack.system.instance_type, region)
    # Availability zones proper; local and wavelength zones have no EFA and no control plane.
    zones = aws.get_availability_zones(state="available", filters=[{"name": "opt-in-status", "values": ["opt-in-not-required"]}])
    return Facts(
        account=caller.account_id,
        partition=aws.get_partition().partition,
        region=region,
        gpu=gpu,
        system=system,
        zones=tuple(sorted((Zone(name, id) for name, id in zip(zones.names, zones.zone_ids, strict=True)), key=lambda z: z.name)),
        gpu_zones=_offered(gpu.name),
        system_zones=_offered(system.name),
        quota_vcpus=_quota(stack),
        efa_sizes=() if gpu.efa_interfaces else _efa_sizes(gpu.name),
    )


def _attempt(ask: Callable[[], T]) -> T | Exception:
    """A data source's answer, or the error of it.

    The SDK fails the program for every failed call, also for one whose error was caught: it keeps the call on its books and raises it at the end.
    So the call is taken off them here. (pulumi 3.272.0, runtime/rpc_manager.py and stack.py; a test holds it.)
    """
    manager = _get_rpc_manager()
    before = list(manager.rpcs)
    try:
        return ask()
    except Exception as error:  # the SDK raises nothing narrower
        manager.rpcs, manager.unhandled_exception, manager.exception_traceback = before, None, None
        return error


def _instance(part: str, name: str, region: str) -> Instance:
    found = _attempt(lambda: aws.ec2.get_instance_type(instance_type=name))
    if isinstance(found, Exception):
        if "InvalidInstanceType" not in str(found):
            raise found
        raise BadInput(f"{PROJECT}:{part}.instanceType = {name!r}: EC2 has no such type in {region}; correct it or choose another aws:region") from found
    nvidia = [gpu for gpu in found.gpuses or [] if gpu.manufacturer == "NVIDIA"]
    return Instance(
        name=name,
        vcpus=int(found.default_vcpus),
        memory_gib=found.memory_size / 1024,
        gpus=sum(int(gpu.count) for gpu in nvidia),
        gpu_memory_gib=nvidia[0].memory_size / 1024 if nvidia else 0.0,
        efa_interfaces=int(found.efa_maximum_interfaces or 0) if found.efa_supported else 0,
        network_cards=int(found.maximum_network_cards or 1),
        architectures=tuple(found.supported_architectures),
    )


def _offered(instance_type: str) -> tuple[str, ...]:
    found = aws.ec2.get_instance_type_offerings(filters=[{"name": "instance-type", "values": [instance_type]}], location_type="availability-zone")
    return tuple(sorted(found.locations))


def _quota(stack: Stack) -> float | None:
    code = quota_code(stack)
    if code is None:
        return None
    found = _attempt(lambda: aws.servicequotas.get_service_quota(service_code="ec2", quota_code=code))
    if isinstance(found, Exception):  # whoever may not ask may still build
        pulumi.log.warn(f"the vCPU quota {code} could not be read, so it is not checked: {found}")
        return None
    return float(found.value)


def _efa_sizes(instance_type: str) -> tuple[str, ...]:
    family = instance_type.split(".")[0]
    filters = [
        aws.ec2.GetInstanceTypesFilterArgs(name="instance-type", values=[f"{family}.*"]),
        aws.ec2.GetInstanceTypesFilterArgs(name="network-info.efa-supported", values=["true"]),
    ]
    found = _attempt(lambda: aws.ec2.get_instance_types(filters=filters))
    # Only improves the wording of another error.
    return () if isinstance(found, Exception) else tuple(sorted(found.instance_types))
