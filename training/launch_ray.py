"""Runs the job under Ray Train: on a Ray of its own on this machine, or on the cluster that RAY_ADDRESS names."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError
from ray.util.metrics import Gauge
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from training import schema, worker
from training.errors import EXIT_BAD_INPUT, EXIT_TRAINING_FAILED, EXIT_TRANSPORT_NOT_PROVEN, BadInput, JobError, TrainingFailed, TransportNotProven
from training.settings import Settings
from training.world import backend, look_around

# Ten to twenty seconds without an answer: longer than a network's hiccup, shorter than Ray's own patience.
GUARD_SECONDS, GUARD_FAILURES = 2.0, 5
HEAD_LOST = "the Ray head was lost (its pod or its node was stopped); start the same job again to go on from the last checkpoint"


@contextlib.contextmanager
def connected(cpus_wanted: int, say: Callable[[str], None]) -> Iterator[None]:
    """A Ray to run on. One that is started here listens on this machine only, has no dashboard, and ends with the block."""
    # Worker output reaches the person through `say`; Ray's own copy of it would print every line twice, behind a prefix.
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a Ray warning about GPU-less tasks that means nothing here
    if ray.is_initialized():
        yield
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        cores = os.cpu_count() or 1
        if cpus_wanted > cores:
            say(f"{cpus_wanted} worker CPUs share this machine's {cores}: it works, but not faster")
        ray.init(address="local", num_cpus=max(cores, cpus_wanted), include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


def _put(lines: Queue, text: str) -> None:
    """Hands ``text`` to the terminal. A terminal that is gone is no reason to lose a run: its line then goes to Ray's log of this process."""
    try:
        lines.put(text)
    except ray.exceptions.RayError as error:
        print(f"{text} (not shown to the person: {_one_line(error)})", file=sys.stderr)  # noqa: T201


class _TellsOfRestarts(UserCallback):
    """Runs in Ray Train's controller: a person wants to know that a worker was lost, before the run goes on without a word."""

    def __init__(self, lines: Queue) -> None:
        self.lines = lines

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for rank, error in sorted(worker_exceptions.items())[:1]:
            _put(
                self.lines,
                f"worker {rank} failed ({_one_line(error)}); the others are stopped, and the run goes on from its last checkpoint if restarts are left",
            )


def run(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs to the end and returns rank 0's summary. Raises JobError."""
    with connected(settings.workers * settings.cpus_per_worker, say):
        use_gpu = settings.device == "cuda" or (settings.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)  # type: ignore[no-untyped-call]
        # On the driver's own node: on a worker's it would be lost with that node, and the run with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        lines = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        # Ray's own bookkeeping of this launch; checkpoints and results are in the run's folder, and resuming needs nothing of Ray's.
        with tempfile.TemporaryDirectory(prefix="ray-train-") as scratch, _spoken(lines, say):
            trainer: Any = TorchTrainer(
                _rank,  # type: ignore[arg-type]
                train_loop_config={"settings": schema.as_mapping(settings), "lines": lines},
                scaling_config=ScalingConfig(
                    num_workers=settings.workers,
                    use_gpu=use_gpu,
                    resources_per_worker={"CPU": settings.cpus_per_worker, **({"GPU": 1} if use_gpu else {})},
                ),
                torch_config=TorchConfig(backend=backend("cuda" if use_gpu else "cpu"), timeout_s=settings.collective_timeout),
                run_config=RunConfig(
                    name=f"{time.time_ns()}",
                    storage_path=scratch,
                    failure_config=FailureConfig(max_failures=settings.max_failures),
                    callbacks=[_TellsOfRestarts(lines)],  # type: ignore[list-item]
                ),
            )
            try:
                answer: Any = trainer.fit().return_value
            except WorkerGroupError as error:
                raise _failure(error.worker_failures, settings) from error
            except TrainingFailedError as error:
                raise TrainingFailed(
                    f"Ray Train stopped the run: {_one_line(error)}; start the same command again to go on from the last checkpoint"
                ) from error
    if "error" in answer:
        raise _told(answer["error"]["exit_code"], answer["error"]["text"])
    return dict(answer["summary"])


def _rank(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = schema.parse(Settings, config["settings"])
    lines: Queue = config["lines"]
    gauges: dict[str, Gauge] = {}

    def on_metrics(values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in gauges:
                gauges[name] = Gauge(f"training_{name}", description=f"{name} of the running training job")
            gauges[name].set(value)

    def on_checkpoint(_step: int, metrics: Mapping[str, float]) -> None:
        # Only here: a report costs up to two seconds, the controller's polling interval, unless it is asynchronous.
        ray.train.report(dict(metrics), checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC)

    world = look_around(ray.train.torch.get_device())
    head = _head()
    hooks = worker.Hooks(functools.partial(_put, lines), on_metrics, on_checkpoint, functools.partial(_blame, head), functools.partial(_guard, head))
    try:
        return {"summary": worker.run_rank(settings, world, hooks)}
    except JobError as error:
        # Returned and not raised: what a person must mend would only fail again in Ray's restarts.
        return {"error": {"exit_code": error.exit_code, "text": str(error)}}


def _head() -> tuple[str, int]:
    """Where the head listens: the address and not the name, which soon belongs to a new head that knows nothing of this run."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return socket.gethostbyname(host), int(port)


def _blame(head: tuple[str, int]) -> str | None:
    """Without its head, whatever a worker asks of Ray fails, in words that tell of an actor or a peer."""
    return None if _listens(head) else HEAD_LOST


@contextlib.contextmanager
def _guard(head: tuple[str, int], lost: Callable[[str], None]) -> Iterator[None]:
    """Watches the head while this process trains. Ray ends the workers of a lost head half a minute later, and none could say why it ended."""
    over = threading.Event()

    def watch() -> None:
        failures = 0
        while not over.wait(GUARD_SECONDS):
            failures = 0 if _listens(head) else failures + 1
            if failures == GUARD_FAILURES:
                try:
                    lost(HEAD_LOST)
                finally:
                    os._exit(EXIT_TRAINING_FAILED)

    thread = threading.Thread(target=watch, name="guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _listens(address: tuple[str, int]) -> bool:
    """Whether the host still takes connections; the kernel of an overloaded one does."""
    try:
        socket.create_connection(address, timeout=GUARD_SECONDS).close()
    except OSError:
        return False
    return True


def _told(exit_code: int, text: str) -> JobError:
    if exit_code == EXIT_BAD_INPUT:
        return BadInput(text)
    return TransportNotProven(text) if exit_code == EXIT_TRANSPORT_NOT_PROVEN else TrainingFailed(text)


def _failure(failures: Mapping[int, BaseException], settings: Settings) -> TrainingFailed:
    rank, error = min(failures.items(), default=(-1, RuntimeError("no worker said why")))
    return TrainingFailed(
        f"worker {rank} failed: {_one_line(error)}. {settings.max_failures} restarts were allowed (maxFailures);"
        " start the same command again to go on from the last checkpoint"
    )


def _one_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, BaseException) else error
    lines = [line for line in str(shown).splitlines() if line.strip()]
    text = lines[0] if lines else type(shown).__name__
    return text if len(text) <= 300 else text[:297] + "..."


@contextlib.contextmanager
def _spoken(lines: Queue, say: Callable[[str], None]) -> Iterator[None]:
    """Says what workers put into ``lines``, as it comes, until the block ends; then the rest."""
    over = threading.Event()

    def listen() -> None:
        while True:
            try:
                say(lines.get(timeout=0.5))
            except Empty:
                if over.is_set():
                    return
            except ray.exceptions.RayError as error:
                print(f"progress can't be shown any more ({_one_line(error)}); the run itself goes on", file=sys.stderr)  # noqa: T201
                return

    thread = threading.Thread(target=listen, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=10)
        lines.shutdown()
