"""The record of a run: what is written survives kills, resumes and odd numbers, and runs don't mix."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import uuid

import fsspec.implementations.memory
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training import record
from training.errors import BadInput
from training.record import StepMetrics
from training.storage import Place, place

HERE = os.path.dirname(__file__)
ROOT = os.path.dirname(os.path.dirname(HERE))
IDENTITY = {"steps": 10, "model": {"random": "tiny"}, "dataHash": "abc"}


def metrics(step, loss=1.0, **values):
    known = {
        "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": step * 100, "tokens_per_second": 10.0,
        "tokens_per_second_per_gpu": 5.0, "step_seconds": 0.5, "data_wait": 0.1,
    }  # fmt: skip
    return StepMetrics(step=step, loss=loss, **{**known, **values})


def opened(folder, run="r", identity=IDENTITY, start_step=0, world_size=2, **kwargs):
    found = record.open_run(place(str(folder)), run, identity, {"storage": str(folder)}, **kwargs)
    found.start(start_step, world_size, ["host-a"])
    return found


def strict(data: bytes):
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(data, parse_constant=refuse)


def test_a_finished_run_says_what_ran_where_and_how_it_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_IMAGE_DIGEST", "sha256:1234")
    one = opened(tmp_path)
    one.log(metrics(1))
    one.log_evaluation(1, 2.0)
    one.close("done", 1)
    run, lines = record.read_run(place(str(tmp_path)) / "r")
    assert (run["schema"], run["run"], run["outcome"], run["imageDigest"], run["cost"]) == (1, "r", "done", "sha256:1234", None)
    assert run["versions"]["torch"].startswith("2."), "the installed torch is recorded without importing it"
    assert len(run["codeHash"]) == 64
    assert run["started"].endswith("Z")
    assert run["ended"] >= run["started"]
    attempt = run["attempts"][0]
    assert (attempt["number"], attempt["worldSize"], attempt["hosts"], attempt["startStep"], attempt["endStep"]) == (1, 2, ["host-a"], 0, 1)
    assert attempt["outcome"] == "done"
    assert lines[0]["loss"] == 1.0
    assert lines[0]["attempt"] == 1
    assert "mfu" not in lines[0], "what is not known is not written"
    assert lines[1]["perplexity"] == pytest.approx(math.exp(2.0))


def test_a_line_can_be_read_as_soon_as_it_is_logged(tmp_path):
    one = opened(tmp_path)
    one.log(metrics(1))
    run, lines = record.read_run(one.place)
    assert run["outcome"] == "running"
    assert [line["step"] for line in lines] == [1]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=5))
def test_metrics_come_back_as_logged_whatever_the_floats(tmp_path, values):
    one = opened(tmp_path, run=f"r{uuid.uuid4().hex}")
    for step, value in enumerate(values, start=1):
        one.log(metrics(step, loss=value, mfu=value))
        one.log_evaluation(step, value)
    one.close("done", len(values))
    for line in (one.place / "metrics.jsonl").read_bytes().splitlines():
        strict(line)
    _, lines = record.read_run(one.place)
    for value, train, held_out in zip(values, lines[::2], lines[1::2], strict=True):
        for back in (train["loss"], train["mfu"], held_out["evalLoss"]):
            assert (math.isnan(back) and math.isnan(value)) or back == value


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(last=st.integers(0, 12), resume_at=st.integers(0, 12), end=st.integers(0, 12))
def test_after_a_resume_every_step_is_there_once_and_in_order(tmp_path, last, resume_at, end):
    resume_at = min(resume_at, last)
    run = f"r{uuid.uuid4().hex}"
    first = opened(tmp_path, run=run)
    for step in range(1, last + 1):
        first.log(metrics(step))
        first.log_evaluation(step, 1.0)
    second = opened(tmp_path, run=run, start_step=resume_at, world_size=3)
    for step in range(resume_at + 1, max(end, resume_at) + 1):
        second.log(metrics(step))
    second.close("done", max(end, resume_at))
    document, lines = record.read_run(second.place)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, max(end, resume_at) + 1))
    assert [line["step"] for line in lines if "evalLoss" in line] == list(range(1, resume_at + 1))
    assert all(line["attempt"] == (1 if line["step"] <= resume_at else 2) for line in lines)
    assert [a["outcome"] for a in document["attempts"]] == ["lost", "done"]
    assert document["attempts"][0]["endStep"] == last, "a lost attempt got as far as its last line"
    assert document["attempts"][0]["ended"] is not None


def test_a_writer_killed_in_the_middle_of_a_line_loses_that_line_only(tmp_path):
    script = textwrap.dedent(
        """
        import os, signal, sys
        sys.path.insert(0, sys.argv[2])
        from test_record import opened, metrics
        one = opened(sys.argv[1])
        one.log(metrics(1)); one.log(metrics(2))
        one._file.write(b'{"step": 3, "lo'); one._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), HERE], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    where = place(str(tmp_path)) / "r"
    assert [line["step"] for line in record.read_run(where)[1]] == [1, 2]
    again = opened(tmp_path, start_step=2)
    again.log(metrics(3))
    run, lines = record.read_run(where)
    assert [line["step"] for line in lines] == [1, 2, 3], "the torn line is gone from the file, not in the middle of it"
    assert run["attempts"][0]["outcome"] == "lost"


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    one = opened(tmp_path)
    one.log(metrics(1))
    one.close("done", 1)
    file = tmp_path / "r" / "metrics.jsonl"
    file.write_bytes(b"rubbish\n" + file.read_bytes())
    with pytest.raises(BadInput, match=r"metrics\.jsonl line 1: not a line of metrics"):
        record.read_run(one.place)


def test_a_folder_of_another_run_is_refused_with_the_difference_and_left_alone(tmp_path):
    opened(tmp_path).close("done", 1)
    before = (tmp_path / "r" / "run.json").read_bytes()
    with pytest.raises(BadInput) as refused:
        opened(tmp_path, identity={**IDENTITY, "steps": 20})
    assert "steps was 10, is 20" in str(refused.value)
    assert "another name" in str(refused.value)
    assert "dataHash" not in str(refused.value), "only what differs is named"
    assert refused.value.exit_code == 2
    assert (tmp_path / "r" / "run.json").read_bytes() == before


def test_opening_a_run_writes_nothing_until_it_starts(tmp_path):
    record.open_run(place(str(tmp_path)), "r", IDENTITY, {})
    assert list(tmp_path.iterdir()) == []


def test_two_runs_in_one_storage_do_not_touch_each_other(tmp_path):
    a, b = opened(tmp_path, run="a"), opened(tmp_path, run="a.b", identity={"other": 1})
    a.log(metrics(1))
    b.log(metrics(7))
    a.close("failed", 1, "out of memory")
    seen = (tmp_path / "a" / "run.json").read_bytes()
    b.log(metrics(8))
    b.close("done", 8)
    assert [line["step"] for line in record.read_run(a.place)[1]] == [1]
    assert [line["step"] for line in record.read_run(b.place)[1]] == [7, 8]
    assert (tmp_path / "a" / "run.json").read_bytes() == seen
    assert record.read_run(a.place)[0]["attempts"][0]["reason"] == "out of memory"


def test_an_object_store_is_rewritten_at_most_every_half_minute_and_at_the_end():
    time = [0.0]
    storage = place(f"memory://{uuid.uuid4().hex}")
    assert not storage.local
    one = record.open_run(storage, "r", IDENTITY, {}, clock=lambda: time[0])
    one.start(0, 1, ["h"])

    def written():
        return [line["step"] for line in record.read_run(one.place)[1]]

    one.log(metrics(1))
    assert written() == [], "not yet due"
    time[0] += record.REWRITE_EVERY_SECONDS
    one.log(metrics(2))
    assert written() == [1, 2]
    one.log(metrics(3))
    assert written() == [1, 2]
    one.close("stopped", 3)
    assert written() == [1, 2, 3]


def test_passwords_in_uris_stay_out_of_the_record_and_do_not_change_a_run(tmp_path):
    identity = {"model": "s3://key:s3cr3t@bucket/model"}
    one = record.open_run(place(str(tmp_path)), "r", identity, {"data": ["s3://key:s3cr3t@bucket/data"], "model": "s3://key:s3cr3t@bucket/model"})
    one.start(0, 1, ["h"])
    one.note(cost={"total": math.nan, "from": "s3://u:s3cr3t@b"})
    one.close("done", 0)
    text = (tmp_path / "r" / "run.json").read_text()
    assert "s3cr3t" not in text
    assert "s3://***@bucket/data" in text
    strict(text)
    record.open_run(place(str(tmp_path)), "r", {"model": "s3://key:rotated@bucket/model"}, {})


def test_a_disk_that_takes_no_more_is_a_sentence_with_exit_code_three_and_leaves_a_readable_record(tmp_path):
    script = textwrap.dedent(
        """
        import resource, sys
        sys.path.insert(0, sys.argv[2])
        from test_record import opened, metrics
        from training.errors import JobError
        one = opened(sys.argv[1])
        one.log(metrics(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
        try:
            for step in range(2, 100):
                one.log(metrics(step))
        except JobError as error:
            print(error)
            sys.exit(error.exit_code)
        """
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), HERE], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "the run's record can't be written" in done.stdout
    assert record.read_run(place(str(tmp_path)) / "r")[1][0]["step"] == 1


@pytest.mark.parametrize(("content", "says"), [(None, "no run here"), ("{", "not valid JSON"), ('{"schema": 99}', "schema 99"), ("[]", "schema None")])
def test_a_place_without_a_readable_run_says_so(tmp_path, content, says):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(BadInput, match=says):
        record.read_run(place(str(tmp_path)))


def test_the_code_hash_follows_content_and_name_of_the_sources(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "notes.txt").write_text("one")
    first = record.code_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("two")
    assert record.code_hash(tmp_path) == first, "only sources count"
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    renamed = record.code_hash(tmp_path)
    (tmp_path / "b.py").write_text("x = 2")
    assert len({first, renamed, record.code_hash(tmp_path)}) == 3


def test_reading_a_record_needs_neither_torch_nor_ray():
    code = "import sys, training.record; print([m for m in ('torch', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_metric_has_a_camel_case_name_of_its_own(tmp_path):
    one = opened(tmp_path)
    one.log(metrics(1, mfu=0.4, exposed_communication=0.1, memory_gib=3.0))
    line = record.read_run(one.place)[1][0]
    assert set(line) == {
        "step", "time", "attempt", "loss", "gradNorm", "learningRate", "tokens", "tokensPerSecond", "tokensPerSecondPerGpu",
        "mfu", "dataWait", "stepSeconds", "exposedCommunication", "memoryGiB",
    }  # fmt: skip
    assert len(dataclasses.fields(StepMetrics)) == len(line) - 2


def test_an_attempt_that_was_told_of_its_end_is_not_called_lost(tmp_path):
    one = opened(tmp_path)
    one.log(metrics(4))
    one.expect("preempted", "the node of worker 1 is being taken away", step=6, save_seconds=0.5)
    opened(tmp_path, start_step=6, world_size=1).close("done", 10)
    run, _ = record.read_run(place(str(tmp_path)) / "r")
    first, second = run["attempts"]
    assert (first["outcome"], first["endStep"]) == ("preempted", 6), "it got as far as its checkpoint, though no line was due"
    assert first["reason"] == "the node of worker 1 is being taken away; the run went on with 1 worker for 2"
    assert first["notice"] == {"outcome": "preempted", "reason": "the node of worker 1 is being taken away", "step": 6, "saveSeconds": 0.5}
    assert (second["outcome"], second["worldSize"], second["reason"]) == ("done", 1, None)


def test_what_a_run_that_was_stopped_on_purpose_goes_on_with_is_no_reason(tmp_path):
    opened(tmp_path).close("stopped", 4)
    opened(tmp_path, start_step=4, world_size=1).close("done", 10)
    run, _ = record.read_run(place(str(tmp_path)) / "r")
    assert [attempt["reason"] for attempt in run["attempts"]] == [None, None]


class Refuses(fsspec.implementations.memory.MemoryFileSystem):
    """A store in memory that can be told to refuse."""

    cachable = False
    refuses = False

    def _open(self, *args, **kwargs):
        if Refuses.refuses:
            raise OSError("503 Slow Down")
        return super()._open(*args, **kwargs)


def refusing_store():
    import pyarrow.fs as pafs

    Refuses.refuses = False
    return Place(pafs.PyFileSystem(pafs.FSSpecHandler(Refuses())), f"/{uuid.uuid4().hex}", local=False)


@settings(max_examples=40)
@given(away=st.lists(st.booleans(), min_size=1, max_size=14))
def test_what_a_store_refuses_is_written_later_in_order_and_nothing_is_lost(away):
    time, said = [0.0], []
    storage = refusing_store()
    one = record.open_run(storage, "r", IDENTITY, {}, clock=lambda: time[0], patience=1e9, say=said.append)
    one.start(0, 1, ["h"])
    for step, refused in enumerate(away, start=1):
        Refuses.refuses = refused
        time[0] += record.REWRITE_EVERY_SECONDS + record._LONGEST_PAUSE
        one.log(metrics(step))
        one.write("verdict.json", {"step": step})
        one.note(cost=step)
        if not refused:
            run, lines = record.read_run(one.place)
            assert [line["step"] for line in lines] == list(range(1, step + 1))
            assert (run["cost"], (one.place / "verdict.json").read_json()) == (step, {"step": step})
    Refuses.refuses = False
    one.close("done", len(away))
    run, lines = record.read_run(one.place)
    assert (run["outcome"], [line["step"] for line in lines]) == ("done", list(range(1, len(away) + 1)))
    times_away = sum(now and not before for before, now in zip([False, *away], away, strict=False))
    assert sum("kept in memory" in text for text in said) == times_away, "said once each time it goes away"


def test_a_store_that_refuses_longer_than_patience_ends_the_run_and_until_then_is_not_asked_at_every_line():
    time, tries = [0.0], []
    storage = refusing_store()
    one = record.open_run(storage, "r", IDENTITY, {}, clock=lambda: time[0], patience=300.0)
    one.start(0, 1, ["h"])
    Refuses.refuses = True
    rewrite = one._rewrite
    one._rewrite = lambda: (tries.append(time[0]), rewrite())

    def train():
        for step in range(1, 10_000):
            time[0] += 1.0
            one.log(metrics(step))

    with pytest.raises(record.TrainingFailed, match=r"the run's record can't be written .*503 Slow Down"):
        train()
    since = record.REWRITE_EVERY_SECONDS
    assert since + 300 <= time[0] <= since + 301 + record._LONGEST_PAUSE
    assert len(tries) < 15, "pauses between tries grow: training waits for each"


def test_a_line_that_a_full_disk_cut_in_two_is_written_whole_once_there_is_room(tmp_path):
    script = textwrap.dedent(
        """
        import resource, sys
        sys.path.insert(0, sys.argv[2])
        from test_record import opened, metrics
        time, said = [0.0], []
        one = opened(sys.argv[1], clock=lambda: time[0], patience=100.0, say=said.append)
        one.log(metrics(1))
        size = (one.place / "metrics.jsonl").info().size
        # As on a full disk, a write stops in the middle of a line.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, resource.RLIM_INFINITY))
        for step in range(2, 6):
            one.log(metrics(step))
        assert (one.place / "metrics.jsonl").info().size == size + size // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        time[0] += 60.0
        one.log(metrics(6))
        one.close("done", 6)
        print(*said, sep="\\n")
        """
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), HERE], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in record.read_run(place(str(tmp_path)) / "r")[1]] == [1, 2, 3, 4, 5, 6]
    assert len(done.stdout.splitlines()) == 2, done.stdout
    assert "kept in memory" in done.stdout
    assert "nothing of it is lost" in done.stdout


def test_an_attempt_that_begins_earlier_than_it_was_told_drops_the_lines_beyond(tmp_path):
    first = opened(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(metrics(step))
    second = opened(tmp_path, start_step=4)
    second.rewind(2)
    second.log(metrics(3))
    second.close("done", 3)
    run, lines = record.read_run(second.place)
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 1), (2, 1), (3, 2)]
    assert run["attempts"][1]["startStep"] == 2
