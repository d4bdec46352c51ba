"""The Ray cluster, with its service account, secrets, volume and network policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
import pulumi_kubernetes as k8s
from pulumi import CustomTimeouts, ResourceOptions

import config
from workloads import manifests, storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayClusterArgs:
    """secrets: name -> value of config.SECRETS, None where not set. after: the operator and the device plugins."""

    cluster: manifests.Cluster
    namespace: pulumi.Input[str]
    operator_labels: Mapping[str, str]
    secrets: Mapping[str, pulumi.Output[str] | None]
    after: Sequence[pulumi.Resource]


class RayCluster(pulumi.ComponentResource):
    """``cluster``: ready when the head and every worker are."""

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
        self.cluster = k8s.apiextensions.CustomResource(
            f"{name}-cluster",
            api_version="ray.io/v1",
            kind="RayCluster",
            metadata=meta(args.cluster.name, annotations={"pulumi.com/waitFor": "jsonpath={.status.state}=ready"}),
            spec=manifests.ray_cluster(args.cluster),
            opts=ResourceOptions(
                parent=self,
                depends_on=[*needed, *args.after],
                # 10 GB of image per node; and ten minutes for Ray's pods to stop.
                custom_timeouts=CustomTimeouts(create="45m", update="45m", delete="10m"),
            ),
        )
        self.register_outputs({})

    @staticmethod
    def _secrets(args: RayClusterArgs) -> dict[str, dict[str, pulumi.Output[str]]]:
        token, *keys = (args.secrets.get(name) for name in config.SECRETS)
        found: dict[str, dict[str, pulumi.Output[str]]] = {}
        if token is not None:
            found[manifests.TOKEN_SECRET] = {manifests.TOKEN_KEY: token}
        if args.cluster.storage.keys:
            found[storage.KEYS_SECRET] = {name: key for name, key in zip(storage.KEYS, keys, strict=True) if key is not None}
        return found
