"""Follows a job's log to the job's end. A stream that ends, breaks or falls silent is taken up again where it stopped; only Ray's status ends it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import websocket

from ops.errors import Refused
from ops.ray_jobs import NoAnswer, NoSuchJob, RayJob, RayJobs

# A broken connection is tried again at once, then slower.
PAUSES = (0.2, 1.0, 2.0, 5.0, 10.0)
# So long without an answer, and a person should look (`explain`) rather than wait.
GIVE_UP_SECONDS = 900


def follow(
    jobs: RayJobs,
    submission_id: str,
    say: Callable[[str], None],
    note: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> RayJob:
    """Says the log's text as it comes, each character once and in order, until Ray says that the job has ended; returns its last word.

    note: told of reconnections. Raises NoSuchJob where Ray lost the job, NoAnswer after 15 minutes without any answer.
    """
    said = _Said(say)
    failures, answered = 0, clock()
    while True:
        before = said.characters
        try:
            job = jobs.get(submission_id)
            answered = clock()
            if job.over:
                # Asked after the end: a stream may break off before the last lines.
                said.more(jobs.log(submission_id), 0)
                return job
            _stream(jobs, submission_id, said)
            failures = 0 if said.characters > before else failures + 1
        except NoSuchJob:
            raise
        except Refused as error:
            if clock() - answered > GIVE_UP_SECONDS:
                raise NoAnswer(f"no answer for {GIVE_UP_SECONDS // 60} minutes: {error}") from error
            failures = 1 if said.characters > before else failures + 1
            if failures == 2:
                note(f"connection lost ({error}); trying again")
        if failures:
            sleep(PAUSES[min(failures, len(PAUSES)) - 1])


@dataclasses.dataclass
class _Said:
    """How much of the log has been said; it outlives the streams."""

    say: Callable[[str], None]
    characters: int = 0

    def more(self, text: str, position: int) -> None:
        """Says what of ``text``, which begins at ``position`` of the log, is new."""
        fresh = text[max(0, self.characters - position) :]
        if fresh:
            self.characters = position + len(text)
            self.say(fresh)


def _stream(jobs: RayJobs, submission_id: str, said: _Said) -> None:
    """Reads one stream until it ends, for whatever reason. Raises Refused where Ray stops answering meanwhile."""
    stream = jobs.tail(submission_id)
    position = 0
    try:
        while True:
            try:
                kind, data = stream.recv_data()
            except websocket.WebSocketTimeoutException:
                # Nothing for a while: a quiet job, or a connection that died without a word. What the log holds tells which.
                if len(jobs.log(submission_id)) > max(said.characters, position) or jobs.get(submission_id).over:
                    return
                continue
            except (websocket.WebSocketException, OSError):
                return
            if kind != websocket.ABNF.OPCODE_TEXT:
                return
            text = data.decode("utf-8", "replace")
            said.more(text, position)
            position += len(text)
    finally:
        stream.close(timeout=1)
