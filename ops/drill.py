"""What does a fault cost here? The same short job undisturbed, then once with each fault, on the stack's own Ray cluster.

A worker is killed: SIGKILL to a rank, in its pod. A node goes with notice: the worker's pod is evicted, as a drain for a spot notice does. The store is
away: a network policy cuts the Ray pods off from all but each other and DNS, or, where the store is a mounted folder, the run's checkpoints are
moved away. The head is killed: its pod is deleted without grace, and the same job submitted again to the new one.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ops import kube, runs
from ops.errors import Refused
from ops.inside import POLL_SECONDS, Inside, Say, Submission
from ops.job_log import speeds
from ops.ray_jobs import NoAnswer, NoSuchJob
from training import faults
from training.faults import HEAD, STORAGE, WORKER, Toll

# Long enough for a node that an autoscaler must buy.
LEG_SECONDS = 3600
SUFFIX = "-drill-storage"
# Kills one of the training workers of this pod; argv: any number, by which one is chosen.
_KILL = """
import os, pathlib, signal, sys
def is_rank(folder):
    try:
        return (folder / "cmdline").read_bytes().startswith(b"ray::RayTrainWorker")
    except OSError:
        return False
ranks = sorted(int(folder.name) for folder in pathlib.Path("/proc").glob("[0-9]*") if is_rank(folder))
if not ranks:
    sys.exit("no training worker runs in this pod")
os.kill(ranks[int(sys.argv[1]) % len(ranks)], signal.SIGKILL)
"""
# argv: away or back, and the run's folder. A file where a folder was: whatever is written there fails.
_MOVE = """
import os, sys
there = sys.argv[2] + "/checkpoints"
if sys.argv[1] == "away":
    os.rename(there, there + "-away")
    open(there, "x").close()
elif os.path.isdir(there + "-away"):
    os.unlink(there)
    os.rename(there + "-away", there)
"""


def settings_of(settings: Mapping[str, Any], steps: int, run: str) -> dict[str, Any]:
    """The job's settings for a leg: the stack's own, but short, with ten checkpoints and every step logged, under a name of its own."""
    found = {**settings, "steps": steps, "run": run, "logEvery": 1, "checkpointEvery": max(1, steps // 10), "export": False, "evalEvery": 0}
    found.pop("stopAfter", None)
    return {**found, "warmupSteps": min(int(found.get("warmupSteps", 20)), steps)}


def leg(inside: Inside, kind: str | None, at: int, run: str, made: Submission, seed: int, away: float, note: Say) -> None:
    """One run to its end, struck by ``kind`` after step ``at``. Raises Refused where it ends before, or not at all."""
    end = time.monotonic() + LEG_SECONDS
    jobs = inside.ray()
    jobs.submit(run, *made)
    again = f"{run}-again"
    try:
        if kind is not None:
            _until(lambda: _steps_done(inside, run) >= at or _over(inside, run), end, f"step {at} of {run}")
            if _over(inside, run):
                raise Refused(f"run {run} ended before it could be harmed; give it more --steps")
            strike(inside, kind, runs.uri_of(inside, run), random.Random(f"{seed}/{kind}"), away, note, lambda: _over(inside, run))
        if kind == HEAD:
            note("  the same job again, once a new head answers")
            _until(lambda: _submitted(inside, again, made), end, "a new head")
            run = again
        _until(lambda: _over(inside, run), end, f"the end of {run}")
    except BaseException:
        for name in (run, again):
            with contextlib.suppress(Refused):
                inside.ray().stop(name)
        raise


def strike(
    inside: Inside,
    kind: str,
    folder: str,
    dice: random.Random,
    away: float,
    note: Say,
    over: Callable[[], bool],
) -> None:
    """Does the harm, and where it takes time, waits until it is done. folder: the run's, as the pods name it; over: whether the run has ended."""
    pods = f"/api/v1/namespaces/{inside.namespace}/pods"
    if kind == HEAD:
        inside.kube.ask("DELETE", f"{pods}/{inside.head()}", query={"gracePeriodSeconds": "0"})
    elif kind == STORAGE:
        with _moved(inside, folder) if folder.startswith("/") else _cut_off(inside):
            time.sleep(away)
        note(f"  it is back after {away:.0f} s")
    else:
        selector = f"ray.io/cluster={inside.ray_cluster},ray.io/node-type=worker"
        there = [pod["metadata"] for pod in inside.kube.items(pods, labelSelector=selector)]
        workers = sorted(str(pod["name"]) for pod in there if not pod.get("deletionTimestamp"))  # a pod that goes has no rank any more
        name = dice.choice(workers)
        if kind == WORKER:
            inside.kube.run(inside.namespace, name, "ray-worker", ["python", "-c", _KILL, str(dice.randrange(64))])
        else:
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": inside.namespace}}
            inside.kube.ask("POST", f"{pods}/{name}/eviction", body=body, content_type="application/json")
            while inside.optional(f"{pods}/{name}") is not None:
                if over():
                    raise Refused(f"the run ended before pod {name} was gone; give it more --steps")
                time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _moved(inside: Inside, folder: str) -> Iterator[None]:
    """The run's checkpoints are not where they were."""
    inside.in_head(["python", "-c", _MOVE, "away", folder])
    try:
        yield
    finally:
        inside.in_head(["python", "-c", _MOVE, "back", folder])


@contextlib.contextmanager
def _cut_off(inside: Inside) -> Iterator[None]:
    """No pod of the Ray cluster reaches anything but the others and DNS."""
    path, name = f"/apis/networking.k8s.io/v1/namespaces/{inside.namespace}/networkpolicies", f"{inside.ray_cluster}{SUFFIX}"
    inside.kube.ask("POST", path, body=cut_off(inside.namespace, inside.ray_cluster, name), content_type="application/json")
    try:
        yield
    finally:
        inside.kube.ask("DELETE", f"{path}/{name}")


def cut_off(namespace: str, ray_cluster: str, name: str) -> dict[str, Any]:
    """The NetworkPolicy that leaves the Ray pods each other and DNS."""
    mine = {"matchLabels": {"ray.io/cluster": ray_cluster}}
    ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"podSelector": mine, "policyTypes": ["Egress"], "egress": [{"to": [{"podSelector": mine}]}, {"ports": ports}]},
    }


def tolls(inside: Inside, read: Callable[[str], runs.Run], calm: str, struck: Mapping[str, tuple[str, int]]) -> list[Toll]:
    """What each fault cost. calm: name of the undisturbed run; struck: by fault, the run and the step after which it was struck."""
    undisturbed = read(calm)
    found = []
    for kind, (name, at) in struck.items():
        run = read(name)
        found.append(faults.toll(kind, at, (run.document, run.metrics), run.verdict, (undisturbed.document, undisturbed.metrics), inside.usd_hour))
    return found


def _over(inside: Inside, run: str) -> bool:
    try:
        return inside.ray().get(run).over
    except NoAnswer:
        return False


def _steps_done(inside: Inside, run: str) -> int:
    try:
        return max((step for step, _ in speeds(inside.ray().log(run))), default=0)
    except NoAnswer:
        return 0


def _submitted(inside: Inside, run: str, made: Submission) -> bool:
    """Whether a head has the job now."""
    try:
        inside.ray().get(run)
    except NoSuchJob:
        with contextlib.suppress(Refused):
            inside.ray().submit(run, *made)
        return False
    except (NoAnswer, kube.NotThere, Refused):
        return False
    return True


def _until(found: Callable[[], bool], end: float, what: str) -> None:
    while not found():
        if time.monotonic() > end:
            raise Refused(f"{what} was not seen within {LEG_SECONDS / 60:.0f} minutes; `python -m ops explain` may say why")
        time.sleep(POLL_SECONDS)


def note_in(inside: Inside, run: str, values: Mapping[str, Any]) -> None:
    """Adds fields to the run.json of a run that is over."""
    inside.in_head(["python", "-c", runs.NOTER, runs.as_uri(runs.uri_of(inside, run)), json.dumps(values)])
