"""Config -> infra -> workloads -> outputs. `pulumi up` runs this."""

from __future__ import annotations

import datetime

import pulumi
from pulumi.runtime import config as engine

import config
from infra.build import build


def main() -> None:
    project, stack_name = pulumi.get_project(), pulumi.get_stack()
    values = {**engine.get_config_env(), **engine.CONFIG.get()}
    stack = config.from_pulumi(values, project)
    outputs: dict[str, pulumi.Input[object]] = {}
    if stack.cluster.kind == "create":
        allowed = [str(account) for account in pulumi.Config("aws").get_object("allowedAccountIds") or []]
        infrastructure = build(stack, project, stack_name, datetime.datetime.now(datetime.UTC), allowed)
        outputs |= infrastructure.outputs
    for key, value in outputs.items():
        pulumi.export(key, value)


try:
    main()
except config.BadInput as error:
    # The engine prints a RunError's text alone, without a traceback.
    raise pulumi.RunError(str(error)) from None
