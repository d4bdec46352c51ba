"""What a stack may say: the namespaced keys of a stack file as frozen dataclasses, parsed and checked once, all problems in one error.

Needs neither the engine nor AWS: :func:`load` takes a plain mapping (:func:`read_stack_file` makes one of ``Pulumi.dev.yaml``),
:func:`from_pulumi` takes what the engine gives the running program. What needs the account's facts is checked in ``infra``.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import ipaddress
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import versions
from training import schema
from training.errors import BadInput as BadInput
from training.prepare_settings import PrepareSettings
from training.schema import setting
from training.settings import RUN_NAME, Settings
from training.transport import preflight

PROJECT = "ray-train-efa"

# One constant feeds the taint of the GPU nodes and the tolerations of everything that must run on them.
GPU_TAINT = ("nvidia.com/gpu", "present", "NoSchedule")
# Put on EFA nodes only, so that the EFA device plugin never lands where it would crash for want of a device.
EFA_LABEL = ("ray-train-efa/efa", "true")
ROLE_LABEL = "ray-train-efa/role"  # system | gpu
NAMESPACE = "ray"
TRAINING_SERVICE_ACCOUNT = "training"
AUTOSCALER_SERVICE_ACCOUNT = ("kube-system", "cluster-autoscaler")

# Root disk floors: the training image is in the 10 GB class, is unpacked, and Ray spills to /tmp/ray.
SYSTEM_DISK_FLOOR_GIB = 100
GPU_DISK_FLOOR_GIB = 200
# Current Ray takes about 2.7 GiB on an idle head (github.com/ray-project/kuberay/pull/4288).
HEAD_MEMORY_FLOOR_GIB = 4.0

MEMORY = r"\d+(\.\d+)?(Gi|Mi)"
CHART_KEYS = ("chart", "repository", "version", "image")
# What must not be stored as plain text: `pulumi config set --secret`. Kept out of Stack, so that no message can show it.
SECRETS = ("huggingFaceToken", "s3AccessKeyId", "s3SecretAccessKey")
# A job's packages come beside the image's; these decide the result and the transport, so they stay the image's.
IMAGE_PACKAGES = frozenset(("torch", "ray", "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13"))

ZONE = re.compile(r"[a-z]{2}(-[a-z]+)+-\d[a-z]")
INSTANCE_TYPE = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
# What CloudWatch takes: https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_PutRetentionPolicy.html
LOG_DAYS = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653)
LOG_TYPES = ("api", "audit", "authenticator", "controllerManager", "scheduler")
SHORTEST_STOP, LONGEST_STOP = datetime.timedelta(minutes=30), datetime.timedelta(days=365)
IPS_PER_NODE = 64  # The CNI keeps two interfaces of up to 30 addresses on a lightly used GPU node (WARM_ENI_TARGET=1).


@dataclasses.dataclass(frozen=True)
class Cluster:
    kind: str = setting("create", "create an EKS cluster, or use an existing Kubernetes (then give its kubeconfig context).", choices=("create", "existing"))
    context: str | None = setting(None, "kubeconfig context of the existing cluster.")
    kubernetes_version: str = setting(versions.KUBERNETES, "Minor version of the control plane, in quotes.")
    public_access_cidrs: tuple[str, ...] = setting(("0.0.0.0/0",), "Who reaches the API server's public address; IAM still decides who gets in.")
    admins: tuple[str, ...] = setting((), "ARNs of IAM roles or users that get cluster-admin besides the one that runs `pulumi up`.")
    secrets_key_arn: str | None = setting(None, "KMS key of your own for envelope encryption of Secrets. EKS encrypts with a key of its own otherwise.")
    logs: tuple[str, ...] = setting(("api", "authenticator"), "Control-plane logs to CloudWatch: " + ", ".join(LOG_TYPES) + ".")
    log_retention_days: int = setting(14, "Days until control-plane logs are deleted.", at_least=1)

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.kind == "existing" and not self.context:
            problems.append("kind existing needs cluster.context, a context of your kubeconfig (kubectl config get-contexts)")
        if self.kind == "create" and self.context:
            problems.append(f"context = {self.context!r} is for kind existing; leave it out, or set cluster.kind to existing")
        if not re.fullmatch(r"1\.\d+", self.kubernetes_version) or _version(self.kubernetes_version) < _version(versions.OLDEST_KUBERNETES):
            problems.append(
                f"kubernetesVersion = {self.kubernetes_version!r} is out of standard support or no version; use {versions.OLDEST_KUBERNETES!r} or newer"
            )
        problems += [f"publicAccessCidrs: {cidr!r} is no IPv4 network; write 203.0.113.7/32" for cidr in self.public_access_cidrs if _network(cidr) is None]
        problems += [
            f"admins: {arn!r} is no IAM principal; write arn:aws:iam::<account>:role/<name>"
            for arn in self.admins
            if not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:(role|user)/.+", arn)
        ]
        if self.log_retention_days not in LOG_DAYS:
            problems.append(f"logRetentionDays = {self.log_retention_days}: CloudWatch takes {', '.join(map(str, LOG_DAYS[:8]))} and a few longer ones")
        problems += [f"logs: {kind!r} is no kind of log; known: {', '.join(LOG_TYPES)}" for kind in self.logs if kind not in LOG_TYPES]
        _raise(problems)


@dataclasses.dataclass(frozen=True)
class Network:
    cidr: str = setting("10.0.0.0/16", "IPv4 range of the VPC, /16 to /24. Stacks that are never peered may share one.")
    zone: str | None = setting(None, "Availability zone of all nodes. None: pins.zone, else picked at creation and kept.")

    def __post_init__(self) -> None:
        network = _network(self.cidr)
        if network is None or not network.is_private or not 16 <= network.prefixlen <= 24:
            raise BadInput(f"cidr = {self.cidr!r} is no private IPv4 network between /16 and /24; write 10.0.0.0/16")
        _raise(_zone_problems("zone", self.zone))


@dataclasses.dataclass(frozen=True)
class Capacity:
    kind: str = setting("on-demand", "How the GPU instances are bought.", choices=("on-demand", "spot", "reservation", "capacity-block"))
    id: str | None = setting(None, "Capacity reservation (cr-...), for reservation and capacity-block.")

    def __post_init__(self) -> None:
        if self.reserved and not re.fullmatch(r"cr-[0-9a-f]{8,}", self.id or ""):
            raise BadInput(f"capacity.id = {self.id!r}: {self.kind} needs the id of your reservation (cr-...; aws ec2 describe-capacity-reservations)")
        if not self.reserved and self.id:
            raise BadInput(f"capacity.id = {self.id!r} has no meaning for {self.kind}; leave it out, or set capacity.kind to reservation or capacity-block")

    @property
    def reserved(self) -> bool:
        return self.kind in ("reservation", "capacity-block")


@dataclasses.dataclass(frozen=True)
class Gpu:
    instance_type: str = setting("g6.12xlarge", "Any NVIDIA instance type with EFA; GPUs, EFA interfaces and memory are read from the EC2 API.")
    nodes: int | None = setting(None, "A fixed number of GPU nodes; 2 where minNodes and maxNodes are not given. One node never uses EFA.", at_least=1)
    min_nodes: int | None = setting(None, "With maxNodes: Cluster Autoscaler keeps the number of nodes between the two; 0 is allowed.", at_least=0)
    max_nodes: int | None = setting(None, "See minNodes.", at_least=1)
    capacity: Capacity = setting(Capacity(), "")
    placement_group: bool | None = setting(
        None, "All nodes in one cluster placement group. None: yes for on-demand and spot; no for reserved capacity, which was not bought in the group."
    )
    disk_gib: int = setting(GPU_DISK_FLOOR_GIB, "Root disk of a GPU node. Images and scratch go to the instance store where the type has one.", key="diskGiB")

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not INSTANCE_TYPE.fullmatch(self.instance_type):
            problems.append(f"instanceType = {self.instance_type!r} is no instance type; write g6.12xlarge")
        if self.nodes is not None and (self.min_nodes is not None or self.max_nodes is not None):
            problems.append("nodes and minNodes/maxNodes exclude each other; keep nodes for a fixed size, or the other two for autoscaling")
        if (self.min_nodes is None) != (self.max_nodes is None):
            problems.append("minNodes and maxNodes go together; give both")
        if self.min_nodes is not None and self.max_nodes is not None and self.min_nodes > self.max_nodes:
            problems.append(f"minNodes = {self.min_nodes} is more than maxNodes = {self.max_nodes}; swap them")
        if self.disk_gib < GPU_DISK_FLOOR_GIB:
            problems.append(f"diskGiB = {self.disk_gib} does not hold the training image and Ray's spill; use {GPU_DISK_FLOOR_GIB} or more")
        _raise(problems)

    @property
    def autoscaled(self) -> bool:
        return self.max_nodes is not None

    @property
    def size(self) -> tuple[int, int]:
        """(least, most) nodes; equal for a fixed size."""
        if self.min_nodes is not None and self.max_nodes is not None:
            return self.min_nodes, self.max_nodes
        fixed = 2 if self.nodes is None else self.nodes
        return fixed, fixed

    @property
    def placed(self) -> bool:
        return not self.capacity.reserved if self.placement_group is None else self.placement_group


@dataclasses.dataclass(frozen=True)
class System:
    instance_type: str = setting("m7i.xlarge", "On-demand x86-64 type of the nodes that run the operator, the Ray head and the submitter.")
    nodes: int = setting(1, "Number of system nodes.", at_least=1)
    disk_gib: int = setting(SYSTEM_DISK_FLOOR_GIB, "Root disk of a system node: the head runs the training image.", key="diskGiB")

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not INSTANCE_TYPE.fullmatch(self.instance_type):
            problems.append(f"instanceType = {self.instance_type!r} is no instance type; write m7i.xlarge")
        if self.disk_gib < SYSTEM_DISK_FLOOR_GIB:
            problems.append(f"diskGiB = {self.disk_gib} does not hold the training image, which the head runs too; use {SYSTEM_DISK_FLOOR_GIB} or more")
        _raise(problems)


@dataclasses.dataclass(frozen=True)
class Ray:
    image: str | None = setting(None, "Image of head and workers, by digest or fixed tag. None: the Deep Learning Container of versions.py.")
    head_memory: str = setting("8Gi", "Memory of the Ray head (Gi or Mi).")
    head_cpu: int = setting(2, "CPUs of the Ray head.", at_least=1)
    workers: int | None = setting(None, "Worker pods on an existing cluster; 1 where nothing is said. On EKS each GPU node has one.", at_least=1)
    worker_cpu: float = setting(
        1.0,
        "CPUs of a worker pod on an existing cluster. On EKS a worker has all that its node can give, and this is for the pod that prepares data on"
        " each system node (training.prepare, with gpu.minNodes and maxNodes).",
        above=0,
    )
    worker_memory: str = setting("4Gi", "Memory of such a pod (Gi or Mi).")
    huge_pages_mib: int | None = setting(
        None, "MiB of 2 MiB huge pages for each worker, where the nodes have reserved them (EFA: 5120).", at_least=2, key="hugePagesMiB"
    )
    lock_memory: bool = setting(False, "Give the workers IPC_LOCK, where a node limits locked memory and EFA can't register its buffers.")
    charts: dict[str, Any] | None = setting(None, "Chart name to {chart, repository, version, image}: for clusters without internet access.")

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.image is not None and ("@sha256:" not in self.image) and (":" not in self.image.rsplit("/", 1)[-1] or self.image.endswith(":latest")):
            problems.append(f"image = {self.image!r} moves under the running cluster; name a fixed tag or, better, @sha256:...")
        if not re.fullmatch(MEMORY, self.worker_memory):
            problems.append(f"workerMemory = {self.worker_memory!r} is no amount of memory; write 4Gi")
        if not re.fullmatch(MEMORY, self.head_memory):
            problems.append(f"headMemory = {self.head_memory!r} is no amount of memory; write 8Gi")
        elif self.head_memory_gib < HEAD_MEMORY_FLOOR_GIB:
            problems.append(f"headMemory = {self.head_memory!r} gets the head killed for lack of memory; use {HEAD_MEMORY_FLOOR_GIB:.0f}Gi or more")
        if self.huge_pages_mib is not None and self.huge_pages_mib % 2:
            problems.append(f"hugePagesMiB = {self.huge_pages_mib} is no multiple of the page size, 2; use {self.huge_pages_mib + 1}")
        known = sorted(versions.CHARTS)
        problems += [f"charts.{name} is no chart of this project; known: {', '.join(known)}" for name in sorted(set(self.charts or {}) - set(known))]
        for name, source in sorted((self.charts or {}).items()):
            if not isinstance(source, Mapping) or set(source) - set(CHART_KEYS) or not all(isinstance(value, str) for value in source.values()):
                problems.append(f"charts.{name} = {source!r}: a mapping of {', '.join(CHART_KEYS)} to texts expected (image as repository:tag)")
        _raise(problems)

    @property
    def head_memory_gib(self) -> float:
        return _gib(self.head_memory)

    @property
    def worker_memory_gib(self) -> float:
        return _gib(self.worker_memory)


@dataclasses.dataclass(frozen=True)
class Fsx:
    capacity_gib: int = setting(1200, "Size of the FSx for Lustre file system in GiB: 1200, or a multiple of 2400.", at_least=1200, key="capacityGiB")

    def __post_init__(self) -> None:
        if self.capacity_gib != 1200 and self.capacity_gib % 2400:
            raise BadInput(f"fsx.capacityGiB = {self.capacity_gib}: FSx takes 1200 or a multiple of 2400")


@dataclasses.dataclass(frozen=True)
class Storage:
    bucket: str | None = setting(None, "An existing bucket for runs and checkpoints. None: the stack makes one.")
    prefix: str = setting("runs", "Folder of the bucket that training may read and write.")
    on_destroy: str = setting(
        "keep",
        "What `pulumi destroy` does with the stack's bucket: keep leaves it with its checkpoints, delete empties and removes it,"
        " protect refuses to destroy the stack.",
        choices=("keep", "delete", "protect"),
    )
    checkpoint_days: int | None = setting(None, "Days after which objects under the prefix are deleted. None: never.", at_least=1)
    endpoint: str | None = setting(
        None, "On an existing cluster: URL of the S3-compatible store that holds bucket (keys: config s3AccessKeyId, s3SecretAccessKey)."
    )
    claim_gib: int | None = setting(None, "On an existing cluster: GiB of a ReadWriteMany volume for runs and data.", at_least=1, key="claimGiB")
    storage_class: str | None = setting(None, "StorageClass of that volume; it must offer ReadWriteMany. None: the cluster's default.")
    host_path: str | None = setting(None, "On an existing cluster: a folder of the node for runs and data. All Ray pods are then kept on one node.")
    fsx: Fsx | None = setting(None, "An FSx for Lustre file system in the nodes' zone, for data sets that S3 is too slow for.")

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.bucket is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", self.bucket):
            problems.append(f"bucket = {self.bucket!r} is no bucket name; write it without s3:// and without a folder")
        if self.bucket is not None and self.checkpoint_days is not None:
            problems.append("checkpointDays is for the stack's own bucket; set a lifecycle rule on your bucket instead, or leave bucket out")
        if self.endpoint is not None and not re.fullmatch(r"https?://[A-Za-z0-9.-]+(:\d+)?/?", self.endpoint):
            problems.append(f"endpoint = {self.endpoint!r} is no URL of a store; write https://minio.example:9000")
        if self.endpoint is not None and not self.bucket:
            problems.append("endpoint needs bucket, the name of a bucket in that store")
        if self.storage_class is not None and self.claim_gib is None:
            problems.append("storageClass has no meaning without claimGiB")
        if self.host_path is not None and not re.fullmatch(r"/[A-Za-z0-9._/-]+", self.host_path):
            problems.append(f"hostPath = {self.host_path!r} is no absolute folder of a node; write /var/lib/ray-train-efa")
        if len(self.own_kinds) > 1:
            problems.append(f"{' and '.join(self.own_kinds)} exclude each other; keep one")
        if not re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", self.prefix):
            problems.append(f"prefix = {self.prefix!r} is no folder; write runs or team/runs, without slashes at the ends")
        _raise(problems)

    @property
    def own_kinds(self) -> tuple[str, ...]:
        """Which of the kinds of storage for an existing cluster are named."""
        return tuple(key for key, value in (("endpoint", self.endpoint), ("claimGiB", self.claim_gib), ("hostPath", self.host_path)) if value)


@dataclasses.dataclass(frozen=True)
class Training:
    """``run``: does `pulumi up` start the job; ``settings``: the job's own settings under their file keys (training/settings.py); ``prepare``: those
    of what prepares its data first (training/prepare_settings.py), None where the data is there.
    """

    run: bool = False
    deadline: datetime.timedelta = datetime.timedelta(days=7)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pip: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Mapping[str, Any] | None = None

    @property
    def transport(self) -> str:
        return str(self.settings.get("transport", "any"))


@dataclasses.dataclass(frozen=True)
class Pins:
    zone: str | None = setting(None, "Zone of the nodes.")
    ami_release: str | None = setting(None, "Release of the EKS AMIs of both node groups, such as 1.36.0-20261112.")
    addon_versions: dict[str, Any] | None = setting(None, "Add-on name to version.")
    image_digest: str | None = setting(None, "Digest of the training image, sha256:...")

    def __post_init__(self) -> None:
        problems = _zone_problems("zone", self.zone)
        if self.image_digest is not None and not re.fullmatch(r"sha256:[0-9a-f]{64}", self.image_digest):
            problems.append(f"imageDigest = {self.image_digest!r} is no digest; `ops doctor --pin` writes it")
        if self.ami_release is not None and not re.fullmatch(r"1\.\d+\.\d+-\d{8}", self.ami_release):
            problems.append(f"amiRelease = {self.ami_release!r} is no release such as 1.36.0-20261112; `ops doctor --pin` writes it")
        wrong = {name: version for name, version in self.addons.items() if not isinstance(version, str)}
        problems += [f"addonVersions.{name} = {version!r}: a text such as v1.20.4-eksbuild.2 expected" for name, version in wrong.items()]
        _raise(problems)

    @property
    def addons(self) -> dict[str, str]:
        return dict(self.addon_versions or {})


@dataclasses.dataclass(frozen=True)
class Budget:
    max_hourly_usd: float | None = setting(None, "A stack that would cost more an hour is refused before any resource is made.", above=0)
    stop_after: str | None = setting(None, "The GPU nodes are removed this long after creation, by AWS itself: 90m, 8h or 2d.")
    idle_stop_minutes: int | None = setting(None, "Minutes an idle GPU node lives; needs minNodes and maxNodes.", at_least=1)

    def __post_init__(self) -> None:
        if self.stop_after is not None and (self.stop_delay is None or not SHORTEST_STOP <= self.stop_delay <= LONGEST_STOP):
            raise BadInput(f"stopAfter = {self.stop_after!r} is no time between 30m and 365d; write 90m, 8h or 2d")

    @property
    def stop_delay(self) -> datetime.timedelta | None:
        return None if self.stop_after is None else _duration(self.stop_after)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Everything a stack says. ``region`` is None where the caller did not know it."""

    owner: str
    cluster: Cluster
    network: Network
    gpu: Gpu
    system: System
    ray: Ray
    storage: Storage
    training: Training
    pins: Pins
    budget: Budget
    region: str | None = None

    @property
    def zone(self) -> str | None:
        return self.network.zone or self.pins.zone

    @property
    def image(self) -> str:
        return self.ray.image or versions.image(self.pins.image_digest)


SECTIONS: dict[str, type] = {
    "cluster": Cluster,
    "network": Network,
    "gpu": Gpu,
    "system": System,
    "ray": Ray,
    "storage": Storage,
    "pins": Pins,
    "budget": Budget,
}
SCALARS = {"owner": "unset"}
AROUND_THE_JOB = ("run", "runName", "deadline", "environment", "pip", "pipReplaces", "prepare")
KEYS = (*SCALARS, *SECTIONS, "training")


def load(values: Mapping[str, Any], region: str | None = None) -> Stack:
    """A stack of ``{"gpu": {...}, "network": {...}, ...}`` (keys without the project's name).

    Raises BadInput with every problem at once, each naming the full key, the value and the way out.
    """
    problems: list[str] = []
    for key in values:
        if key in SECRETS:
            if not isinstance(values[key], str) or not values[key]:
                problems.append(f"{PROJECT}:{key} is empty or no text; set it with: pulumi config set --secret {PROJECT}:{key}")
        elif key not in KEYS:
            near = difflib.get_close_matches(str(key).lower(), [k.lower() for k in KEYS], n=1, cutoff=0.6)
            hint = f"did you mean {PROJECT}:{near[0]}?" if near else f"known: {', '.join(KEYS)}"
            problems.append(f"{PROJECT}:{key} is no setting; {hint}")
    parts: dict[str, Any] = {name: schema.collect(cls, values.get(name, {}), f"{PROJECT}:{name}.", problems) for name, cls in SECTIONS.items()}
    owner = values.get("owner", SCALARS["owner"])
    if not isinstance(owner, str) or not re.fullmatch(r"[\w .:/=+@-]{1,256}", owner):
        problems.append(f"{PROJECT}:owner = {owner!r}: a text for a tag expected (letters, digits, . : / = + - @ _); put digits in quotes")
    parts["training"] = training = _training(values.get("training", {}), problems)
    problems += _combinations(parts, training, region)
    if problems:
        raise BadInput(f"this stack's configuration has {len(problems)} problem{'s' * (len(problems) > 1)}\n" + "\n".join(f"  - {line}" for line in problems))
    return Stack(owner=str(owner), region=region, **parts)


def _training(raw: Any, problems: list[str]) -> Training | None:
    where = f"{PROJECT}:training."
    if not isinstance(raw, Mapping):
        problems.append(f"{PROJECT}:training must be a mapping of keys to values, not {raw!r}")
        return None
    run = raw.get("run", False)
    if not isinstance(run, bool):
        problems.append(f"{where}run = {run!r}: true or false expected")
        run = False
    job = {key: value for key, value in raw.items() if key not in AROUND_THE_JOB}
    # The job's own `run`, whose place is taken by the switch.
    name = raw.get("runName")
    if name is not None and not (isinstance(name, str) and RUN_NAME.fullmatch(name)):
        problems.append(f"{where}runName = {name!r} is no name of a run; use lower-case letters, digits, '.', '_' and '-', at most 63")
        name = None
    if name is not None:
        job["run"] = name
    # Settings that a stopped job still lacks are no problem, but misspelt ones are found at once.
    lacking: dict[str, Any] = {} if run else {"data": "-", "model": {"random": "tiny"}}
    before = len(problems)
    prepare = raw.get("prepare")
    if prepare is not None:
        # Where it goes is the stack's storage, which is known later.
        schema.collect(PrepareSettings, {"output": "-", **prepare} if isinstance(prepare, Mapping) else prepare, f"{where}prepare.", problems)
        lacking["data"] = "-"
        if "data" in job:
            problems.append(f"{where}data = {job['data']!r} and training.prepare exclude each other: the job reads what prepare writes; leave one of them out")
    if "workers" not in job and isinstance(job.get("minWorkers"), int):
        lacking["workers"] = max(1, job["minWorkers"])  # the nodes decide, and minWorkers is held against them when they are known
    schema.collect(Settings, {**lacking, **job}, where, problems)
    given, environment, pip = raw.get("deadline", "7d"), raw.get("environment", {}), raw.get("pip", [])
    deadline = _duration(given) if isinstance(given, str) else None
    if not deadline:
        problems.append(f"{where}deadline = {given!r} is no time; write 90m, 8h or 2d")
    if not isinstance(environment, Mapping) or not all(re.fullmatch(r"[A-Za-z_]\w*", str(k)) and isinstance(v, str) for k, v in environment.items()):
        problems.append(f"{where}environment: a mapping of variable names to texts expected (put numbers in quotes)")
    if not isinstance(pip, list) or not all(isinstance(item, str) and item for item in pip):
        problems.append(f"{where}pip = {pip!r}: a list of packages expected, such as [datasets==4.0.0]")
        pip = []
    replaces = raw.get("pipReplaces", [])
    if not isinstance(replaces, list) or not all(item in IMAGE_PACKAGES for item in replaces):
        problems.append(f"{where}pipReplaces = {replaces!r}: a list of {', '.join(sorted(IMAGE_PACKAGES))} expected")
        replaces = []
    for item in pip:
        package = re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", item.strip(), maxsplit=1)[0].lower())
        if package in IMAGE_PACKAGES and package not in replaces:
            problems.append(
                f"{where}pip: {item!r} would replace the image's {package}, and what was proved of it; leave it out, use another image"
                f" (ray.image), or say so: training.pipReplaces: [{package}]"
            )
    if len(problems) > before or deadline is None:
        return None
    return Training(run=run, settings=job, deadline=deadline, environment=dict(environment), pip=tuple(pip), prepare=prepare)


def _combinations(parts: Mapping[str, Any], training: Training | None, region: str | None) -> list[str]:
    """Problems between sections; a section that is None has been reported already."""
    problems: list[str] = []
    cluster, network, gpu, pins, budget, storage, system = (parts[name] for name in ("cluster", "network", "gpu", "pins", "budget", "storage", "system"))
    ray = parts["ray"]
    if ray and storage and cluster and cluster.kind == "create":
        problems += [f"{PROJECT}:storage.{key} is for an existing cluster; on EKS runs go to the stack's bucket" for key in storage.own_kinds]
        if ray.workers is not None:
            problems.append(f"{PROJECT}:ray.workers = {ray.workers} is for an existing cluster; on EKS it is gpu.nodes that counts")
    own_uri = training is not None and re.match(r"[a-z][a-z0-9+.-]+://", str(training.settings.get("storage", "")))
    if cluster and cluster.kind == "existing" and storage and not storage.own_kinds and training and training.run and not own_uri:
        problems.append(
            f"{PROJECT}:storage: an existing cluster has no bucket of this stack, and a pod's own disk is gone with it;"
            " name storage.endpoint, storage.claimGiB or storage.hostPath"
        )
    zone = (network and network.zone) or (pins and pins.zone)
    creating = cluster is not None and cluster.kind == "create"
    if network and pins and network.zone and pins.zone and network.zone != pins.zone:
        problems.append(f"{PROJECT}:network.zone = {network.zone!r} and {PROJECT}:pins.zone = {pins.zone!r} differ; keep one of the two")
    elif zone and region and zone[:-1] != region:
        problems.append(f"{PROJECT}:network.zone = {zone!r} is not in aws:region = {region!r}; write a zone such as {region}a")
    if gpu and creating:
        most = gpu.size[1]
        if gpu.capacity.reserved and network and pins and not zone:
            problems.append(f"{PROJECT}:network.zone is missing: {gpu.capacity.kind} {gpu.capacity.id} lives in one zone, so name that zone")
        if training and training.transport == "efa" and most < 2:
            problems.append(f"{PROJECT}:gpu.nodes = {most}: a single node has no one to reach over EFA; use 2 or more, or training.transport: any")
        own = training.settings.get("storage") if training else None
        if own is not None and most > 1 and not str(own).startswith("s3://") and not (storage and storage.fsx):
            problems.append(f"{PROJECT}:training.storage = {own!r} is not shared by {most} nodes; leave it out (the stack's bucket) or name s3://...")
        if budget and budget.idle_stop_minutes is not None and not gpu.autoscaled:
            problems.append(f"{PROJECT}:budget.idleStopMinutes needs gpu.minNodes and gpu.maxNodes: a fixed number of nodes is never idle enough to go")
        if network and system:
            usable = 2 ** (32 - int(network.cidr.rsplit("/", 1)[1]) - 1) - 5  # half of the VPC, less what AWS keeps of a subnet
            if usable < IPS_PER_NODE * (most + system.nodes):
                problems.append(
                    f"{PROJECT}:network.cidr = {network.cidr!r} leaves {usable} addresses for {most + system.nodes} nodes,"
                    f" which take up to {IPS_PER_NODE} each; use a wider range"
                )
    if pins and cluster and pins.ami_release and not pins.ami_release.startswith(cluster.kubernetes_version + "."):
        problems.append(
            f"{PROJECT}:pins.amiRelease = {pins.ami_release!r} is not of Kubernetes {cluster.kubernetes_version}; run `python -m ops doctor --pin` again"
        )
    return problems


def read_stack_file(path: str) -> tuple[dict[str, Any], str | None]:
    """(values for :func:`load`, region) of a ``Pulumi.<stack>.yaml``. Raises BadInput where it can't be read."""
    found = schema.read_file(path).get("config") or {}
    values = {key.removeprefix(PROJECT + ":"): value for key, value in found.items() if key.startswith(PROJECT + ":")}
    return values, found.get("aws:region")


def from_pulumi(config: Mapping[str, Any], project: str = PROJECT, encrypted: Collection[str] | None = None) -> Stack:
    """The stack of the engine's own configuration map (``namespace:key`` -> text; objects as JSON), which lists every key that is set.

    encrypted: the keys that are stored as secrets; None where the caller does not know. Raises BadInput.
    """
    for key in SECRETS:
        if f"{project}:{key}" in config and encrypted is not None and f"{project}:{key}" not in encrypted:
            raise BadInput(f"{PROJECT}:{key} stands in the stack file as plain text; replace it there, and set it with: pulumi config set --secret {key}")
    if project != PROJECT and any(key.startswith(PROJECT + ":") for key in config):
        raise BadInput(f"this project is called {project}, but its stack file has keys of {PROJECT}:; rename them to {project}: (or the project to {PROJECT})")
    values: dict[str, Any] = {}
    for full, text in config.items():
        if full.startswith(project + ":"):
            key = full.removeprefix(project + ":")
            values[key] = text if key in (*SCALARS, *SECRETS) else _json(text)
    return load(values, config.get("aws:region"))


def _json(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def override_training(training: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The stack's ``training`` object with each ``key=value`` laid over it (values read as YAML). Raises BadInput."""
    return schema.apply_overrides(training, overrides)


def nccl_environment(transport: str = "any") -> dict[str, str]:
    """What the gate wants in a worker's environment, less the log file that each rank of a run gets for itself. transport: efa, tcp or any."""
    found = preflight.environment(transport, "", "", 0, 0)
    del found["NCCL_DEBUG_FILE"]
    return found


def _raise(problems: list[str]) -> None:
    if problems:
        raise BadInput("; ".join(problems))


def _zone_problems(key: str, zone: str | None) -> list[str]:
    if zone is None or ZONE.fullmatch(zone):
        return []
    return [f"{key} = {zone!r} is not one availability zone; write one such as us-west-2b (EFA does not cross zones)"]


def _network(cidr: str) -> ipaddress.IPv4Network | None:
    try:
        return ipaddress.IPv4Network(cidr)
    except ValueError:
        return None


def _gib(memory: str) -> float:
    return float(memory[:-2]) / (1 if memory.endswith("Gi") else 1024)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _duration(text: str) -> datetime.timedelta | None:
    match = re.fullmatch(r"(\d{1,6})([mhd])", text)
    return datetime.timedelta(**{{"m": "minutes", "h": "hours", "d": "days"}[match[2]]: int(match[1])}) if match else None
