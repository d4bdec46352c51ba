"""Config -> infra -> workloads -> outputs. `pulumi up` runs this."""

from __future__ import annotations

import datetime

import pulumi
from pulumi.runtime import config as engine

import config
from infra.build import build
from training.errors import BadInput


def main() -> None:
    project, stack_name = pulumi.get_project(), pulumi.get_stack()
    values = {**engine.get_config_env(), **engine.CONFIG.get()}
    stack = config.from_pulumi(values, project)
    if stack.cluster.kind == "existing":
        return
    allowed = pulumi.Config("aws").get_object("allowedAccountIds") or []
    infrastructure = build(stack, project, stack_name, datetime.datetime.now(datetime.UTC), [str(account) for account in allowed])
    for key, value in infrastructure.outputs.items():
        pulumi.export(key, value)


try:
    main()
except BadInput as error:
    # The engine prints a RunError's text alone, without a traceback.
    raise pulumi.RunError(str(error)) from None
