"""The hard stop: a one-time schedule in the account that removes the GPU nodes, needing nobody's laptop."""

from __future__ import annotations

import dataclasses
import datetime
import json

import pulumi
import pulumi_aws as aws
from pulumi import ResourceOptions

from infra.identity import scheduler_trust, stop_policy
from naming import Tags, named

# A node that carries it would take no pod, so the autoscaler does not bring the stopped group back.
STOPPED_TAINT = "ray-train-efa/stopped"


def stop_expression(now: datetime.datetime, delay: datetime.timedelta) -> str:
    """``at(2026-11-30T07:15:00)``, UTC: https://docs.aws.amazon.com/scheduler/latest/UserGuide/schedule-types.html"""
    return f"at({(now.astimezone(datetime.UTC) + delay).strftime('%Y-%m-%dT%H:%M:%S')})"


def stop_request(cluster: str, node_group: str, autoscaled: bool) -> dict[str, object]:
    """UpdateNodegroupConfig in the spelling of the service's SDK model: the scheduler refuses the camelCase of the EKS API.

    maxSize stays as it is (EKS wants 1 or more), so an autoscaled group is barred by a taint as well.
    """
    request: dict[str, object] = {"ClusterName": cluster, "NodegroupName": node_group, "ScalingConfig": {"MinSize": 0, "DesiredSize": 0}}
    if autoscaled:
        request["Taints"] = {"AddOrUpdateTaints": [{"Key": STOPPED_TAINT, "Value": "budget", "Effect": "NO_SCHEDULE"}]}
    return request


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoStopArgs:
    stop_after: str
    delay: datetime.timedelta
    now: datetime.datetime
    cluster: str
    node_group: str
    autoscaled: bool
    partition: str
    region: str
    account: str
    tags: Tags


class AutoStop(pulumi.ComponentResource):
    """Works on names alone, so it stands before the nodes that it stops, and stays until they are gone."""

    def __init__(self, name: str, args: AutoStopArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("ray-train-efa:infra:AutoStop", name, None, opts)
        child = ResourceOptions(parent=self)
        trust = scheduler_trust(args.partition, args.region, args.account)
        role = aws.iam.Role(f"{name}-stop", assume_role_policy=json.dumps(trust), tags=named(args.tags, f"{name}-stop"), opts=child)
        policy = stop_policy(args.partition, args.region, args.account, args.cluster, args.node_group)
        allowed = aws.iam.RolePolicy(f"{name}-stop", role=role.name, policy=json.dumps(policy), opts=child)
        self.schedule = aws.scheduler.Schedule(
            # Another stopAfter is another schedule, with another time; the time of an existing one never moves.
            f"{name}-stop-{args.stop_after}",
            description=f"Sets {args.node_group} of {args.cluster} to zero nodes (budget.stopAfter: {args.stop_after})",
            schedule_expression=stop_expression(args.now, args.delay),
            schedule_expression_timezone="UTC",
            flexible_time_window=aws.scheduler.ScheduleFlexibleTimeWindowArgs(mode="OFF"),
            action_after_completion="NONE",  # a schedule that deleted itself would be made anew by the next `up` after a refresh
            target=aws.scheduler.ScheduleTargetArgs(
                arn=f"arn:{args.partition}:scheduler:::aws-sdk:eks:updateNodegroupConfig",
                role_arn=role.arn,
                input=json.dumps(stop_request(args.cluster, args.node_group, args.autoscaled), sort_keys=True),
            ),
            opts=ResourceOptions(parent=self, depends_on=[allowed], ignore_changes=["scheduleExpression"]),
        )
        self.stops_at = self.schedule.schedule_expression.apply(lambda at: at.removeprefix("at(").removesuffix(")") + "Z")
        self.register_outputs({"stopsAt": self.stops_at})
