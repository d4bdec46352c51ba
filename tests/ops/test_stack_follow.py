"""Following a log: each character once and in order, whatever breaks, and only Ray's status ends it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops import follow, ray_jobs
from ops.ray_jobs import NoAnswer, NoSuchJob, RayJobs
from tests.ops.fake_ray import TOKEN, FakeRay

LINES = "".join(f"step {n}/40  loss {6 - n / 10:.4f}  größer\n" for n in range(40))


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    made = FakeRay(LINES)
    yield made
    made.close()


def followed(ray: FakeRay, token: str = TOKEN) -> tuple[str, ray_jobs.RayJob, list[str]]:
    said: list[str] = []
    notes: list[str] = []
    end = follow.follow(RayJobs(ray.connect, token), "job", said.append, notes.append, sleep=lambda _: None)
    return "".join(said), end, notes


def test_a_connection_cut_in_the_middle_loses_and_repeats_nothing(ray: FakeRay) -> None:
    ray.cuts = [333, 100, 801]

    def goes_on(fake: FakeRay) -> None:
        if not fake.cuts:
            fake.log += "the last line\n"
            fake.state = "SUCCEEDED"

    ray.at_stream_end = goes_on
    text, end, _ = followed(ray)
    assert text == LINES + "the last line\n"
    assert end.state == "SUCCEEDED"


def test_a_stream_that_ends_well_is_not_the_end_of_the_job(ray: FakeRay) -> None:
    streams = []

    def ended(fake: FakeRay) -> None:
        streams.append(1)
        if len(streams) == 3:
            fake.log += "error: a rank was lost\n"
            fake.state, fake.exit_code = "FAILED", 3

    ray.at_stream_end = ended
    text, end, _ = followed(ray)
    assert len(streams) == 3, "the first two streams ended while the job was RUNNING"
    assert text == LINES + "error: a rank was lost\n"
    assert (end.state, end.exit_code) == ("FAILED", 3)


def test_requests_that_are_cut_off_are_asked_again(ray: FakeRay) -> None:
    ray.hang_ups = ["/api/jobs/job", "/logs/tail", "/api/jobs/job", "/api/jobs/job", "/logs"]

    def ended(fake: FakeRay) -> None:
        fake.state = "SUCCEEDED"

    ray.at_stream_end = ended
    text, end, notes = followed(ray)
    assert (text, end.state) == (LINES, "SUCCEEDED")
    assert [note for note in notes if "connection lost" in note]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, len(LINES)), max_size=6), st.text(alphabet="abcß\n", max_size=80))
def test_any_series_of_cuts_gives_the_whole_log_once(cuts: list[int], rest: str) -> None:
    ray = FakeRay(LINES)
    try:
        ray.cuts = list(cuts)

        def ended(fake: FakeRay) -> None:
            if not fake.cuts:
                fake.log = LINES + rest
                fake.state = "SUCCEEDED"

        ray.at_stream_end = ended
        assert followed(ray)[0] == LINES + rest
    finally:
        ray.close()


def test_a_stream_that_dies_without_a_word_is_noticed_and_repeats_nothing(ray: FakeRay) -> None:
    """The connection stays open and silent, and the question about it is cut off as well."""
    ray.silent_streams = 2
    ray.hang_ups = ["/logs", "/logs"]  # one for each: nothing else would end a stream of a log that does not grow
    ends: list[int] = []

    def ended(fake: FakeRay) -> None:
        ends.append(1)
        fake.log += f"line after {len(ends)}\n"
        fake.state = "SUCCEEDED" if len(ends) == 3 else "RUNNING"

    ray.at_stream_end = ended
    text: list[str] = []
    job = follow.follow(RayJobs(ray.connect, TOKEN, timeout=0.3), "job", text.append, sleep=lambda _: None)
    assert job.state == "SUCCEEDED"
    assert "".join(text) == ray.log


def test_a_job_that_ray_forgot_is_said_to_be_so(ray: FakeRay) -> None:
    with pytest.raises(NoSuchJob, match="head was replaced"):
        follow.follow(RayJobs(ray.connect, TOKEN), "lost", lambda _: None, sleep=lambda _: None)


def test_without_any_answer_a_person_is_asked_after_a_while(ray: FakeRay) -> None:
    ray.close()
    now = iter(range(0, 100_000, 60))
    with pytest.raises(NoAnswer, match="no answer for 15 minutes"):
        follow.follow(RayJobs(ray.connect, TOKEN), "job", lambda _: None, sleep=lambda _: None, clock=lambda: float(next(now)))


def test_a_wrong_token_is_a_sentence(ray: FakeRay) -> None:
    with pytest.raises(ray_jobs.Refused, match="refuses the token"):
        RayJobs(ray.connect, "wrong").get("job")


def test_a_submitted_job_brings_its_files_and_is_uploaded_once(ray: FakeRay) -> None:
    jobs = RayJobs(ray.connect, TOKEN)
    for _ in range(2):
        jobs.submit("prove-1", "python -m training.job", {"env_vars": {"A": "b"}}, {"training/x.py": "x = 1\n", "settings.json": "{}"})
    (path, package), *more = ray.packages.items()
    assert not more
    assert zipfile.ZipFile(BytesIO(package)).read("training/x.py") == b"x = 1\n"
    assert len([request for request in ray.requests if request.startswith("PUT")]) == 1
    assert ray.submitted["runtime_env"] == {"env_vars": {"A": "b"}, "working_dir": "gcs://" + path.rsplit("/", 1)[1]}
    assert TOKEN not in json.dumps(ray.submitted)
