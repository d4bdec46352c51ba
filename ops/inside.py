"""The stack's namespace, Ray cluster and training job, seen through the Kubernetes API and Ray's job API."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Callable, Mapping
from typing import Any

from ops import follow, job_log, kube, prove, state
from ops.errors import EXIT_BAD_INPUT, EXIT_TRAINING_FAILED, EXIT_TRANSPORT_NOT_PROVEN, BadInput, Refused
from ops.kube import Kube
from ops.ray_jobs import ENDED, PORT, RayJob, RayJobs
from training.transport import evidence
from training.transport.verdict import Expectation, judge
from workloads.manifests import Workers

POLL_SECONDS = 2.0

Say = Callable[[str], None]
# Entry point, runtime environment, files of the working directory.
Submission = tuple[str, Mapping[str, Any], Mapping[str, str]]


def silent(_: str) -> None:
    """A library says nothing by itself."""


@dataclasses.dataclass(frozen=True)
class Job:
    """The training job. name: the RayJob's; submission_id: Ray's. state: WAITING (Ray does not have it yet), PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED.

    exit_code: of the job's own command. new: this call started it.
    """

    name: str
    submission_id: str | None
    state: str
    message: str = ""
    exit_code: int | None = None
    started: datetime.datetime | None = None
    ended: datetime.datetime | None = None
    new: bool = False

    @property
    def over(self) -> bool:
        return self.state in ENDED

    @property
    def code(self) -> int:
        """The exit code that the job's end means for a command: 0, 2 bad input, 3 failed or stopped, 4 transport not proven."""
        if self.state == "SUCCEEDED" or not self.over:
            return 0
        return self.exit_code if self.exit_code in (EXIT_BAD_INPUT, EXIT_TRANSPORT_NOT_PROVEN) else EXIT_TRAINING_FAILED


@dataclasses.dataclass
class Inside:
    """The stack's namespace, Ray cluster and training job, seen through the Kubernetes API. storage: where runs go, as the pods name it."""

    kube: Kube
    namespace: str
    ray_cluster: str
    job_name: str | None
    storage: str
    usd_hour: float | None
    _ray: RayJobs | None = None

    def optional(self, path: str) -> dict[str, Any] | None:
        try:
            return self.kube.get(path)
        except kube.NotThere:
            return None

    def head(self) -> str:
        """The name of the head's pod. Raises Refused where none runs."""
        selector = f"ray.io/cluster={self.ray_cluster},ray.io/node-type=head"
        pods = self.kube.items(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=selector)
        for pod in pods:
            if (pod.get("status") or {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp"):
                return str(pod["metadata"]["name"])
        raise Refused("the Ray head is not running; `python -m ops explain` says why")

    def in_head(self, command: list[str]) -> str:
        """What a command in the head's container prints."""
        return self.kube.run(self.namespace, self.head(), "ray-head", command)

    def workers(self) -> Workers:
        """The worker pods' share, as the RayCluster says it."""
        spec = self.kube.get(f"/apis/ray.io/v1/namespaces/{self.namespace}/rayclusters/{self.ray_cluster}")["spec"]["workerGroupSpecs"][0]
        limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
        count = {name: int(limits.get(name, 0)) for name in ("nvidia.com/gpu", "vpc.amazonaws.com/efa")}
        most = int(spec["maxReplicas"])
        return Workers(
            least=int(spec["minReplicas"]), most=most, cpu=1, memory=str(limits["memory"]), gpus=count["nvidia.com/gpu"], efa=count["vpc.amazonaws.com/efa"]
        )

    def run_to_the_end(self, submission_id: str, made: Submission) -> tuple[RayJob, str]:
        """Submits a job, waits for its end and returns it with its log. Stopped where this process is."""
        jobs = self.ray()
        jobs.submit(submission_id, *made)
        try:
            ended = follow.follow(jobs, submission_id, silent)
        except BaseException:
            with contextlib.suppress(Refused):
                jobs.stop(submission_id)
            raise
        return ended, jobs.log(submission_id)

    def tcp_judged_as_efa(self, run: str, number: int, workers: Workers) -> prove.Result:
        """What the gate makes of a run over sockets that claims to be over EFA: NCCL's own words of every rank, judged again."""
        selector = f"ray.io/cluster={self.ray_cluster},ray.io/node-type=worker"
        texts: list[str] = []
        for pod in self.kube.items(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=selector):
            name = str(pod["metadata"]["name"])
            texts.append(self.kube.run(self.namespace, name, "ray-worker", ["sh", "-c", 'cat /tmp/nccl-logs-*/nccl."$0".attempt-1.rank-*.log', run]))
        verdict = judge(evidence.read_text("\n".join(texts), run), Expectation("efa", hosts=workers.most, ranks=workers.ranks), run=run)
        said = f"{verdict.line()}" + (f"; {verdict.reasons[0].where}: {verdict.reasons[0].saw}" if verdict.reasons else "")
        return prove.Result("tcp, claimed efa", number, run, prove.REFUSE, verdict.outcome == "fail", verdict.observed, verdict.outcome, None, None, said)

    def run_name(self) -> str | None:
        """The name of the run that the training job works on; None before it said so."""
        job = self.job()
        if job is None or job.submission_id is None:
            return None
        return job_log.read(self.ray().log(job.submission_id)).run

    def ray(self) -> RayJobs:
        """Ray's job API. The head is looked up at each connection, for it may have been replaced."""
        if self._ray is None:
            token = kube.ray_token(self.kube, self.namespace, self.ray_cluster)
            self._ray = RayJobs(lambda: self.kube.forward(self.namespace, self.head(), PORT), token)
        return self._ray

    def job(self) -> Job | None:
        """The training job: Ray's word where Ray has one, else the RayJob's."""
        if not self.job_name:
            return None
        found = self.optional(f"/apis/ray.io/v1/namespaces/{self.namespace}/rayjobs/{self.job_name}")
        if found is None:
            return None
        status = found.get("status") or {}
        job = Job(
            name=str(self.job_name),
            submission_id=status.get("jobId") or None,
            state=status.get("jobStatus") or ("FAILED" if status.get("jobDeploymentStatus") in ("Failed", "ValidationFailed") else "WAITING"),
            message=str(status.get("message") or status.get("reason") or ""),
            started=state.time_of(status.get("startTime")),
            ended=state.time_of(status.get("endTime")),
        )
        if job.submission_id is None:
            return job
        try:
            own = self.ray().get(job.submission_id)
        except Refused:
            return job
        return dataclasses.replace(
            job,
            state=own.state,
            message=own.message,
            exit_code=own.exit_code,
            started=state.at(own.started) or job.started,
            ended=state.at(own.ended) or job.ended,
        )

    def waited_for(self, patient: bool, note: Say) -> Job:
        """The job once Ray has it; without patience as it is. Raises BadInput where there is none."""
        began, told = time.monotonic(), 0.0
        while True:
            job = self.job()
            if job is None:
                raise BadInput("there is no training job: `python -m ops train` starts one")
            if not patient or job.over or (job.submission_id and job.state != "WAITING"):
                return job
            if time.monotonic() - told > 30:
                told = time.monotonic()
                note(f"waiting for Ray to take the job since {told - began:.0f} s (`python -m ops explain` says what it waits for)")
            time.sleep(POLL_SECONDS)

    def end_without_ray(self, job: Job, note: Say, reason: str) -> Job:
        """Waits for the RayJob's own end, where Ray has forgotten the job."""
        note(f"{reason}; waiting for the operator's word")
        end = time.monotonic() + follow.GIVE_UP_SECONDS
        while time.monotonic() < end:
            found = self.optional(f"/apis/ray.io/v1/namespaces/{self.namespace}/rayjobs/{job.name}")
            status = (found or {}).get("status") or {}
            if found is None or status.get("jobDeploymentStatus") in ("Complete", "Failed") or status.get("jobStatus") in ENDED:
                state = status.get("jobStatus") if status.get("jobStatus") in ENDED else "FAILED"
                return dataclasses.replace(job, state=str(state), message=str(status.get("message") or reason))
            time.sleep(5)
        return dataclasses.replace(job, state="FAILED", message=f"{reason}; the Ray head was lost with the job. `python -m ops train` starts it again")

    def delete_job(self, job_name: str) -> None:
        """Removes the RayJob, which Ray does not have yet."""
        with contextlib.suppress(kube.NotThere):
            self.kube.ask("DELETE", f"/apis/ray.io/v1/namespaces/{self.namespace}/rayjobs/{job_name}")
