"""The submitter: a lost stream is taken up again, a lost head is the end, and a job is handed over once."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import types

import pytest

from workloads import submit


class Status(enum.Enum):
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclasses.dataclass
class Head:
    """A job API. answers: what it says of the job, one after the other, the last again and again. streams: what each log stream gives before it ends."""

    answers: list
    streams: list = dataclasses.field(default_factory=list)
    submitted: list = dataclasses.field(default_factory=list)

    def get_job_status(self, job):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def submit_job(self, **job):
        self.submitted.append(job)

    async def tail_job_logs(self, job):
        chunks = self.streams.pop(0) if self.streams else []
        for chunk in chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk


NO_JOB = RuntimeError("Request failed with status code 404: Job x does not exist.")
AWAY = ConnectionError("no route to host")


def followed(head, **how):
    shown = []
    code, last = asyncio.run(submit.follow(head, "x", shown.append, every=0.001, **how))
    return code, last, "".join(shown)


@pytest.mark.parametrize("end", [Status.SUCCEEDED, Status.FAILED])
def test_a_job_is_followed_to_its_end_whose_outcome_is_rays_to_tell(end):
    code, last, shown = followed(Head([Status.RUNNING, Status.RUNNING, end], [["one\n", "two\n"]]))
    assert (code, last, shown) == (0, f"Ray says: {end.value}", "one\ntwo\n")


def test_fr26_a_stream_that_ends_is_not_the_end_of_the_job_and_shows_nothing_twice():
    lost = RuntimeError("WebSocket connection closed unexpectedly with close code 1006")
    streams = [["one\n", "two\n", lost], ["one\ntwo\nth"], ["one\ntwo\n", "three\n", "four\n"]]
    running = [Status.RUNNING] * 12
    code, last, shown = followed(Head([*running, Status.SUCCEEDED], streams))
    assert (code, last, shown) == (0, "Ray says: SUCCEEDED", "one\ntwo\nthree\nfour\n")


def test_a_new_head_that_does_not_know_the_job_ends_it_with_the_reason():
    code, last, _ = followed(Head([Status.RUNNING, AWAY, AWAY, NO_JOB]))
    assert code == 1, "the operator sees a failed submission at once, and does not wait for a head that may not answer"
    assert "the Ray head was lost" in last


def test_a_head_that_stays_away_ends_the_job_with_the_reason():
    code, last, _ = followed(Head([Status.RUNNING, AWAY]), silent=0.05)
    assert code == 1
    assert "no answer" in last


def test_a_head_that_is_away_for_a_moment_is_not_lost():
    code, last, _ = followed(Head([Status.RUNNING, AWAY, AWAY, Status.RUNNING, Status.SUCCEEDED]), silent=30)
    assert (code, last) == (0, "Ray says: SUCCEEDED")


def test_a_job_is_handed_over_once():
    head = Head([NO_JOB])
    submit.hand_over(lambda: head, "x", "python -m training.job", {"working_dir": "/code"})
    assert head.submitted == [{"entrypoint": "python -m training.job", "submission_id": "x", "runtime_env": {"working_dir": "/code"}}]
    known = Head([Status.RUNNING])
    submit.hand_over(lambda: known, "x", "python -m training.job", {})
    assert known.submitted == [], "a submitter that was started twice"


def test_a_head_that_is_not_up_yet_is_waited_for():
    attempts = iter([AWAY, AWAY, None])
    head = Head([NO_JOB])

    def connect():
        error = next(attempts)
        if error:
            raise error
        return head

    submit.hand_over(connect, "x", "true", {}, sleep=lambda _: None)
    assert len(head.submitted) == 1


def test_a_head_that_never_comes_is_told(monkeypatch):
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(submit, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(ConnectionError, match="no route"):
        submit.hand_over(lambda: (_ for _ in ()).throw(AWAY), "x", "true", {}, sleep=lambda _: None)
