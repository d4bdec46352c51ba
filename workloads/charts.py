"""Where each Helm chart comes from, and the values it gets: plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import config
import versions

# Where EKS publishes the plugin's image; other partitions and a few regions have other accounts:
# https://docs.aws.amazon.com/eks/latest/userguide/add-ons-images.html
EKS_IMAGES = "602401143452.dkr.ecr.{region}.amazonaws.com"
# The node's own EFA label is looked for besides; a taint of that name is what AWS's examples put on EFA nodes.
EFA_TAINT = "aws.amazon.com/efa"
# After which Ray gives an idle worker up; its node is then the autoscaler's to remove.
RAY_IDLE_SECONDS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """``chart``: a name in ``repository``, or (repository None) a folder or an oci:// address. ``image``: repository:tag instead of the chart's own."""

    chart: str
    repository: str | None
    version: str | None
    image: str | None = None


def source(name: str, overrides: Mapping[str, Any] | None) -> Source:
    """The pinned chart, or what the stack's ``ray.charts`` says instead."""
    repository, version = versions.CHARTS[name]
    own: Mapping[str, str] = (overrides or {}).get(name, {})
    elsewhere = own.get("chart")
    if elsewhere is not None and "repository" not in own:
        # A folder has one version, its own; a registry has many.
        return Source(chart=elsewhere, repository=None, version=own.get("version", version if elsewhere.startswith("oci://") else None), image=own.get("image"))
    return Source(chart=elsewhere or name, repository=own.get("repository", repository), version=own.get("version", version), image=own.get("image"))


def _image(reference: str) -> dict[str, str]:
    repository, _, tag = reference.rpartition(":")
    return {"repository": repository, "tag": tag} if repository and "/" not in tag else {"repository": reference}


def _tolerations() -> list[dict[str, str]]:
    key, _, effect = config.GPU_TAINT
    return [{"key": key, "operator": "Exists", "effect": effect}, {"key": EFA_TAINT, "operator": "Exists", "effect": "NoSchedule"}]


def efa_plugin(instance_type: str, region: str, image: str | None = None) -> dict[str, Any]:
    """Values of aws-efa-k8s-device-plugin (its daemonset.yaml and values.yaml).

    The chart knows a list of instance types and, for any other, wants no pod and says nothing: the list is the stack's own type.
    """
    return {
        "image": _image(image) if image else {"repository": f"{EKS_IMAGES.format(region=region)}/eks/aws-efa-k8s-device-plugin"},
        "supportedInstanceLabels": {"keys": ["node.kubernetes.io/instance-type"], "values": [instance_type]},
        # A node of an EFA type without an EFA interface makes the plugin crash again and again.
        "nodeSelector": {config.EFA_LABEL[0]: config.EFA_LABEL[1]},
        "tolerations": _tolerations(),
    }


def nvidia_plugin(image: str | None = None) -> dict[str, Any]:
    """Values of nvidia-device-plugin. Its default affinity looks for the label nvidia.com/gpu.present, which the GPU nodes carry."""
    return {
        **({"image": _image(image)} if image else {}),
        # It would mount every uverbs device into each GPU pod, past the EFA plugin (the chart's CHANGELOG, 0.19.3).
        "mofedEnabled": False,
        "tolerations": _tolerations(),
    }


def cluster_autoscaler(cluster: str, region: str, node_selector: Mapping[str, str], idle_minutes: int | None, image: str | None = None) -> dict[str, Any]:
    """Values of cluster-autoscaler (kubernetes/autoscaler, charts/cluster-autoscaler/values.yaml). It finds its groups by their tags.

    Its rights at AWS come from the association with its service account (infra/identity.py). idle_minutes: what an idle node may live, the
    minute that Ray takes to give it up included; None: the autoscaler's own ten.
    """
    _, account = config.AUTOSCALER_SERVICE_ACCOUNT
    return {
        "fullnameOverride": account,
        "cloudProvider": "aws",
        "awsRegion": region,
        "autoDiscovery": {"clusterName": cluster},
        "image": _image(image) if image else {"tag": versions.CLUSTER_AUTOSCALER},
        "rbac": {"create": True, "serviceAccount": {"create": True, "name": account}},
        "nodeSelector": dict(node_selector),
        "resources": {"requests": {"cpu": "50m", "memory": "300Mi"}, "limits": {"memory": "600Mi"}},
        "extraArgs": {
            "scale-down-unneeded-time": f"{max(1, idle_minutes - RAY_IDLE_SECONDS // 60)}m" if idle_minutes else "10m",
            # The plugins' pods and empty folders of the node's disk are on every GPU node, and would keep it for ever.
            "skip-nodes-with-system-pods": "false",
            "skip-nodes-with-local-storage": "false",
            # Scarce GPUs come late or not at all; the default is 15 minutes.
            "max-node-provision-time": "20m",
        },
    }


def kuberay(release: str, node_selector: Mapping[str, str], image: str | None = None) -> dict[str, Any]:
    """Values of kuberay-operator (kuberay, helm-chart/kuberay-operator/values.yaml).

    It sees its own namespace alone and is named after the release, so that two stacks on one cluster have one each.
    """
    return {
        **({"image": _image(image)} if image else {}),
        "fullnameOverride": release,
        "serviceAccount": {"create": True, "name": release},
        "singleNamespaceInstall": True,
        "nodeSelector": dict(node_selector),
        "metrics": {"enabled": True},
        # The chart's 100m CPU makes the operator miss its own probes while it fills its caches.
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
    }
