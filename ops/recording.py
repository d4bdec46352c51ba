"""Runs the program with neither an engine nor an account: every resource that it registers is written down, and made nowhere."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
import logging
import runpy
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pulumi
from pulumi.runtime.mocks import MockCallArgs, MockMonitor, MockResourceArgs, Mocks, set_mocks
from pulumi.runtime.settings import get_root_resource
from pulumi.runtime.stack import run_pulumi_func
from pulumi.runtime.sync_await import _sync_await

import config
import fit
from ops import target
from ops.errors import BadInput

CLUSTER = "eks:index:Cluster"
# A cluster that the component makes for itself; its outputs are read through a reference to it (the marks are the engine's own).
INNER_CLUSTER = "aws:eks/cluster:Cluster"
RESOURCE_REFERENCE = {"4dabf18193072939515e22adb298388d": "5cf8f73096256a8f31e491e813e4eb8e"}
PROGRAM_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Registered:
    """A resource of the program. urn: as the engine makes it, with the types of all components above; type: ``aws:ec2/vpc:Vpc``."""

    urn: str
    type: str
    name: str
    custom: bool


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What the program registered and exported; said: its own messages to a person."""

    resources: tuple[Registered, ...]
    outputs: Mapping[str, Any]
    said: tuple[str, ...]


@dataclasses.dataclass
class _Account(Mocks):
    """Answers the program's questions from facts that are known already."""

    facts: fit.Facts
    instances: Mapping[str, fit.Instance]

    def call(self, args: MockCallArgs) -> Any:
        facts, asked = self.facts, args.args
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "getCallerIdentity": lambda: {"accountId": facts.account, "arn": "", "userId": "", "id": facts.account},
            "getRegion": lambda: {"region": facts.region, "id": facts.region, "name": facts.region, "description": "", "endpoint": ""},
            "getPartition": lambda: {"partition": facts.partition, "id": facts.partition, "dnsSuffix": "", "reverseDnsPrefix": ""},
            "getAvailabilityZones": lambda: {"names": [z.name for z in facts.zones], "zoneIds": [z.id for z in facts.zones], "groupNames": [], "id": "zones"},
            "getInstanceType": lambda: self._instance(asked["instanceType"]),
            "getInstanceTypeOfferings": lambda: self._offerings(asked["filters"][0]["values"][0]),
            "getInstanceTypes": lambda: {"instanceTypes": list(facts.efa_sizes), "id": "types"},
            "getServiceQuota": lambda: {"value": facts.quota_vcpus if facts.quota_vcpus is not None else 1e9, "id": "quota"},
        }
        return answers[args.token.split(":")[-1].split("/")[-1]]()

    def _instance(self, name: str) -> dict[str, Any]:
        if name not in self.instances:
            raise Exception(f"InvalidInstanceType: [{name}]")  # the SDK's data sources raise nothing narrower
        found = self.instances[name]
        gpus = [{"count": found.gpus, "manufacturer": "NVIDIA", "memorySize": found.gpu_memory_gib * 1024, "name": ""}] if found.gpus else []
        return {
            "id": name,
            "instanceType": name,
            "defaultVcpus": found.vcpus,
            "memorySize": found.memory_gib * 1024,
            "gpuses": gpus,
            "efaSupported": bool(found.efa_interfaces),
            "efaMaximumInterfaces": found.efa_interfaces,
            "maximumNetworkCards": found.network_cards,
            "supportedArchitectures": list(found.architectures),
        }

    def _offerings(self, name: str) -> dict[str, Any]:
        places = self.facts.gpu_zones if name == self.facts.gpu.name else self.facts.system_zones
        return {"instanceTypes": [name] * len(places), "locations": list(places), "locationTypes": ["availability-zone"] * len(places), "id": "offerings"}

    def new_resource(self, args: MockResourceArgs) -> tuple[str, dict[str, Any]]:
        """What AWS would compute: enough for what reads it."""
        inputs, name = dict(args.inputs), args.name
        given = inputs.get("name") or inputs.get("bucket") or inputs.get("nodeGroupName") or name
        computed: dict[str, Any] = {"name": given, "arn": f"arn:{self.facts.partition}:::{name}", "id": name}
        if args.typ.endswith(":LaunchTemplate"):
            computed["latestVersion"] = 1
        if args.typ.endswith("bucket:Bucket"):
            computed["bucket"] = f"{name}-..."
        if args.typ.endswith(":NodeGroup"):
            computed |= {"nodeGroupName": given, "resources": [{"autoscalingGroups": [{"name": f"eks-{given}"}]}]}
        if args.typ == CLUSTER:
            computed |= {"kubeconfigJson": "{}", "kubeconfig": {}}
        return name, {**computed, **inputs}


class _Recorder(MockMonitor):
    def __init__(self, mocks: Mocks) -> None:
        super().__init__(mocks)
        self.seen: list[Registered] = []
        self.types: dict[str, str] = {}

    def _note(self, urn: str, parent: str, type: str, name: str, custom: bool) -> None:
        """The mocks' own URNs know only the nearest component."""
        self.types[urn] = f"{self.types[parent]}${type}" if parent in self.types else type
        self.seen.append(Registered(f"urn:pulumi:{pulumi.get_stack()}::{config.PROJECT}::{self.types[urn]}::{name}", type, name, custom))

    def RegisterResource(self, request: Any) -> Any:
        if request.type == "pulumi:pulumi:Stack":
            return super().RegisterResource(request)  # type: ignore[no-untyped-call]
        urn = self.make_urn(request.parent, request.type, request.name)
        self._note(urn, request.parent, request.type, request.name, bool(request.custom))
        if request.type != CLUSTER:
            return super().RegisterResource(request)  # type: ignore[no-untyped-call]
        inner = self.make_urn(urn, INNER_CLUSTER, request.name)
        state = {"name": request.name, "arn": f"arn:aws:eks:::cluster/{request.name}", "endpoint": "", "vpcConfig": {"clusterSecurityGroupId": "sg-..."}}
        self.resources[inner] = MockMonitor.ResourceRegistration(inner, request.name, state)
        self._note(inner, urn, INNER_CLUSTER, request.name, True)
        # A resource among the inputs would be read back on a thread with an event loop of its own.
        del request.object["serviceRole"]
        response = super().RegisterResource(request)  # type: ignore[no-untyped-call]
        response.object.update({"eksCluster": {**RESOURCE_REFERENCE, "urn": inner, "id": request.name}})
        return response


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def record(aim: target.Target, facts: fit.Facts, instances: Mapping[str, fit.Instance]) -> Recorded:
    """Runs the program of the stack's folder as it would run for a new stack in an account of these facts.

    Raises BadInput with the program's own words where it refuses the stack. Runs in a thread and a context of its own, so that nothing of it stays.
    """
    outcome: list[Recorded | BaseException] = []

    def work() -> None:
        try:
            outcome.append(contextvars.Context().run(_run, aim, facts, instances))
        except BaseException as error:
            outcome.append(error)

    worker = threading.Thread(target=work, name="recording", daemon=True)
    worker.start()
    worker.join(PROGRAM_SECONDS)
    if not outcome:
        raise BadInput(f"the program of {aim.file.parent} did not end within {PROGRAM_SECONDS} s; run `pulumi preview --stack {aim.name}` to see why")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _run(aim: target.Target, facts: fit.Facts, instances: Mapping[str, fit.Instance]) -> Recorded:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    kept = _Kept()
    logger = logging.Logger("program")
    logger.addHandler(kept)
    account = _Account(facts, instances)
    recorder = _Recorder(account)
    set_mocks(account, project=config.PROJECT, stack=aim.name, preview=False, logger=logger, monitor=recorder)
    pulumi.runtime.set_all_config(*_values(aim))
    refused: list[pulumi.RunError] = []

    def program() -> None:
        try:
            runpy.run_path(str(_program(aim.file.parent)), run_name="__main__")
        except pulumi.RunError as error:
            refused.append(error)

    outputs: dict[str, Any] = {}
    try:
        _sync_await(run_pulumi_func(program))
        root: Any = get_root_resource()
        for key, value in (root.outputs if root else {}).items():
            outputs[key] = _sync_await(pulumi.Output.from_input(value).future())
    finally:
        loop.close()
        asyncio.set_event_loop(None)
    if refused:
        raise BadInput(str(refused[0]))
    return Recorded(tuple(recorder.seen), outputs, tuple(kept.lines))


def _program(folder: Path) -> Path:
    """The program beside the stack file; a folder that holds stack files alone is one of this program."""
    beside = folder / "__main__.py"
    return beside if beside.is_file() else target.ROOT / "__main__.py"


def _values(aim: target.Target) -> tuple[dict[str, str], list[str]]:
    """The stack file as the engine hands it to the program: texts, objects as JSON; and the keys that are secrets."""
    values, secrets = {}, []
    for key, value in target.mapping(aim.file).items():
        plain = target.plain_secret(value)
        if plain is not value:
            secrets.append(str(key))
        values[str(key)] = plain if isinstance(plain, str) else json.dumps(plain)
    if aim.region and "aws:region" not in values:
        values["aws:region"] = aim.region
    return values, secrets
