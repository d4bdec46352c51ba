"""How long a run stands still when a node is lost, drained or added: ``python -m benchmarks.elastic`` (a few minutes, two cores, no GPU).

Ray nodes on this machine, each with room for one worker, and one run that goes 2 -> 1 -> 2 -> 1 workers. What is measured is Ray and this
project's own part of the gap; that a cloud takes minutes to start a machine is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.2
HURRY = "hurry"
BEGUN = "rank 0 begins"
PATIENCE = 240


def paced_rank(config: Mapping[str, Any]) -> dict[str, Any]:
    """As the job's own function of a rank, but a step takes STEP_SECONDS longer until there is a file ``hurry`` in the storage."""
    entered = time.time()
    from training import data, launch_ray

    hurry = Path(config["settings"]["storage"]) / HURRY
    following = data.Batches.__next__

    def paced(batches: data.Batches) -> data.Step:
        if not hurry.exists():
            time.sleep(STEP_SECONDS)
        return following(batches)

    data.Batches.__next__ = paced  # type: ignore[method-assign, assignment]  # this process ends with the run
    if os.environ.get("RANK") == "0":
        launch_ray._put(config["lines"], f"{BEGUN} {entered} {time.time()}")
    return launch_ray._rank(config)


class Nodes:
    """A Ray cluster on this machine. Its head runs no worker; every other node has room for one."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.alive: list[Any] = []
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    def want(self, number: int) -> None:
        """Adds nodes until there are ``number``; in the main thread only, which is Ray's demand."""
        while len(self.alive) < number:
            self.alive.append(self.cluster.add_node(num_cpus=1))

    def with_workers(self) -> list[Any]:
        """The nodes that run a rank now."""
        parents = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"TrainWorker" in (folder / "cmdline").read_bytes():
                    parents.add(int((folder / "stat").read_text().rpartition(")")[2].split()[1]))
        return [node for node in self.alive if node.all_processes["raylet"][0].process.pid in parents]

    def drain(self, node: Any, seconds: int) -> None:
        """What a worker pod's preStop hook does on a spot notice."""
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", str(seconds)]
        command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", self.cluster.address, "--node-id", node.node_id]
        subprocess.run([*command, *reason], check=True, capture_output=True)

    def lose(self, node: Any) -> None:
        """The node is gone at once, as when a machine loses power."""
        self.alive.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """Ends all of it."""
        import ray

        ray.shutdown()
        self.cluster.shutdown()


class Run:
    """A job in a thread of its own; what it says can be waited for."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.said: list[tuple[float, str]] = []
        self.answer: Any = None
        self._news = threading.Condition()
        self._heard = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        from training import job

        try:
            answer: Any = job.run(self.settings, "ray", self._hear)
        except BaseException as error:  # raised where it is waited for
            answer = error
        with self._news:
            self.answer = answer
            self._news.notify_all()

    def _hear(self, text: str) -> None:
        with self._news:
            self.said.append((time.time(), text))
            self._news.notify_all()

    def hears(self, what: str) -> tuple[float, str]:
        """The next line with ``what`` in it, and when it came; lines before it are not looked at again."""
        with self._news:

            def found() -> bool:
                return any(what in text for _, text in self.said[self._heard :])

            self._news.wait_for(lambda: found() or self.answer is not None, PATIENCE)
            if not found():
                lines = "\n".join(text for _, text in self.said[-40:])
                raise AssertionError(f"nobody said {what!r}; the end was {self.answer!r} after:\n{lines}")
            at = next(i for i in range(self._heard, len(self.said)) if what in self.said[i][1])
            self._heard = at + 1
            return self.said[at]

    def ends(self) -> dict[str, Any]:
        """Lets the rest go by fast; returns the summary, or raises what the run raised."""
        (Path(self.settings.storage) / HURRY).touch()
        with self._news:
            if not self._news.wait_for(lambda: self.answer is not None, PATIENCE):
                raise AssertionError("the run does not end; it last said:\n" + "\n".join(text for _, text in self.said[-20:]))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return dict(self.answer)


@contextlib.contextmanager
def paced(resize_seconds: float) -> Iterator[None]:
    """Runs that are started in the block are paced, and look for room for more workers every ``resize_seconds``."""
    from training import launch_ray

    before = launch_ray._rank, launch_ray.RESIZE_SECONDS
    launch_ray._rank, launch_ray.RESIZE_SECONDS = paced_rank, resize_seconds
    try:
        yield
    finally:
        launch_ray._rank, launch_ray.RESIZE_SECONDS = before


def _gap(run: Run, what: str, begun: float, seen: str | None) -> str:
    """One line: where the time went between what happened at ``begun`` and the first step after it."""
    noticed = run.hears(seen)[0] if seen else begun
    entered, imported = (float(word) for word in run.hears(BEGUN)[1].split()[-2:])
    resumed = run.hears("resuming")[0]
    stepped = run.hears("step ")[0]
    parts = {
        "seen": noticed - begun,
        "new group": entered - noticed,
        "imports": imported - entered,
        "build, load": resumed - imported,
        "step": stepped - resumed,
    }
    return f"{what:<28}{stepped - begun:6.1f} s   " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())


def main() -> int:
    """Prints a line for each change."""
    argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__).parse_args()
    from training import schema
    from training.prepare import prepare
    from training.prepare_settings import PrepareSettings
    from training.record import read_run
    from training.settings import Settings
    from training.storage import place

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.mkdir()
        for i in range(40):
            (text / f"{i}.txt").write_text("\n".join(f"{number} is {number * number} when it is multiplied by itself" for number in range(i, i + 100)))
        data = f"{folder}/data"
        prepare(PrepareSettings(sources=(str(text),), output=data, tokenizer="train:300", sequence_length=64, eval_fraction=0), say=lambda _: None)
        values = {
            "data": data, "model": {"random": "tiny"}, "storage": folder, "run": "r", "steps": 1500, "tokensPerStep": 512, "warmupSteps": 5,
            "logEvery": 1, "checkpointEvery": 50, "workers": 2, "minWorkers": 1, "maxFailures": 1, "export": False, "evalRows": 0,
        }  # fmt: skip
        nodes = Nodes()
        try:
            nodes.want(2)
            with paced(resize_seconds=5):
                run = Run(schema.parse(Settings, values))
                run.hears("step   60/")
                gone = time.time()
                nodes.lose(nodes.with_workers()[-1])
                print(_gap(run, "node lost, 2 -> 1", gone, "failed"), flush=True)  # noqa: T201
                nodes.want(2)
                at, said = run.hears("there is room for 2 workers")
                print(_gap(run, "node added, 1 -> 2", at, None), flush=True)  # noqa: T201
                nodes.drain(nodes.with_workers()[-1], 20)
                drained = time.time()
                at, said = run.hears("is being taken away")
                print(f"{'notice seen and saved':<28}{at - drained:6.1f} s   {said}", flush=True)  # noqa: T201
                print(_gap(run, "node drained, 2 -> 1", drained + 20, None) + " (from the deadline on)", flush=True)  # noqa: T201
                run.ends()
            print(flush=True)  # noqa: T201
            for when, line in run.said:
                if not line.startswith((BEGUN, "step ")):
                    print(f"{when - run.said[0][0]:6.1f} s  {line}", flush=True)  # noqa: T201
            print(flush=True)  # noqa: T201
            for attempt in read_run(place(f"{folder}/r"))[0]["attempts"]:
                print({key: attempt[key] for key in ("number", "outcome", "worldSize", "startStep", "endStep", "reason")}, flush=True)  # noqa: T201
        finally:
            nodes.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
