"""Config -> infra -> workloads -> outputs. `pulumi up` runs this."""

from __future__ import annotations

import datetime

import pulumi
from pulumi.runtime import config as engine

import config
import naming
from infra.build import build
from workloads import build as workloads


def main() -> None:
    project, stack_name = pulumi.get_project(), pulumi.get_stack()
    values = {**engine.get_config_env(), **engine.CONFIG.get()}
    stack = config.from_pulumi(values, project, [key for key in values if engine.is_config_secret(key)])
    secrets = {name: pulumi.Config(project).get_secret(name) for name in config.SECRETS}
    outputs: dict[str, pulumi.Input[object]] = {}
    nodes = None
    if stack.cluster.kind == "create":
        allowed = [str(account) for account in pulumi.Config("aws").get_object("allowedAccountIds") or []]
        infrastructure = build(stack, project, stack_name, datetime.datetime.now(datetime.UTC), allowed)
        outputs |= infrastructure.outputs
        gpu = infrastructure.gpu
        nodes = workloads.Nodes(
            kubeconfig=infrastructure.kubeconfig,
            storage_uri=infrastructure.storage_uri,
            region=str(infrastructure.outputs["region"]),
            instance_type=gpu.name,
            vcpus=gpu.vcpus,
            allocatable_gib=gpu.allocatable_gib,
            gpus=gpu.gpus,
            efa=infrastructure.efa_devices,
            ready=infrastructure.ready,
        )
    outputs |= workloads.build(stack, naming.prefix(project, stack_name), nodes, secrets)
    for key, value in outputs.items():
        pulumi.export(key, value)


try:
    main()
except config.BadInput as error:
    # The engine prints a RunError's text alone, without a traceback.
    raise pulumi.RunError(str(error)) from None
