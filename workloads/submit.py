"""Runs in the submitter pod, beside Ray: hands the job over once, shows its log, and ends when Ray says that the job has.

KubeRay's own command takes the end of the log's stream for the end of the job, and after a crash may hand the same job over again, to a
head that knows nothing of the first one. Here a lost stream is taken up again, and a lost head ends the job, with the reason as the last line.

usage: submit.py ENTRYPOINT RUNTIME_ENV_AS_JSON, with RAY_DASHBOARD_ADDRESS and RAY_JOB_SUBMISSION_ID, which the operator sets.
Exit code 0 where Ray has the last word (the job's own outcome is Ray's to tell), 1 where it has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

START_SECONDS = 300.0  # for a head that is just coming up
SILENT_SECONDS = 30.0  # for one that does not answer any more: its pod or its node is gone
EVERY = 3.0
OVER = ("SUCCEEDED", "FAILED", "STOPPED")
UNKNOWN = "unknown"


def state(client: Any, job: str) -> str | None:
    """Ray's status of the job, UNKNOWN to a head that has no such job, None where no head answers."""
    try:
        return str(client.get_job_status(job).value)
    except RuntimeError as error:
        return UNKNOWN if "status code 404" in str(error) else None
    except Exception:  # a connection that fails has a dozen kinds, and here they are one
        return None


def hand_over(connect: Callable[[], Any], job: str, entrypoint: str, runtime_env: dict[str, Any], sleep: Callable[[float], None] = time.sleep) -> Any:
    """A client of the job API, with the job in it; a submitter that was started twice finds its job there. Raises what the last attempt raised."""
    end, said = time.monotonic() + START_SECONDS, ""
    while True:
        try:
            client = connect()
            if state(client, job) == UNKNOWN:
                client.submit_job(entrypoint=entrypoint, submission_id=job, runtime_env=runtime_env)
            return client
        except Exception as error:
            if time.monotonic() > end:
                raise
            text = f"the Ray head does not take the job yet: {type(error).__name__}: {str(error)[:200]}"
            if text != said:
                print(said := text, flush=True)  # noqa: T201
            sleep(EVERY)


class Log:
    """Shows a job's log, once: a stream that is taken up again begins at the beginning."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show, self.shown = show, 0

    async def stream(self, client: Any, job: str) -> None:
        """Until the stream ends, however it does: what that means the job's state tells."""
        seen = 0
        with contextlib.suppress(Exception):
            async for text in client.tail_job_logs(job):
                seen += len(text)
                if seen > self.shown:
                    self.show(text[-(seen - self.shown) :])
                    self.shown = seen


async def follow(client: Any, job: str, show: Callable[[str], None], every: float = EVERY, silent: float = SILENT_SECONDS) -> tuple[int, str]:
    """Shows the log until the job is over. Returns (exit code, last line)."""
    log = Log(show)
    tail = asyncio.ensure_future(log.stream(client, job))
    answered = time.monotonic()
    while True:
        await asyncio.wait({tail}, timeout=every)
        try:
            now = await asyncio.wait_for(asyncio.to_thread(state, client, job), 10)
        except TimeoutError:
            now = None
        if now in OVER:
            await asyncio.wait({tail}, timeout=10)  # its last lines
            return 0, f"Ray says: {now}"
        if now == UNKNOWN:
            return 1, "the Ray head was lost, and the job with it: a new head is there that does not know it"
        if now is not None:
            answered = time.monotonic()
        elif time.monotonic() - answered > silent:
            return 1, f"the Ray head was lost, and the job with it: no answer for {silent:.0f} seconds"
        if tail.done():
            await asyncio.sleep(every)
            tail = asyncio.ensure_future(log.stream(client, job))


def main() -> int:
    from ray.job_submission import JobSubmissionClient  # type: ignore[import-not-found, unused-ignore]  # the image's

    entrypoint, runtime_env = sys.argv[1:]
    job = os.environ["RAY_JOB_SUBMISSION_ID"]
    client = hand_over(lambda: JobSubmissionClient(f"http://{os.environ['RAY_DASHBOARD_ADDRESS']}"), job, entrypoint, json.loads(runtime_env))

    def show(text: str) -> None:
        print(text, end="", flush=True)  # noqa: T201

    code, last = asyncio.run(follow(client, job, show))
    print(last, flush=True)  # noqa: T201
    return code


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # a thread may still wait for a head that is gone
