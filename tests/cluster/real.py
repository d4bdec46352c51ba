"""A stack of its own on the Kubernetes of KUBECONFIG: a copy of the program, a state backend, and prepared data on the node.

CLUSTER_IMAGE names an image with Ray, PyTorch and transformers that the nodes have or can pull (CLUSTER_OTHER_IMAGE another one);
CLUSTER_CHART a folder with the operator's chart, for a cluster without internet access; CLUSTER_FOLDER the node's folder for data and runs.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
TOOLS = Path(os.environ.get("LAB_HOME", "/var/tmp/lab")) / "bin"
PATH = f"{TOOLS}:{os.environ['PATH']}"
IMAGE, CHART = os.environ.get("CLUSTER_IMAGE", ""), os.environ.get("CLUSTER_CHART", "")
FOLDER = os.environ.get("CLUSTER_FOLDER", "/var/lib/ray-train-efa-test")
# The same image by another name, which a node takes for another image and need not pull.
OTHER_IMAGE = os.environ.get("CLUSTER_OTHER_IMAGE", IMAGE.removeprefix("docker.io/") if IMAGE.startswith("docker.io/") else "")
PROGRAM = ("Pulumi.yaml", *(path.name for path in ROOT.glob("*.py")), "prices.json", "infra", "workloads", "training")


def kubectl_command() -> list[str] | None:
    if shutil.which("kubectl", path=PATH):
        return ["kubectl"]
    return [str(TOOLS / "kube"), "kubectl"] if (TOOLS / "kube").exists() else None


def missing() -> str | None:
    """Why these tests can't run here; None where they can."""
    if not os.environ.get("KUBECONFIG"):
        return "KUBECONFIG names no Kubernetes"
    if not IMAGE:
        return "CLUSTER_IMAGE names no image with Ray, PyTorch and transformers"
    if importlib.util.find_spec("pulumi_kubernetes") is None:
        return "the Pulumi program's environment is .venv-pulumi (see requirements.txt)"
    if not shutil.which("pulumi", path=PATH):
        return f"no Pulumi CLI on the PATH or in {TOOLS}"
    return None if kubectl_command() else f"no kubectl on the PATH or in {TOOLS}"


@dataclasses.dataclass
class Stack:
    """The stack `test-<random>`, in a folder of its own."""

    home: Path
    name: str = dataclasses.field(default_factory=lambda: f"test-{uuid.uuid4().hex[:6]}")

    def __post_init__(self) -> None:
        self.prepared = False
        self.project = self.home / "project"
        self.project.mkdir()
        (self.home / "state").mkdir()
        for name in PROGRAM:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.project / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self.project / name)
        (self.project / ".venv-pulumi").symlink_to(sys.prefix)  # where Pulumi.yaml says the interpreter is
        # A copy, for the engine keeps its path, and a test may make it point nowhere.
        (self.home / "kubeconfig").write_text(Path(os.environ["KUBECONFIG"]).read_text())
        (self.home / "kubeconfig").chmod(0o600)
        self.environment = {
            **os.environ,
            "KUBECONFIG": f"{self.home}/kubeconfig",
            "PATH": PATH,
            "PULUMI_BACKEND_URL": f"file://{self.home}/state",
            "PULUMI_CONFIG_PASSPHRASE": "test",
            "PULUMI_SKIP_UPDATE_CHECK": "1",
            "PULUMI_LANGUAGE_HOST_PYTHON": sys.executable,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.settings: dict[str, Any] = {
            "cluster": {"kind": "existing", "context": self.kubectl("config", "current-context").strip()},
            "ray": {
                "image": IMAGE,
                "headCpu": 1,
                "headMemory": "4Gi",
                "workers": 2,
                "workerCpu": 0.35,
                "workerMemory": "3Gi",
                **({"charts": {"kuberay-operator": {"chart": CHART}}} if CHART else {}),
            },
            "storage": {"hostPath": f"{FOLDER}/{self.name}"},
        }
        self.train(steps=20)
        self.pulumi("stack", "init")

    @property
    def namespace(self) -> str:
        return f"ray-train-efa-{self.name}"

    def train(self, steps: int, **changes: Any) -> None:
        """Makes the stack file say this job; on the data of :meth:`prepare_data`, unless it prepares its own."""
        self.settings["training"] = {
            "run": True,
            **({} if "prepare" in changes else {"data": "/storage/data"}),
            "model": {"random": "tiny"},
            "steps": steps,
            "warmupSteps": 5,
            "tokensPerStep": 1024,
            "checkpointEvery": 10,
            "evalRows": 8,
            **changes,
        }
        self.write()

    def write(self) -> None:
        named = {f"ray-train-efa:{key}": value for key, value in self.settings.items()}
        file = self.project / f"Pulumi.{self.name}.yaml"
        salt = {k: v for k, v in yaml.safe_load(file.read_text()).items() if k != "config"} if file.exists() else {}
        file.write_text(yaml.safe_dump({**salt, "config": named}))

    def command(self, *arguments: str) -> list[str]:
        return ["pulumi", *arguments, "--stack", self.name, "--non-interactive", "--color", "never"]

    def pulumi(self, *arguments: str, code: int = 0) -> str:
        """What the engine says. code: its exit code, 255 for any that is no success."""
        command = self.command(*arguments)
        done = subprocess.run(command, cwd=self.project, env=self.environment, capture_output=True, text=True, timeout=900, check=False)
        text = done.stdout + done.stderr
        expected = done.returncode == code or (code == 255 and done.returncode != 0)
        assert expected, f"{' '.join(command)} ended with {done.returncode}:\n{text[-6000:]}"
        return text

    def stuck(self) -> str:
        """What an `up` says that must fail."""
        return self.pulumi("up", "--yes", "--skip-preview", code=255)

    def interrupted(self, sent: signal.Signals, at: str) -> str:
        """What an `up` says that gets a signal as soon as it says ``at``."""
        pulumi = subprocess.Popen(
            self.command("up", "--yes", "--skip-preview"),
            cwd=self.project,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert pulumi.stdout is not None
        said = ""
        for line in pulumi.stdout:
            said += line
            if at in line:
                break
        if sent == signal.SIGKILL:
            os.killpg(pulumi.pid, sent)  # the machine that it runs on is gone, with all its processes
        else:
            pulumi.send_signal(sent)
        rest, _ = pulumi.communicate(timeout=300)
        assert at in said, f"`up` never said {at!r}:\n{said[-3000:]}"
        assert pulumi.returncode != 0, said + rest
        return said + rest

    def up(self) -> str:
        return self.pulumi("up", "--yes", "--skip-preview")

    def destroy(self) -> str:
        return self.pulumi("destroy", "--yes", "--skip-preview")

    def kubectl(self, *arguments: str, stdin: str | None = None, code: int | None = 0) -> str:
        command = [*(kubectl_command() or []), *arguments]
        done = subprocess.run(command, env=self.environment, input=stdin, capture_output=True, text=True, timeout=300, check=False)
        assert code is None or done.returncode == code, f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        return done.stdout

    def get(self, *what: str) -> list[dict[str, Any]]:
        return list(json.loads(self.kubectl("-n", self.namespace, "get", *what, "-o", "json"))["items"])

    def job(self) -> dict[str, Any]:
        (only,) = self.get("rayjob")
        return only

    def wait_for(self, what: str, found: Callable[[], Any], seconds: float = 600) -> Any:
        """Asks until there is something; the limit only ends a test that has failed."""
        end = time.monotonic() + seconds
        while not (answer := found()):
            assert time.monotonic() < end, f"{what}: not in {seconds:.0f} s\n{self.kubectl('-n', self.namespace, 'get', 'pods,rayjob', code=None)}"
            time.sleep(1)
        return answer

    def pods(self, node_type: str) -> list[dict[str, Any]]:
        """The Ray cluster's head or workers, less those that go."""
        found = self.get("pods", "-l", f"ray.io/node-type={node_type}")
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def kill(self, node_type: str) -> None:
        """One pod is gone at once, as if its node were."""
        name = self.pods(node_type)[0]["metadata"]["name"]
        self.kubectl("-n", self.namespace, "delete", "pod", name, "--force", "--grace-period=0")

    def log(self) -> str:
        """What the job has said so far."""
        return self.kubectl("-n", self.namespace, "logs", "-l", "app.kubernetes.io/component=ray-job-submitter", "--tail", "-1", code=None)

    def timeline(self, began: datetime.datetime) -> dict[str, float]:
        """Seconds from the start of `up` to what came of it, by Kubernetes' own clock and the log's."""

        def at(text: str) -> float:
            return (datetime.datetime.fromisoformat(text[:19] + "+00:00") - began).total_seconds()

        def ready(pod: dict[str, Any]) -> float:
            return at(next(c["lastTransitionTime"] for c in pod["status"]["conditions"] if c["type"] == "Ready"))

        log = self.kubectl("-n", self.namespace, "logs", "-l", "app.kubernetes.io/component=ray-job-submitter", "--tail", "-1", "--timestamps")
        lines = [line for line in log.splitlines() if " step " in line]
        (submitter,) = self.get("pods", "-l", "app.kubernetes.io/component=ray-job-submitter")
        return {
            "RayCluster made": at(self.get("rayclusters")[0]["metadata"]["creationTimestamp"]),
            "head ready": max(map(ready, self.pods("head"))),
            "workers ready": max(map(ready, self.pods("worker"))),
            "RayJob made": at(self.job()["metadata"]["creationTimestamp"]),
            "submitter runs": at((submitter["status"]["containerStatuses"][0]["state"].get("terminated") or {})["startedAt"]),
            "Ray has the job": at(self.job()["status"]["rayJobInfo"]["startTime"]),
            "first step": at(lines[0].split()[0]),
            "last step": at(lines[-1].split()[0]),
            "job over": at(self.job()["status"]["endTime"]),
        }

    def ended(self) -> dict[str, Any]:
        """The job's status once it has one that stays."""
        return dict(self.wait_for("the end of the job", lambda: (s := self.job().get("status", {})).get("jobDeploymentStatus") in ("Complete", "Failed") and s))

    def on_node(self, name: str, script: str, files: dict[str, str] | None = None) -> str:
        """Runs a script in a pod of the default namespace that sees the stack's folder of the node, and returns what it prints."""
        keys = {path.replace("/", "--"): text for path, text in (files or {}).items()}
        items = [{"key": path.replace("/", "--"), "path": path} for path in files or {}]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "main",
                        "image": IMAGE,
                        "imagePullPolicy": "IfNotPresent",
                        "workingDir": "/code",
                        "command": ["sh", "-ec", script],
                        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}},
                        "volumeMounts": [{"name": "storage", "mountPath": "/storage"}, {"name": "code", "mountPath": "/code"}],
                    }
                ],
                "volumes": [
                    {"name": "storage", "hostPath": {"path": f"{FOLDER}/{self.name}", "type": "DirectoryOrCreate"}},
                    {"name": "code", "configMap": {"name": name, "items": items} if items else {"name": name}},
                ],
            },
        }
        code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": keys or {"empty": ""}}
        try:
            self.kubectl("-n", "default", "apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all([code, pod]))
            phase = self.wait_for(
                f"pod {name}",
                lambda: (p := self.kubectl("-n", "default", "get", "pod", name, "-o", "jsonpath={.status.phase}")) in ("Succeeded", "Failed") and p,
            )
            log = self.kubectl("-n", "default", "logs", name)
            assert phase == "Succeeded", log[-3000:]
            return log
        finally:
            self.kubectl("-n", "default", "delete", "pod,configmap", name, "--ignore-not-found", "--wait=false")

    def prepare_data(self) -> None:
        self.prepared = True
        files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "training").rglob("*.py"))}
        said = {"sources": ["training"], "output": "/storage/data", "tokenizer": "train:400", "sequenceLength": 64, "evalFraction": 0.1}
        files["prepare.json"] = json.dumps(said)
        self.on_node(f"{self.name}-prepare", "python -m training.prepare --config prepare.json", files)

    def run_records(self) -> dict[str, dict[str, Any]]:
        """run.json of every run, by the run's name."""
        script = "python -c \"import glob,json; print(json.dumps({p.split('/')[-2]: json.load(open(p)) for p in glob.glob('/storage/runs/*/run.json')}))\""
        return dict(json.loads(self.on_node(f"{self.name}-look", script)))

    def clean_up(self) -> None:
        self.destroy()
        if self.prepared:
            self.on_node(f"{self.name}-clean", "rm -rf /storage/*")
