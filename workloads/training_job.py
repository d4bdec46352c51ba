"""The training job: a new RayJob for whatever changes the run, and nothing where nothing does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pulumi
import pulumi_kubernetes as k8s
from pulumi import CustomTimeouts, ResourceOptions

from workloads import job


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingJobArgs:
    """job: known only when the bucket is, on the first `up`."""

    job: pulumi.Output[job.Job]
    namespace: pulumi.Input[str]
    after: Sequence[pulumi.Resource]


class TrainingJob(pulumi.ComponentResource):
    """``name``: the RayJob's. `pulumi up` does not wait for its end."""

    def __init__(self, name: str, args: TrainingJobArgs, opts: ResourceOptions) -> None:
        super().__init__("ray-train-efa:workloads:TrainingJob", name, None, opts)
        code = k8s.core.v1.ConfigMap(
            f"{name}-code",
            metadata={"name": args.job.apply(lambda made: made.code_name), "namespace": args.namespace},
            data=args.job.apply(job.code_data),
            immutable=True,
            opts=ResourceOptions(parent=self),
        )
        self.name = args.job.apply(lambda made: made.name)
        k8s.apiextensions.CustomResource(
            f"{name}-run",
            api_version="ray.io/v1",
            kind="RayJob",
            metadata={"name": self.name, "namespace": args.namespace},
            spec=args.job.apply(job.ray_job),
            opts=ResourceOptions(
                parent=self,
                depends_on=[code, *args.after],
                # Two jobs at once would write into one run's folder and wait for each other's workers.
                delete_before_replace=True,
                custom_timeouts=CustomTimeouts(delete="10m"),
            ),
        )
        self.register_outputs({})
