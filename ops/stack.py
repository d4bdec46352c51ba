"""The stack as an object: the commands' verbs as functions with typed results. Nothing here prints.

Raises BadInput for what can't be right, Busy where another operation runs, Refused (and EngineFailed) where AWS, Kubernetes, Ray or the engine
says no, each with one sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import config
import prices
from ops import cost, drill, follow, job_log, kube, prove, runs, state, target, trouble, why
from ops import leftovers as left
from ops.aws import Aws, AwsError
from ops.engine import Engine, EngineFailed, Listener
from ops.errors import BadInput, Busy, Refused
from ops.inside import POLL_SECONDS, Inside, Job, Say, Submission, silent
from ops.of_account import OfAccount
from ops.ray_jobs import NoSuchJob
from training import faults
from workloads import job as job_builder
from workloads.build import settings_of
from workloads.kuberay import pod_labels, release_name
from workloads.manifests import Workers
from workloads.storage import run_storage

# What AWS needs to give back interfaces and the like.
RETRY_SECONDS = (30, 60, 120)
# The operator names a job within seconds; a job that is stopped gets a moment to end by itself.
NAMED_SECONDS, STOPPED_SECONDS = 60, 60

# A leg of a proof is short; one that takes longer than this is stuck.
PROOF_SECONDS = 1800


@dataclasses.dataclass(frozen=True)
class Update:
    """What an `up` did. changes: resources by what was done (create, update, delete, same). usd_hour: None where nothing is billed here."""

    stack: str
    seconds: float
    changes: Mapping[str, int]
    outputs: Mapping[str, Any]
    usd_hour: float | None
    prices_as_of: str | None
    without_price_of: tuple[str, ...]
    stops_at: str | None


@dataclasses.dataclass(frozen=True)
class Gone:
    """What a `down` did. forgotten: objects taken out of the state because their cluster is gone. up_since: when the first resource was made.

    receipt, leftovers: None on a cluster of yours, which AWS does not bill, and where AWS could not be asked (``problems`` says why).
    """

    stack: str
    seconds: float
    changes: Mapping[str, int]
    stopped_job: str | None
    forgotten: tuple[str, ...]
    retries: int
    up_since: datetime.datetime | None
    kept_bucket: str | None
    receipt: cost.Spent | None = None
    leftovers: left.Found | None = None
    problems: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether nothing is left that bills, and that is known: what could not be asked proves nothing."""
        return not self.problems and (self.leftovers is None or self.leftovers.clean)


@dataclasses.dataclass(frozen=True)
class Status:
    """A stack at a glance. state: down, up, or partial (the last operation did not end well). usd: list price of all its nodes since ``up_since``."""

    stack: str
    state: str
    last_operation: str | None
    up_since: datetime.datetime | None
    usd_hour: float | None
    usd_so_far: float | None
    stops_at: datetime.datetime | None
    job: Job | None
    progress: job_log.Progress | None
    notes: tuple[str, ...] = ()


class Stack(OfAccount):
    """The stack ``name`` of the program in ``folder`` (this checkout's). Raises BadInput where its file is missing or wrong."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.target = target.read(name, folder)
        self.name = name
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = Engine(self.target)
        return self._engine

    # ---- up and down

    def up(self, listener: Listener | None = None, refresh: bool = False) -> Update:
        """Makes what the stack file says, and returns when it is there. It does not wait for a training job.

        A node group that failed to be created is made anew: an update would not repair it.
        """
        resources = self.engine.resources() or []
        self._right_account(resources)
        broken = [str(found["urn"]) for found in resources if state.failed_group(found)]
        done = self.engine.up(listener, replace=broken, refresh=refresh)
        outputs = self.engine.outputs() or {}
        price = outputs.get("costPerHour") or {}
        return Update(
            stack=self.name,
            seconds=done.seconds,
            changes=done.changes,
            outputs=outputs,
            usd_hour=price.get("usd"),
            prices_as_of=price.get("pricesAsOf"),
            without_price_of=tuple(price.get("withoutPriceOf") or ()),
            stops_at=outputs.get("stopsAt"),
        )

    def down(self, listener: Listener | None = None, *, cluster_gone: bool = False, note: Say = silent, sleep: Callable[[float], None] = time.sleep) -> Gone:
        """Stops the job, asks what is really there, and removes it all; tries again what AWS refuses only for now.

        cluster_gone: the Kubernetes cluster does not exist any more, so its objects are only taken out of the state. For an EKS cluster AWS says so;
        for one of yours only you know.
        """
        began = time.monotonic()
        resources = self.engine.resources() or []
        since = state.up_since(resources)
        outputs = self._known(resources)
        if not state.real(resources):
            return self._looked_after(Gone(self.name, time.monotonic() - began, {}, None, (), 0, since, None), None, note)
        self._right_account(resources)
        before = self._spent(note)
        stopped, forgotten = None, []
        if any(str(found["type"]).startswith("kubernetes:") for found in resources):
            gone = cluster_gone or self._cluster_is_gone(outputs)
            if gone:
                note("the Kubernetes cluster is gone: its objects are taken out of the state")
                forgotten = self.engine.forget(state.of_kubernetes)
            else:
                stopped = self._stop_before_down(outputs, note)
        note("asking what is really there")
        self.engine.refresh(listener)
        changes: dict[str, int] = {}
        retries = 0
        for pause in (*RETRY_SECONDS, None):
            try:
                changes = dict(self.engine.destroy(listener).changes)
                break
            except EngineFailed as error:
                if pause is None or not trouble.retryable(error.texts):
                    raise
                retries += 1
                note(f"{error.args[0].split(' (all that')[0]}. Trying again in {pause} s")
                sleep(pause)
        kept = outputs.get("bucket") if self.target.settings.storage.on_destroy == "keep" and not self.target.settings.storage.bucket else None
        done = Gone(self.name, time.monotonic() - began, changes, stopped, tuple(forgotten), retries, since, str(kept) if kept else None)
        return self._looked_after(done, before, note)

    def _right_account(self, resources: Sequence[Mapping[str, Any]]) -> None:
        """Raises BadInput where these credentials are of another account than the stack's: there nothing of it exists, and a refresh would forget it all."""
        home = state.account(resources)
        if home is None:
            return
        caller = self.target.aws().identity()["Account"]
        if caller != home:
            raise BadInput(f"stack {self.name} lives in account {home}, and these credentials are of {caller}; use the right AWS_PROFILE. Nothing was touched")

    def _spent(self, note: Say) -> cost.Spent | None:
        """What the stack has cost, asked while it is still there. A destroy does not wait for a bill that can't be had."""
        if self.target.settings.cluster.kind == "existing":
            return None
        note("what it has cost")
        try:
            return cost.so_far(self.target)
        except (Refused, BadInput) as error:
            note(f"there will be no receipt: {error}")
            return None

    def _looked_after(self, done: Gone, before: cost.Spent | None, note: Say) -> Gone:
        """With the receipt, and what AWS says is left."""
        if self.target.settings.cluster.kind == "existing":
            return done
        note("looking for what is left")
        receipt = None if before is None else cost.receipt(before, datetime.datetime.now(datetime.UTC))
        try:
            return dataclasses.replace(done, receipt=receipt, leftovers=left.find(self.target))
        except (Refused, BadInput) as error:
            return dataclasses.replace(done, receipt=receipt, problems=(f"whether anything is left is not known: {error}",))

    def _cluster_is_gone(self, outputs: Mapping[str, Any]) -> bool:
        try:
            kube.connect(self.target, outputs).get("/version")
        except kube.ClusterGone:
            return True
        except kube.NotThere:
            return False
        except kube.Unreachable as error:
            if self.target.settings.cluster.kind == "existing":
                raise kube.Unreachable(
                    f"{error}. If that cluster does not exist any more: `python -m ops down {self.name} --cluster-gone` takes its objects out of the state"
                ) from error
            raise
        return False

    def _stop_before_down(self, outputs: Mapping[str, Any], note: Say) -> str | None:
        if not outputs.get("trainingJob"):
            return None
        try:
            with self._inside(outputs) as inside:
                job = inside.job()
                if job is None or job.over or job.submission_id is None:
                    return None
                note(f"stopping job {job.name} ({job.state})")
                inside.ray().stop(job.submission_id)
                end = time.monotonic() + STOPPED_SECONDS
                while time.monotonic() < end and not inside.ray().get(job.submission_id).over:
                    time.sleep(POLL_SECONDS)
                return job.name
        except Refused as error:
            # The engine's own deletion stops it too, less gently.
            note(f"the job could not be stopped first ({error}); it is removed with the rest")
            return None

    # ---- the job

    def train(self, overrides: Sequence[str] = (), *, replace: bool = False, listener: Listener | None = None) -> Job:
        """Starts the training job with the stack file's settings and ``key=value`` overrides, which are written into the file; does not wait for its end.

        A job that runs with the same settings is returned as it is. One that runs with others is stopped only with ``replace`` (else Busy). A job that
        failed or was stopped is started again, and goes on from its last checkpoint.
        """
        values = {key: value for key, value in target.mapping(self.target.file).items() if str(key).startswith(f"{config.PROJECT}:")}
        before = dict(values.get(f"{config.PROJECT}:training") or {})
        after = {**config.override_training(before, overrides), "run": True}
        plain = {key.removeprefix(f"{config.PROJECT}:"): target.plain_secret(value) for key, value in values.items()}
        config.load({**plain, "training": after}, self.target.region)
        resources = self.engine.resources()
        self._right_account(resources or [])
        known = self._known(resources or [])
        running, removed = None, False
        if known.get("trainingJob"):
            with self._inside(known) as inside:
                running = inside.job()
                removed = running is None
        if running is not None and not running.over:
            if after == {**before, "run": True}:
                return running
            if not replace:
                raise Busy(
                    f"job {running.name} is {running.state} with other settings; `python -m ops cancel {self.name}` stops it, or --replace does so"
                    " and starts this one"
                )
        if after != before:
            if resources is None:
                self.engine.make()
            self.engine.set_object("training", after)
        self.target = target.read(self.name, self.target.file.parent)
        failed = running is not None and running.state in ("FAILED", "STOPPED")
        again = [str(found["urn"]) for found in resources or [] if failed and state.is_job(found)]
        self.engine.up(listener, replace=again, refresh=removed)
        outputs = self.engine.outputs() or {}
        with self._inside(outputs) as inside:
            end = time.monotonic() + NAMED_SECONDS
            while True:
                job = inside.job()
                if job is None:
                    raise Refused(f"the update ended without a training job; look at ray-train-efa:training in {self.target.file}")
                if job.submission_id or time.monotonic() > end:
                    same = running is not None and job.submission_id == running.submission_id
                    return dataclasses.replace(job, new=not same)
                time.sleep(POLL_SECONDS)

    def job(self) -> Job | None:
        """The training job as Ray tells it now; None where there is none."""
        with self._inside(self._up()) as inside:
            return inside.job()

    def logs(self, say: Say, *, follow_on: bool = False, note: Say = silent) -> Job:
        """Says the job's log; with ``follow_on`` until the job has ended, over broken connections. Returns the job at its end, as Ray tells it."""
        with self._inside(self._up()) as inside:
            job = inside.waited_for(follow_on, note)
            if job.submission_id is None:
                return job
            try:
                if not follow_on:
                    say(inside.ray().log(job.submission_id))
                    return inside.job() or job
                ended = follow.follow(inside.ray(), job.submission_id, say, note)
            except NoSuchJob as error:
                # The head was replaced: Ray forgot the job, the RayJob did not.
                return inside.end_without_ray(job, note, str(error))
            return dataclasses.replace(job, state=ended.state, message=ended.message, exit_code=ended.exit_code, ended=state.at(ended.ended))

    def wait(self, note: Say = silent) -> Job:
        """Waits for the job's end."""
        return self.logs(silent, follow_on=True, note=note)

    def cancel(self, note: Say = silent) -> Job:
        """Stops the job and waits until it is stopped. What it has written stays; :meth:`train` goes on from its last checkpoint."""
        with self._inside(self._up()) as inside:
            job = inside.job()
            if job is None:
                raise BadInput(f"stack {self.name} has no training job")
            if job.over:
                return job
            if job.submission_id is None or job.state == "WAITING":
                # Its submitter would be made anew by the operator; without the RayJob there is nothing to submit. `train` makes it again.
                inside.delete_job(job.name)
                return dataclasses.replace(job, state="STOPPED", message="stopped before Ray had it")
            inside.ray().stop(job.submission_id)
            note(f"stopping {job.name}")
            end = time.monotonic() + 3 * STOPPED_SECONDS
            while time.monotonic() < end:
                found = inside.ray().get(job.submission_id)
                if found.over:
                    return dataclasses.replace(job, state=found.state, message=found.message, exit_code=found.exit_code, ended=state.at(found.ended))
                time.sleep(POLL_SECONDS)
            raise Refused(f"job {job.name} was asked to stop and still runs after {3 * STOPPED_SECONDS} s; `python -m ops explain {self.name}`")

    # ---- the proof

    def prove(self, *, rounds: int = 2, steps: int = 40, curve: bool = True, note: Say = silent) -> prove.Proof:
        """Runs the short jobs of a proof, one after the other, on the stack's Ray cluster: see :mod:`ops.prove`. The training job's settings are the stack's.

        Raises Busy while a training job runs, BadInput where the stack file names no data or model.
        """
        training = self._settings_for_a_run()
        with self.engine.lock("prove"), self.inside() as inside:
            self._refuse_beside_a_job(inside, "proof")
            workers = inside.workers()
            base = settings_of(self.target.settings, training, workers, inside.storage)
            code = job_builder.source_files(self.target.file.parent / "training")
            began = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"
            results: list[prove.Result] = []
            for number, leg in prove.legs(workers.efa > 0, rounds):
                run = f"prove-{began}-{number}-{leg.name}"
                note(f"round {number} of {rounds}: {leg.name} ({steps} steps, must {'pass' if leg.must == prove.PASS else 'be refused'})")
                made = self._short_job(
                    inside, workers, training, prove.settings_of(leg, base, steps, run), code, {**config.nccl_environment(leg.transport), **leg.environment}
                )
                job, log = inside.run_to_the_end(run, made)
                results.append(prove.judged(leg, number, job, log))
                note(f"  {'as it must' if results[-1].held else 'NOT as it must'}: {results[-1].said}")
                if leg == prove.TCP and workers.gpus and results[-1].held:
                    results.append(inside.tcp_judged_as_efa(run, number, workers))
            curves = []
            for transport in (("efa", "tcp") if workers.efa else ("tcp",)) if curve else ():
                note(f"all-reduce over {transport}")
                environment = config.nccl_environment(transport)
                files = {
                    "all_reduce.py": prove.CURVE.read_text(encoding="utf-8"),
                    "curve.json": json.dumps({"environment": environment, "mostBytes": 2**30 if workers.gpus else 2**24}),
                }
                run = f"all-reduce-{began}-{transport}"
                job, log = inside.run_to_the_end(run, ("timeout 1800 python all_reduce.py", {}, files))
                curves.append(prove.curve_of(log, transport))
            return prove.proof(self.name, results, curves, workers.efa > 0)

    def drill(self, kinds: Sequence[str], *, steps: int = 200, seed: int = 0, away: float = 60, note: Say = silent) -> list[faults.Toll]:
        """What each fault of ``kinds`` costs a short job of ``steps`` steps: see :mod:`ops.drill`. The table goes into the undisturbed run's record, too.

        away: seconds without the store. Raises Busy while a training job runs, BadInput where the stack file names no data or model.
        """
        training = self._settings_for_a_run()
        with self.engine.lock("drill"), self.inside() as inside:
            self._refuse_beside_a_job(inside, "drill")
            workers = inside.workers()
            base = settings_of(self.target.settings, training, workers, inside.storage)
            code = job_builder.source_files(self.target.file.parent / "training")
            began = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"
            calm, struck, found = f"drill-{began}-none", {}, []
            for kind in (None, *kinds):
                run = f"drill-{began}-{kind}" if kind else calm
                settings = drill.settings_of(base, steps, run)
                at = faults.strike_at(steps, settings["checkpointEvery"], seed, kind) if kind else 0
                note(f"{faults.MEANINGS[kind]}, after step {at}" if kind else f"undisturbed: {steps} steps")
                made = self._short_job(inside, workers, training, settings, code, config.nccl_environment(training.transport))
                drill.leg(inside, kind, at, run, made, seed, away, note)
                if kind is None:
                    continue
                struck[kind] = (run, at)
                found = drill.tolls(inside, lambda name: runs.read(self.target, inside, name, self.name), calm, struck)
                note("  " + ("ended as the undisturbed run did" if found[-1].survived else f"did NOT: {found[-1].outcome}; {found[-1].said}"))
                drill.note_in(inside, calm, {"drill": faults.as_json(found)})
            return found

    def _refuse_beside_a_job(self, inside: Inside, what: str) -> None:
        running = inside.job()
        if running is not None and not running.over:
            raise Busy(f"job {running.name} is {running.state}, and a {what} needs all workers; wait, or `python -m ops cancel {self.name}`")

    def _settings_for_a_run(self) -> config.Training:
        values = {
            key.removeprefix(f"{config.PROJECT}:"): target.plain_secret(value)
            for key, value in target.mapping(self.target.file).items()
            if str(key).startswith(f"{config.PROJECT}:")
        }
        return config.load({**values, "training": {**(values.get("training") or {}), "run": True}}, self.target.region).training

    def _short_job(
        self, inside: Inside, workers: Workers, training: config.Training, settings: Mapping[str, Any], code: Mapping[str, str], environment: Mapping[str, str]
    ) -> Submission:
        """Entry point, runtime environment and files of a job, as the stack's own RayJob would have them."""
        made = job_builder.Job(
            cluster=inside.ray_cluster,
            pods="",  # decides the name alone, and these jobs have names of their own
            image=self.target.settings.image,
            ranks=workers.ranks,
            settings=settings,
            code=code,
            environment={**training.environment, **environment},
            pip=training.pip,
            deadline=PROOF_SECONDS,
            on_eks=self.target.settings.cluster.kind == "create",
        )
        spec = job_builder.ray_job(made)
        runtime = json.loads(spec["runtimeEnvYAML"])
        return str(spec["entrypoint"]), {key: value for key, value in runtime.items() if key not in ("working_dir", "excludes")}, made.files

    # ---- looking

    def status(self) -> Status:
        """State, cost and progress. What can't be asked is a note, not an error."""
        now = datetime.datetime.now(datetime.UTC)
        notes: list[str] = []
        resources = self.engine.resources()
        if resources is None:
            return Status(self.name, "down", None, None, None, None, None, None, None, ("the engine knows no such stack yet",))
        outputs = self._known(resources)
        last = self.engine.last_update() or {}
        operation = f"{last['kind']} {last['result']} {last.get('endTime') or last.get('startTime')}" if last else None
        if not state.real(resources):
            return Status(self.name, "down", operation, None, None, None, None, None, None)
        since = state.up_since(resources)
        usd_hour = self._usd_hour(outputs)
        job = progress = None
        try:
            with self._inside(outputs) as inside:
                job = inside.job()
                if job is not None and job.submission_id:
                    with contextlib.suppress(NoSuchJob):
                        progress = job_log.read(inside.ray().log(job.submission_id))
        except (Refused, BadInput) as error:
            notes.append(str(error))
        return Status(
            stack=self.name,
            state="up" if last.get("result") == "succeeded" else "partial",
            last_operation=operation,
            up_since=since,
            usd_hour=usd_hour,
            usd_so_far=None if usd_hour is None or since is None else usd_hour * (now - since).total_seconds() / 3600,
            stops_at=state.stop_time(outputs.get("stopsAt")),
            job=job,
            progress=progress,
            notes=tuple(notes),
        )

    def explain(self) -> why.Why:
        """Why the job is not running, in one sentence."""
        resources = self.engine.resources()
        outputs = self._known(resources or [])
        if not outputs.get("rayCluster"):
            last = self.engine.last_update() if resources is not None else None
            if last and last.get("result") in ("failed", "in-progress"):
                return self._filled(
                    why.Why(
                        "half-up",
                        f"the stack is half made: its last {last['kind']} {'failed' if last['result'] == 'failed' else 'still runs or was killed'}",
                        "`python -m ops up STACK` goes on, and says what fails",
                    )
                )
            return self._filled(why.Why("down", "the stack is not up", "`python -m ops up STACK` makes it"))
        try:
            with self._inside(outputs) as inside:
                return self._filled(why.explain(self._facts(inside, outputs)), inside.namespace)
        except kube.ClusterGone as error:
            return self._filled(why.Why("cluster-gone", str(error), "`python -m ops down STACK`"))
        except kube.Unreachable as error:
            return self._filled(why.Why("unreachable", str(error), "`python -m ops status STACK`; for EKS: cluster.publicAccessCidrs and your network"))

    def _filled(self, found: why.Why, namespace: str = "") -> why.Why:
        text = found.do.replace("STACK", self.name).replace("NAMESPACE", namespace).replace("OPERATOR", release_name(self.target.prefix))
        return dataclasses.replace(found, do=text)

    def _facts(self, inside: Inside, outputs: Mapping[str, Any]) -> why.Facts:
        core, name = f"/api/v1/namespaces/{inside.namespace}", inside.ray_cluster
        pods = inside.kube.items(f"{core}/pods")
        mine = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get("ray.io/cluster") == name]
        operator_labels = pod_labels(name)
        operator = [pod for pod in pods if operator_labels.items() <= (pod["metadata"].get("labels") or {}).items()]
        job_name = outputs.get("trainingJob")
        submitter = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get("batch.kubernetes.io/job-name") == job_name]
        job, state, message, last = None, None, "", ""
        if job_name:
            job = inside.optional(f"/apis/ray.io/v1/namespaces/{inside.namespace}/rayjobs/{job_name}")
            found = inside.job()
            if found is not None:
                state, message = (None if found.state == "WAITING" else found.state), found.message
                if found.state == "RUNNING" and found.submission_id:
                    with contextlib.suppress(Refused):
                        last = job_log.read(inside.ray().log(found.submission_id)).last_line
        deployment = inside.optional(f"/apis/apps/v1/namespaces/{inside.namespace}/deployments/{release_name(name)}")
        groups, activities = self._node_groups(outputs)
        return why.Facts(
            now=datetime.datetime.now(datetime.UTC),
            job=job,
            cluster=inside.optional(f"/apis/ray.io/v1/namespaces/{inside.namespace}/rayclusters/{name}"),
            pods=[*mine, *[pod for pod in submitter if pod not in mine]],
            operator=operator,
            operator_wanted=None if deployment is None else int((deployment.get("spec") or {}).get("replicas", 1)),
            events=inside.kube.items(f"{core}/events"),
            nodes=inside.kube.items("/api/v1/nodes"),
            groups=groups,
            activities=activities,
            daemons=inside.kube.items("/apis/apps/v1/namespaces/kube-system/daemonsets"),
            ray_state=state,
            ray_message=message,
            last_line=last,
        )

    def _node_groups(self, outputs: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """EKS node groups and their newest scaling activities; nothing on a cluster that is not ours, or where the rights to ask are missing."""
        name = outputs.get("clusterName")
        if not name:
            return [], []
        aws = Aws(str(outputs.get("region")), self.target.profile)
        groups: list[dict[str, Any]] = []
        activities: list[dict[str, Any]] = []
        try:
            names = list(aws.pages("eks", "list_nodegroups", "nodegroups", clusterName=name))
            groups += [aws.ask("eks", "describe_nodegroup", clusterName=name, nodegroupName=group)["nodegroup"] for group in names]
            for group in groups:
                for asg in (group.get("resources") or {}).get("autoScalingGroups") or []:
                    activities += aws.ask("autoscaling", "describe_scaling_activities", AutoScalingGroupName=asg["name"], MaxRecords=20)["Activities"]
        except AwsError as error:
            if error.kind != "denied":
                raise
        return groups, activities

    # ---- inside

    def _up(self) -> dict[str, Any]:
        known = self._known(self.engine.resources() or [])
        if not known.get("rayCluster"):
            raise BadInput(f"stack {self.name} is not up: `python -m ops up {self.name}` makes it")
        return known

    def _known(self, resources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The outputs; while an `up` is under way, or after one that failed, what follows from the names and the state so far."""
        outputs = state.outputs(resources)
        existing = self.target.settings.cluster.kind == "existing"
        cluster = any(found["type"] == "aws:eks/cluster:Cluster" for found in resources)
        if cluster:
            outputs = {"clusterName": self.target.prefix, "region": self.target.region, **outputs}
        if cluster or any(str(found["type"]).startswith("kubernetes:") for found in resources):
            outputs = {"namespace": self.target.prefix if existing else config.NAMESPACE, "rayCluster": self.target.prefix, **outputs}
        job = next((found for found in resources if state.is_job(found)), None)
        name = ((job or {}).get("outputs") or {}).get("metadata", {}).get("name")
        return {**outputs, "trainingJob": name} if name else outputs

    @contextlib.contextmanager
    def inside(self) -> Iterator[Inside]:
        """What runs in the stack's Kubernetes. Raises BadInput where the stack is not up."""
        with self._inside(self._up()) as found:
            yield found

    @contextlib.contextmanager
    def _inside(self, outputs: Mapping[str, Any]) -> Iterator[Inside]:
        settings = self.target.settings
        storage = run_storage(settings).uri if settings.cluster.kind == "existing" else f"s3://{outputs.get('bucket')}/{settings.storage.prefix}"
        yield Inside(
            kube=kube.connect(self.target, outputs),
            namespace=str(outputs.get("namespace")),
            ray_cluster=str(outputs.get("rayCluster")),
            job_name=outputs.get("trainingJob"),
            storage=str(settings.training.settings.get("storage") or storage),
            usd_hour=self._usd_hour(outputs),
        )

    def _usd_hour(self, outputs: Mapping[str, Any]) -> float | None:
        if self.target.settings.cluster.kind == "existing":
            return None
        told = (outputs.get("costPerHour") or {}).get("usd")
        return float(told) if told is not None else prices.hourly(self.target.settings, str(self.target.region), prices.table()).usd_hour
