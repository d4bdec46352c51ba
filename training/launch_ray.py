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
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import ResizingState
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError
from ray.util.metrics import Gauge
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from training import schema, worker
from training.errors import (
    EXIT_BAD_INPUT,
    EXIT_TRAINING_FAILED,
    EXIT_TRANSPORT_NOT_PROVEN,
    BadInput,
    JobError,
    OneRankFailed,
    TrainingFailed,
    TransportNotProven,
)
from training.notice import Notice
from training.settings import Settings
from training.world import backend, look_around, prepare_allocator

# Between two looks at the head, and how long each waits for its answer: a first packet that is lost is sent again after a second.
GUARD_SECONDS, ANSWER_SECONDS = 0.5, 1.5
# Without any answer it is lost after ten seconds: longer than a network's hiccup, shorter than Ray's own patience. Where its kernel answers that
# nobody listens, the head has ended, and a new one may be there in five seconds: this node's raylet then ends, and every worker with it.
SILENT_SECONDS, REFUSED_SECONDS = 10.0, 1.5
# A notice is a drained node in Ray's tables; asking the head costs it one short query. Ray's own five seconds are a fifth of a grace time.
NOTICES = {"RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "2"}
# Only room that is there already is waited for: what Ray waits in vain is part of the gap.
ELASTIC = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20"}
# Between two looks for room for more workers: each growth costs a start of all of them.
RESIZE_SECONDS = 60.0
# How long a growth waits for the checkpoint it begins with, and how long the workers then wait to be ended.
SAVE_SECONDS, ENDED_SECONDS = 300.0, 30.0
# A silent node is counted for 15 s, a drained one until its workers are gone.
GOING_SECONDS = 20.0
# Ray waits as long for a drained node whose end nobody told (ray.train.v2._internal.constants.DEFAULT_PREEMPTION_DEADLINE_S).
UNTOLD_SECONDS = 120.0
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


class _Elasticity(ControllerCallback, WorkerGroupCallback):
    """Runs in Ray Train's controller, for two things that its elastic runs lose time and steps by."""

    def __init__(self) -> None:
        self.group: Any = None
        self.requester = ""

    def after_controller_start(self, train_run_context: Any) -> None:
        self.requester = f"train-{train_run_context.run_id}"  # as its scaling policy calls itself

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Ray counts a silent node for a quarter of a minute, and a run's share of the nodes anew every 20 s. A group of the old size would be
        waited for until the start times out, perhaps twice; so the count is made now, and such a group refused at once.
        """
        with contextlib.suppress(ray.exceptions.RayError):
            _wait_for_the_going()
            coordinator: Any = get_or_create_autoscaling_coordinator()  # type: ignore[no-untyped-call]
            ray.get(coordinator._tick.remote())
            if len(ray.get(coordinator.get_reserved_resources.remote(self.requester))) < worker_group_context.num_workers:
                raise WorkerGroupStartupTimeoutError(num_workers=worker_group_context.num_workers)

    def after_worker_group_start(self, worker_group: Any) -> None:
        self.group = worker_group

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """A healthy group is ended to start a larger one; what was done since the last checkpoint would be lost, so one is written first."""
        if not isinstance(current_state, ResizingState) or self.group is None:
            return
        # A run that can't answer (it is loading, or exporting its result) is resized all the same: that is Ray's decision.
        with contextlib.suppress(ray.exceptions.RayError):
            decision: Any = current_state.scaling_decision
            ray.get(self.group.execute_single_async(0, _save_first, decision.num_workers))


def _wait_for_the_going() -> None:
    """Returns when Ray counts no node that does not answer, or is drained and ends once its workers have; after GOING_SECONDS at the latest."""
    end = time.monotonic() + GOING_SECONDS
    while time.monotonic() < end:
        draining = ray._private.state.state.get_draining_nodes()
        there = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        if all(node["NodeID"] not in draining and _listens((node["NodeManagerAddress"], node["NodeManagerPort"])) for node in there):
            return
        time.sleep(0.5)


def run(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs to the end and returns rank 0's summary. Raises JobError."""
    elastic = settings.min_workers is not None
    if not _hears_of_notices():
        say(f"Ray {ray.__version__} tells its workers of no spot notice: a node that is taken away is a lost worker, and counts against maxFailures")
    with connected(settings.workers * settings.cpus_per_worker, say), _environment(_of_ray(settings)):
        use_gpu = settings.device == "cuda" or (settings.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)  # type: ignore[no-untyped-call]
        # On the driver's own node: on a worker's it would be lost with that node, and the run with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        lines = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        # Ray's own bookkeeping of this launch; checkpoints and results are in the run's folder, and resuming needs nothing of Ray's.
        with tempfile.TemporaryDirectory(prefix="ray-train-") as scratch, _spoken(lines, say):
            scaling: Any = ScalingConfig  # ray.train has the elastic one, and types it as the older one
            trainer: Any = TorchTrainer(
                _rank,  # type: ignore[arg-type]
                train_loop_config={"settings": schema.as_mapping(settings), "lines": lines},
                scaling_config=scaling(
                    num_workers=(settings.min_workers, settings.workers) if elastic else settings.workers,
                    elastic_resize_monitor_interval_s=RESIZE_SECONDS,
                    use_gpu=use_gpu,
                    resources_per_worker={"CPU": settings.cpus_per_worker, **({"GPU": 1} if use_gpu else {})},
                ),
                torch_config=TorchConfig(backend=backend("cuda" if use_gpu else "cpu"), timeout_s=settings.collective_timeout),
                run_config=RunConfig(
                    name=f"{time.time_ns()}",
                    storage_path=scratch,
                    failure_config=FailureConfig(max_failures=settings.max_failures),
                    callbacks=[_TellsOfRestarts(lines), *([_Elasticity()] if elastic else [])],  # type: ignore[list-item]
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

    prepare_allocator()
    world = look_around(ray.train.torch.get_device())
    head = _head()
    hooks = worker.Hooks(
        functools.partial(_put, lines),
        on_metrics=on_metrics,
        on_checkpoint=on_checkpoint,
        blame=functools.partial(_blame, head),
        guard=functools.partial(_guard, head),
        notice=_notice,
        saved=_saved,
    )
    try:
        return {"summary": worker.run_rank(settings, world, hooks)}
    except OneRankFailed:  # the others wait for this rank, and Ray ends them where one raises
        raise
    except JobError as error:
        # Returned and not raised: what a person must mend would only fail again in Ray's restarts.
        return {"error": {"exit_code": error.exit_code, "text": str(error)}}
    finally:
        _Heard.saved.set()  # a growth need not wait for what is over


class _Heard:
    """In a worker's process: what its controller wants and whether that is done; since when a preemption without a deadline is known."""

    growth: Notice | None = None
    saved = threading.Event()
    untold_since: float | None = None


def _save_first(workers: int) -> bool:
    """Called in rank 0's process, beside its training: asks that for a checkpoint and waits until it is complete; False: it was not in time."""
    _Heard.growth = Notice("resized", f"there is room for {workers} worker{'s' if workers > 1 else ''}")
    return _Heard.saved.wait(SAVE_SECONDS)


def _hears_of_notices() -> bool:
    """Ray has it from 2.58 on."""
    return hasattr(ray.train, "get_preemption_info")


def _notice() -> Notice | None:
    """A collective of all workers where Ray has word of preemptions."""
    told = ray.train.get_preemption_info() if _hears_of_notices() else None
    if told is None:
        return _Heard.growth
    ranks = ", ".join(map(str, told.preempted_ranks))
    which = f"worker {ranks}" if len(told.preempted_ranks) == 1 else f"workers {ranks}"
    _Heard.untold_since = _Heard.untold_since or time.time()
    deadline = _Heard.untold_since + UNTOLD_SECONDS if told.deadline_ms is None else told.deadline_ms / 1000
    return Notice("preempted", f"the node of {which} is being taken away", deadline)


def _saved(notice: Notice) -> None:
    """Ray ends the workers, at a preemption's deadline or now, to start more of them. They must not return: that would be a finished run."""
    if notice.outcome != "resized":
        return
    _Heard.saved.set()
    time.sleep(ENDED_SECONDS)  # nothing is trained that the larger group would do again
    _Heard.growth = None
    _Heard.saved.clear()


def _head() -> tuple[str, int]:
    """Where the head listens: the address and not the name, which soon belongs to a new head that knows nothing of this run."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return socket.gethostbyname(host), int(port)


def _blame(head: tuple[str, int]) -> str | None:
    """Without its head, whatever a worker asks of Ray fails, in words that tell of an actor or a peer."""
    return None if _listens(head) else HEAD_LOST


@contextlib.contextmanager
def _guard(head: tuple[str, int], lost: Callable[[str], None]) -> Iterator[None]:
    """Watches the head while this process trains. Ray ends the workers of a lost head soon after, and none could say why it ended."""
    over = threading.Event()

    def watch() -> None:
        answered, patience = time.monotonic(), SILENT_SECONDS
        while not over.wait(GUARD_SECONDS):
            error = _silence(head)
            if error is None:
                answered, patience = time.monotonic(), SILENT_SECONDS
                continue
            if isinstance(error, ConnectionRefusedError):
                patience = REFUSED_SECONDS  # for what follows too: the address itself is gone soon after
            if time.monotonic() - answered >= patience:
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
        thread.join()  # one that looks just now must not end the process that comes after


def _listens(address: tuple[str, int]) -> bool:
    return _silence(address) is None


def _silence(address: tuple[str, int]) -> OSError | None:
    """Why the host takes no connection; the kernel of an overloaded one does."""
    try:
        socket.create_connection(address, timeout=ANSWER_SECONDS).close()
    except OSError as error:
        return error
    return None


def _of_ray(settings: Settings) -> dict[str, str]:
    """What Ray Train reads from the environment, where it has no argument for it. Without a limit a rank that hangs would leave the others waiting."""
    always = {**NOTICES, "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": str(settings.collective_timeout)}
    return {**always, **ELASTIC} if settings.min_workers is not None else always


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """``values`` in this process's environment, which Ray Train hands on to its own, for the block; what is set already stays."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


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
    """The first line of what happened, and not of Ray's errors around it, which begin with what they are."""
    shown = error
    for around in ("controller_failure", "cause"):
        inside = getattr(shown, around, None)
        shown = inside if isinstance(inside, BaseException) else shown
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
