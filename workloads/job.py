"""The training job: its code as a ConfigMap, and the RayJob that runs it, named by a hash of everything that decides the run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import config
from workloads import manifests

CODE = "/code"
SETTINGS, PREPARE = "settings.json", "prepare.json"
SUBMITTER_CODE = Path(__file__).with_name("submit.py")
SOURCE_KINDS = (".py", ".yaml")
# The API server takes 1 MiB an object, keys and metadata included.
MOST_CODE = 900 * 1024
# A submitter that finds no place never starts; the operator's own clock runs from the RayJob's creation.
START_SECONDS = 1800


def source_files(package: Path) -> dict[str, str]:
    """``{"training/job.py": text, ...}`` of a package's folder. Raises BadInput where a file is no text, or all are too much for a ConfigMap."""
    files: dict[str, str] = {}
    for path in sorted(package.rglob("*")):
        if path.suffix in SOURCE_KINDS and path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(package.parent).as_posix()
            try:
                files[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise config.BadInput(f"{name} is no UTF-8 text ({error.reason} at byte {error.start}); the job's code must be") from error
    check_size(files)
    return files


def check_size(files: Mapping[str, str]) -> None:
    """Raises BadInput, naming the biggest files, where a ConfigMap would not hold them."""
    sizes = {name: len(text.encode()) for name, text in files.items()}
    total = sum(sizes.values())
    if total > MOST_CODE:
        biggest = ", ".join(f"{name} ({sizes[name] // 1024} KiB)" for name in sorted(sizes, key=lambda name: (-sizes[name], name))[:3])
        raise config.BadInput(
            f"the job's code has {total // 1024} KiB, and a ConfigMap holds {MOST_CODE // 1024}; the biggest files are {biggest}:"
            " move data out of the package, to the run's storage"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that decides a run. settings: the job's own, under their file keys. prepare: those of what prepares its data first, None where it is
    there. environment: Ray's runtime environment. deadline: seconds, for both.
    pods: what the cluster's pods are made from, for new pods end a job.
    """

    cluster: str
    pods: str
    image: str
    ranks: int
    settings: Mapping[str, Any]
    code: Mapping[str, str]
    environment: Mapping[str, str]
    pip: tuple[str, ...]
    deadline: int
    on_eks: bool
    prepare: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """``train-1f0c9a7be2d4``: the same inputs give the same name, any other input another one."""
        return f"train-{manifests.digest(dataclasses.asdict(self))}"

    @property
    def code_name(self) -> str:
        """The ConfigMap's name, by its content."""
        return f"training-{manifests.digest(self.files)}"

    @property
    def files(self) -> dict[str, str]:
        """What the working directory holds: the package, the settings, and what hands them over."""
        settings = {SETTINGS: self.settings, **({} if self.prepare is None else {PREPARE: self.prepare})}
        written = {name: json.dumps(dict(values), indent=1, sort_keys=True) for name, values in settings.items()}
        return {**self.code, **written, SUBMITTER_CODE.name: SUBMITTER_CODE.read_text()}


def _key(path: str) -> str:
    """A ConfigMap's key has no slash."""
    return path.replace("/", "--")


def code_data(job: Job) -> dict[str, str]:
    """``data`` of the ConfigMap."""
    return {_key(path): text for path, text in job.files.items()}


def ray_job(job: Job) -> dict[str, Any]:
    """``spec`` of the RayJob (kuberay v1.6.0, ray-operator/apis/ray/v1/rayjob_types.go)."""
    runtime: dict[str, Any] = {
        "working_dir": CODE,
        # A mounted ConfigMap holds everything twice more, in hidden folders with the time of mounting in their names.
        "excludes": ["/..*"],
        "env_vars": dict(job.environment),
        **({"pip": list(job.pip)} if job.pip else {}),
    }
    runtime_env = json.dumps(runtime, sort_keys=True)
    command = f"python -m training.job --launcher ray --config {SETTINGS}"
    if job.prepare is not None:
        command = f"sh -c 'python -m training.prepare --launcher ray --config {PREPARE} && exec {command}'"
    # Interrupted first, so that the run can say where it stopped.
    entrypoint = f"timeout --signal=INT --kill-after=120 {job.deadline} {command}"
    files = [{"key": _key(path), "path": path} for path in sorted(job.files)]
    return {
        "submissionMode": "K8sJobMode",
        "clusterSelector": {"ray.io/cluster": job.cluster},
        "entrypoint": entrypoint,
        "runtimeEnvYAML": runtime_env,
        # With clusterSelector the operator refuses retries; the job restarts its own workers.
        "backoffLimit": 0,
        # A second submitter would hand the job over anew, to a head that has lost the first one.
        "submitterConfig": {"backoffLimit": 0},
        # No ttlSecondsAfterFinished: a job that vanishes would be run again by the next `up`.
        "shutdownAfterJobFinishes": False,
        "activeDeadlineSeconds": job.deadline + START_SECONDS,
        "submitterPodTemplate": {
            "metadata": {"labels": dict(manifests.SUBMITTER)},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "nodeSelector": manifests.system_nodes(job.on_eks),
                "containers": [
                    {
                        "name": "ray-job-submitter",
                        "image": job.image,
                        "imagePullPolicy": "IfNotPresent",
                        "command": ["python", f"{CODE}/{SUBMITTER_CODE.name}"],
                        # Kubernetes would fill in $(NAME).
                        "args": [text.replace("$(", "$$(") for text in (entrypoint, runtime_env)],
                        # KubeRay's own template asks for half a CPU and waits for ever on a small node.
                        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
                        "securityContext": manifests.restricted(),
                        "volumeMounts": [{"name": "code", "mountPath": CODE, "readOnly": True}],
                    }
                ],
                "volumes": [{"name": "code", "configMap": {"name": job.code_name, "items": files}}],
            },
        },
    }
