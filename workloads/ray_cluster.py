"""The Ray cluster, with its service account, secrets, volume and network policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
import pulumi_kubernetes as k8s
from pulumi import CustomTimeouts, ResourceHookBinding, ResourceOptions

import config
from workloads import diagnosis, manifests, storage, watch

SEEN = "ray-train-efa/seen-ready"
WAY_OUT = {
    True: "Ask for less (ray.headCpu, ray.headMemory), or take larger nodes (system.instanceType, gpu.instanceType)",
    False: "Ask for less (ray.headCpu, headMemory, workers, workerCpu, workerMemory), or give the cluster more or larger nodes",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayClusterArgs:
    """secrets: name -> value of config.SECRETS, None where not set. devices: what the GPU nodes must show first, None where there are none.

    watched: how the program itself sees the cluster. crd_update: the command that updates the operator's CRDs. after: the operator and the device plugins.
    """

    cluster: manifests.Cluster
    namespace: pulumi.Input[str]
    operator_labels: Mapping[str, str]
    secrets: Mapping[str, pulumi.Output[str] | None]
    devices: diagnosis.Devices | None
    watched: watch.Watched
    crd_update: str
    after: Sequence[pulumi.Resource]


def ready_hook(name: str, args: RayClusterArgs, made_from: str) -> pulumi.ResourceHook:
    workers = args.cluster.workers
    want = diagnosis.RayPods(
        made_from=made_from,
        workers=workers.least,
        autoscaled=workers.least != workers.most,
        way_out=WAY_OUT[args.cluster.on_eks],
    )
    return watch.ready_hook(name, args.watched, args.namespace, args.cluster.name, args.operator_labels, want)


class RayCluster(pulumi.ComponentResource):
    """``cluster``: the RayCluster, there at once. ``ready``: exists when the head and every worker are what the RayCluster says.
    ``pods``: a text that changes with what the pods are made from.
    """

    def __init__(self, name: str, args: RayClusterArgs, opts: ResourceOptions) -> None:
        super().__init__("ray-train-efa:workloads:RayCluster", name, None, opts)
        child = ResourceOptions(parent=self)

        def meta(own: str, **more: Any) -> Any:
            return {"name": own, "namespace": args.namespace, **more}

        account = k8s.core.v1.ServiceAccount(
            f"{name}-account", metadata=meta(config.TRAINING_SERVICE_ACCOUNT), automount_service_account_token=False, opts=child
        )
        policy: Any = manifests.network_policy(args.cluster.name, args.operator_labels)
        # Before the first pod: a policy that comes later leaves a door open meanwhile.
        needed: list[pulumi.Resource] = [account, k8s.networking.v1.NetworkPolicy(f"{name}-policy", metadata=meta(args.cluster.name), spec=policy, opts=child)]
        for secret, data in self._secrets(args).items():
            needed.append(k8s.core.v1.Secret(f"{name}-{secret}", metadata=meta(secret), string_data=data, opts=child))
        if args.cluster.storage.claim is not None:
            claim: Any = dict(args.cluster.storage.claim)
            # A volume may be made only when the first pod asks for it, and the pods come after the claim.
            unwaited = meta(storage.CLAIM, annotations={"pulumi.com/skipAwait": "true"})
            needed.append(k8s.core.v1.PersistentVolumeClaim(f"{name}-claim", metadata=unwaited, spec=claim, opts=child))
        spec = manifests.ray_cluster(args.cluster)
        self.pods: str = spec["headGroupSpec"]["template"]["metadata"]["annotations"][manifests.MADE_FROM]
        self.cluster = k8s.apiextensions.CustomResource(
            f"{name}-cluster",
            api_version="ray.io/v1",
            kind="RayCluster",
            metadata=meta(args.cluster.name),
            spec=spec,
            opts=ResourceOptions(
                parent=self,
                depends_on=[*needed, *args.after],
                hooks=self._first(name, args),
                custom_timeouts=CustomTimeouts(delete="10m"),  # Ray's pods stop first
            ),
        )
        # The engine waits for a status, and an old one says ready too; nor does it know when to give up. Made only after our own look, this
        # object says that the cluster of that description was seen working. An interrupted `up` looks again.
        seen = ready_hook(f"{name}-ready", args, self.pods)
        self.ready = k8s.core.v1.ConfigMap(
            f"{name}-ready",
            metadata=meta(f"{args.cluster.name}-ready", annotations={SEEN: manifests.digest(spec)}),
            data={},
            opts=ResourceOptions(parent=self, depends_on=[self.cluster], hooks=ResourceHookBinding(before_create=[seen], before_update=[seen])),
        )
        self.register_outputs({})

    @staticmethod
    def _first(name: str, args: RayClusterArgs) -> ResourceHookBinding:
        """What must hold before the first pod; asked again before each change."""
        spec = manifests.ray_cluster(args.cluster)
        looks = [watch.crd_hook(f"{name}-crd", args.watched, "rayclusters.ray.io", spec, args.crd_update)]
        if args.devices is not None:
            looks.append(watch.devices_hook(f"{name}-devices", args.watched, args.devices))
        if args.cluster.storage.one_node:
            looks.append(watch.one_node_hook(f"{name}-one-node", args.watched))
        return ResourceHookBinding(before_create=list(looks), before_update=list(looks))

    @staticmethod
    def _secrets(args: RayClusterArgs) -> dict[str, dict[str, pulumi.Output[str]]]:
        token, *keys = (args.secrets.get(name) for name in config.SECRETS)
        found: dict[str, dict[str, pulumi.Output[str]]] = {}
        if token is not None:
            found[manifests.TOKEN_SECRET] = {manifests.TOKEN_KEY: token}
        if args.cluster.storage.keys:
            found[storage.KEYS_SECRET] = {name: key for name, key in zip(storage.KEYS, keys, strict=True) if key is not None}
        return found
