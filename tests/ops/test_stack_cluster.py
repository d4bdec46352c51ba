"""up -> explain, broken five ways -> train -> logs, cut in the middle -> status -> verdict -> cancel -> train -> down, on a real Kubernetes with a real Ray.

The tests go in this order, on one stack. KUBECONFIG, CLUSTER_IMAGE and the like: tests/cluster/real.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ops import kube
from ops.stack import Stack

ROOT = Path(__file__).parents[2]


def _real() -> Any:
    spec = importlib.util.spec_from_file_location("real", ROOT / "tests" / "cluster" / "real.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("real", module)
    spec.loader.exec_module(module)
    return module


real = _real()
reason = real.missing()
pytestmark = [pytest.mark.cluster, *([pytest.mark.skip(reason=reason)] if reason else [])]
NO_IMAGE = "registry.invalid/no/such-image:1"


class Lab:
    """A stack of its own, and `python -m ops` for it."""

    def __init__(self, home: Path) -> None:
        self.real = real.Stack(home)
        self.name = self.real.name
        shutil.copytree(ROOT / "ops", self.real.project / "ops", ignore=shutil.ignore_patterns("__pycache__"))
        self.real.settings["ray"]["workerCpu"] = 0.1
        self.settings(run=False)
        self.environment = {**self.real.environment, "XDG_CACHE_HOME": str(home / "cache")}

    def settings(self, **changes: Any) -> None:
        self.real.train(steps=200, logEvery=2, **changes)

    def __call__(self, *arguments: str, code: int | None = 0, limit: float = 900) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "ops", *arguments],
            cwd=self.real.project,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        said = f"ops {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert code is None or done.returncode == code, said
        assert "Traceback" not in done.stdout + done.stderr, said
        return done

    def json(self, *arguments: str, code: int | None = 0) -> dict[str, Any]:
        return dict(json.loads(self(*arguments, "--json", code=code).stdout))

    def explained(self, cause: str, limit: float = 240) -> str:
        """Asks until the cause is named; the limit only ends a test that has failed."""
        end = time.monotonic() + limit
        while (found := self.json("explain", self.name, code=None))["cause"] != cause:
            assert time.monotonic() < end, f"{cause} was not named; the last answer: {found}"
            time.sleep(2)
        return str(found["sentence"])

    def patch(self, *operations: dict[str, Any]) -> None:
        self.real.kubectl("-n", self.real.namespace, "patch", "raycluster", self.real.namespace, "--type=json", "-p", json.dumps(operations))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("lab"))
    try:
        made.real.prepare_data()
        yield made
    finally:
        made.real.clean_up()


@pytest.fixture
def inside(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """The same stack through the library."""
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    return Stack(lab.name, lab.real.project)


def test_up_without_a_job_says_what_comes_next(lab: Lab) -> None:
    said = lab("up", lab.name).stdout
    assert f"{lab.name} is up" in said
    assert "Ray cluster: made" in said
    assert f"ops train {lab.name}" in said
    assert "no training job is set up" in lab("explain", lab.name, code=6).stdout


WORKER = "/spec/workerGroupSpecs/0/template/spec"
BREAKS: dict[str, tuple[dict[str, Any], str, str]] = {
    "an image that does not exist": ({"op": "replace", "path": f"{WORKER}/containers/0/image", "value": NO_IMAGE}, "image", NO_IMAGE),
    "more CPU than any node has": ({"op": "replace", "path": f"{WORKER}/containers/0/resources/requests/cpu", "value": "500"}, "unsatisfiable", "500 CPUs"),
    "a device that no node has": (
        {"op": "add", "path": f"{WORKER}/containers/0/resources/limits/vpc.amazonaws.com~1efa", "value": "9999"},
        "device-efa",
        "9999 EFA interfaces",
    ),
}


@pytest.mark.parametrize("broken", BREAKS, ids=str)
def test_a_broken_worker_is_explained(lab: Lab, broken: str) -> None:
    change, cause, words = BREAKS[broken]
    before = lab.real.get("rayclusters")[0]["spec"]["workerGroupSpecs"]
    lab.patch(change)
    try:
        assert words in lab.explained(cause)
    finally:
        lab.patch({"op": "replace", "path": "/spec/workerGroupSpecs", "value": before})


def test_a_taint_is_explained(lab: Lab) -> None:
    """The node is an object that nothing runs on, so that no one else's pods are kept out or let in."""
    node = f"{lab.name}-tainted"
    before = lab.real.get("rayclusters")[0]["spec"]["workerGroupSpecs"]
    document = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node, "labels": {"ops-test": lab.name}},
        "spec": {"taints": [{"key": "team", "value": "other", "effect": "NoSchedule"}]},
    }
    lab.real.kubectl("apply", "-f", "-", stdin=json.dumps(document))
    try:
        lab.patch({"op": "add", "path": f"{WORKER}/nodeSelector", "value": {"ops-test": lab.name}})
        assert "carries the taint team=other" in lab.explained("taint")
    finally:
        lab.patch({"op": "replace", "path": "/spec/workerGroupSpecs", "value": before})
        lab.real.kubectl("delete", "node", node, "--ignore-not-found")


def test_an_operator_that_is_down_is_explained_and_its_return_mends_it(lab: Lab) -> None:
    scale = ("-n", lab.real.namespace, "scale", "deployment", f"{lab.real.namespace}-kuberay")
    lab.real.kubectl(*scale, "--replicas=0")
    try:
        assert "scaled to zero" in lab.explained("operator")
    finally:
        lab.real.kubectl(*scale, "--replicas=1")
    lab.explained("no-job")


def test_train_starts_a_job_keeps_its_id_and_the_files_comments(lab: Lab) -> None:
    file = lab.real.project / f"Pulumi.{lab.name}.yaml"
    file.write_text("# mine\n" + file.read_text())
    job = lab.json("train", lab.name, "--set", "learningRate=0.002")
    assert job["new"]
    assert job["submissionId"]
    assert file.read_text().startswith("# mine\n")
    assert "learningRate: 0.002" in file.read_text()
    assert lab.json("train", lab.name)["submissionId"] == job["submissionId"], "the same settings are the same job"
    assert lab("train", lab.name, "--set", "steps=9", code=7).stderr.count("--replace") == 1


def test_a_log_is_followed_over_cut_connections_to_the_jobs_end(inside: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = kube.Kube.forward
    made: list[socket.socket] = []

    def remembered(self: kube.Kube, *where: Any) -> socket.socket:
        made.append(forward(self, *where))
        return made[-1]

    monkeypatch.setattr(kube.Kube, "forward", remembered)
    text: list[str] = []
    cuts: list[int] = []
    over = threading.Event()

    def cut() -> None:
        # Each time that some more of the log has come, every open connection is cut.
        while not over.wait(0.05):
            if len(cuts) < 3 and sum(map(len, text)) > 600 * (len(cuts) + 1):
                cuts.append(len(made))
                for sock in made:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=cut, daemon=True)
    thread.start()
    job = inside.logs(text.append, follow_on=True)
    over.set()
    thread.join()
    assert job.state == "SUCCEEDED", job
    assert job.code == 0
    assert len(cuts) == 3, "the connections were cut in the middle"
    monkeypatch.undo()


def test_after_the_end_log_status_and_verdict_tell_the_same_run(lab: Lab, inside: Stack) -> None:
    told = lab.json("logs", lab.name)
    assert told["job"]["state"] == "SUCCEEDED"
    lines = [line for line in told["log"].splitlines() if line.startswith("step ") and "tokens/s" in line]
    assert len(lines) == 100, "each of the log's lines once"
    status = lab.json("status", lab.name)
    assert (status["state"], status["job"]["state"], status["progress"]["step"]) == ("up", "SUCCEEDED", 200)
    assert status["progress"]["tokensPerSecond"] > 0
    assert lab.json("verdict", lab.name)["observed"] == "tcp"
    assert "SUCCEEDED" in lab("logs", lab.name, "-f").stdout
    shown = lab("status", lab.name).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown


def test_a_running_job_is_cancelled_explained_and_gone_on_with(lab: Lab) -> None:
    first = lab.json("train", lab.name, "--set", "steps=20000", "--set", "checkpointEvery=20", "--set", "seed=1")
    lab.explained("running")
    status = wait(lambda: (found := lab.json("status", lab.name))["progress"] and found["progress"]["step"] and found)
    assert status["job"]["state"] == "RUNNING"
    assert status["progress"]["left"]
    assert lab.json("cancel", lab.name)["state"] == "STOPPED"
    assert "stopped on request" in lab("explain", lab.name, code=6).stdout
    assert lab("logs", lab.name, "-f", code=3).stdout
    second = lab.json("train", lab.name)
    assert second["new"]
    assert second["submissionId"] != first["submissionId"], "a stopped job is started again"
    wait(lambda: "resuming" in lab.json("logs", lab.name)["log"])


def test_runs_of_the_stack_are_compared(lab: Lab, tmp_path: Path) -> None:
    names = sorted(lab.real.run_records())
    assert len(names) == 2, "another seed is another run"
    told = lab.json("compare", *(f"{lab.name}/{name}" for name in names), "--page", str(tmp_path / "page.html"))
    assert sorted(told["names"]) == names
    assert {row["what"] for row in told["differences"]} >= {"seed", "steps"}
    assert (tmp_path / "page.html").exists()


def test_the_proof_passes_tcp_and_refuses_a_claim_of_efa(lab: Lab, tmp_path: Path) -> None:
    assert "a proof needs all workers" in lab("prove", lab.name, code=7).stderr
    lab("cancel", lab.name)
    told = lab.json("prove", lab.name, "--rounds", "1", "--steps", "10", "--page", str(tmp_path / "proof.html"))
    assert told["holds"]
    assert [(leg["leg"], leg["must"], leg["exitCode"]) for leg in told["results"]] == [("tcp", "pass", 0), ("efa", "refuse", 4)]
    assert told["curves"][0]["ranks"] == 2
    assert "no EFA" in told["note"]


@pytest.mark.parametrize("kinds", [["head"], pytest.param(["worker", "notice", "storage"], marks=pytest.mark.soak)], ids=",".join)
def test_a_drill_says_what_each_fault_cost_and_every_run_survives(lab: Lab, kinds: list[str]) -> None:
    # A node that goes with notice takes half a minute, in which the run must not end.
    told = lab.json("drill", lab.name, "--faults", ",".join(kinds), "--steps", "400" if "notice" in kinds else "100", "--away", "5")
    assert [(one["fault"], one["survived"]) for one in told["tolls"]] == [(kind, True) for kind in kinds], told
    assert [one["attempts"] for one in told["tolls"]] == [1 if kind == "storage" else 2 for kind in kinds], "a store that comes back needs no new start"
    noted = [record["drill"] for name, record in lab.real.run_records().items() if name.startswith("drill-") and name.endswith("-none")]
    assert told["tolls"] in noted, "the table is in the undisturbed run's record"


def test_down_leaves_nothing_and_a_second_finds_nothing(lab: Lab) -> None:
    said = lab("down", lab.name, "--yes").stdout
    assert f"{lab.name} is down" in said
    assert lab.real.kubectl("get", "namespace", lab.real.namespace, "--ignore-not-found") == ""
    assert lab.name not in lab.real.kubectl("get", "rayclusters,rayjobs,clusterroles,clusterrolebindings", "--all-namespaces", "-o", "name")
    assert "nothing was up" in lab("down", lab.name, "--yes").stdout
    assert "down" in lab("status", lab.name).stdout


def wait(found: Callable[[], Any], seconds: float = 300) -> Any:
    """Asks until there is something; the limit only ends a test that has failed."""
    end = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < end
        time.sleep(1)
    return answer
