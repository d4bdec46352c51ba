"""Every pin of the project in one place, each with where it comes from. Nothing here is looked up at run time.

What only an account's region knows (AMI release, add-on versions, image digest, zone) is no constant: `ops doctor --pin`
looks it up and writes it into the stack file under ``ray-train-efa:pins``.
"""

from __future__ import annotations

# EKS gives 14 months of standard support; 1.34 leaves it on 2 December 2026, 1.35 on 27 March 2027 (endoflife.date/amazon-eks).
# 1.36 is what AWS's own Ray Train sample runs (aws-samples/sample-aws-deep-learning-containers, training/ray-train).
KUBERNETES = "1.36"
OLDEST_KUBERNETES = "1.35"

# When EKS ends standard support, as known on 2026-09-10 (endoflife.date/amazon-eks). Used only where EKS itself may not be asked.
STANDARD_SUPPORT_ENDS = {"1.34": "2026-12-02", "1.35": "2027-03-27"}

# EKS add-ons. DaemonSets, which need no node to become active; the monitoring agent is what tells node repair of a broken GPU.
NODE_ADDONS = ("vpc-cni", "kube-proxy", "eks-pod-identity-agent", "eks-node-monitoring-agent")
# With pods of their own, so after the system nodes; the second only where there is an FSx file system.
LATE_ADDONS = ("coredns", "aws-fsx-csi-driver")

# efa-only interfaces: the CNI must leave them alone (https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html).
OLDEST_VPC_CNI_FOR_EFA_ONLY = "1.18.5"

# The training image (github.com/aws/deep-learning-containers, docs/ray-train/changelog, v1.1 of 2026-09-01). The tags `-v1` and
# `train-ml-cuda` move, this one does not; the digest goes into the pins all the same.
IMAGE_REPOSITORY = "public.ecr.aws/deep-learning-containers/ray"
IMAGE_TAG = "train-ml-cuda-v1.1.0"
# What is inside that image (same changelog). The manifest's rayVersion must equal the image's Ray.
RAY = "2.58.0"
TORCH = "2.13.0"
TRANSFORMERS = "5.13.0"
NCCL = "2.29.7"
EFA_INSTALLER = "1.49.0"
AWS_OFI_NCCL = "1.20.0"

# The newest minor that is released (github.com/kubernetes/autoscaler, 2026-02-05); one minor behind the control plane is fine.
CLUSTER_AUTOSCALER = "v1.35.0"

# Helm charts: name -> (repository, version).
CHARTS = {
    # github.com/ray-project/kuberay, tag v1.6.0 of 2026-03-18: token auth, upgradeStrategy, HTTP probes.
    "kuberay-operator": ("https://ray-project.github.io/kuberay-helm/", "1.6.0"),
    # github.com/NVIDIA/k8s-device-plugin: 0.19.0-0.19.2 mounted every uverbs device into GPU pods, taken back in 0.19.3.
    "nvidia-device-plugin": ("https://nvidia.github.io/k8s-device-plugin", "0.20.0"),
    # The version of AWS's Ray Train sample; its list of instance types has all EFA types of g6, g6e, p4d, p5*.
    "aws-efa-k8s-device-plugin": ("https://aws.github.io/eks-charts", "v0.5.32"),
    # github.com/kubernetes/autoscaler, chart of 2026-03-02; installed only where gpu.minNodes and gpu.maxNodes differ.
    "cluster-autoscaler": ("https://kubernetes.github.io/autoscaler", "9.56.0"),
}


def image(digest: str | None = None) -> str:
    """The training image's reference; by digest (``sha256:...``) where one is pinned."""
    return f"{IMAGE_REPOSITORY}@{digest}" if digest else f"{IMAGE_REPOSITORY}:{IMAGE_TAG}"
