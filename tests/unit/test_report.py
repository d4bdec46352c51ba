"""The report: one page, nothing fetched, nothing a run says can break or script it."""

from __future__ import annotations

import html.parser
import json
import math
import subprocess
import sys
import uuid

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from test_record import metrics, opened

from training import report
from training.errors import BadInput
from training.storage import place


class Page(html.parser.HTMLParser):
    """What a browser would see: visible text, and everything that it would fetch or run."""

    def __init__(self, text):
        super().__init__()
        self.seen, self.loads, self.tags, self._hidden = [], [], [], False
        self.feed(text)
        self.text = " ".join(" ".join(self.seen).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._hidden = tag == "style"
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "srcset", "action") and not (value or "").startswith("#"):
                self.loads.append((tag, name, value))
            if name.startswith("on"):
                self.loads.append((tag, name, value))

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        if not self._hidden:
            self.seen.append(data)


def finished(folder, run="r", **extra):
    one = opened(folder, run=run)
    for step in range(1, 60):
        one.log(metrics(step, loss=5 / step, **extra))
    one.log_evaluation(50, 1.5)
    again = opened(folder, run=run, start_step=40, world_size=3)
    for step in range(41, 100):
        again.log(metrics(step, loss=5 / step, **extra))
    again.log_evaluation(99, 0.5)
    again.close("done", 99)
    return again.place


def written(run_place):
    return Page(report.write_report(run_place).read_bytes().decode())


def test_the_page_shows_the_run_its_curves_and_where_it_was_resumed(tmp_path):
    page = written(finished(tmp_path, mfu=0.28, exposed_communication=0.05))
    assert page.tags.count("svg") == 4
    for text in (
        "done",
        "eval perplexity 1.649",
        "resumed, 3 workers",
        "MFU 28.0%",
        "Not judged",
        "waiting for communication 10.0%",
        "2 on host-a",
        "40 to 99",
    ):
        assert text in page.text, text


def test_the_page_fetches_and_runs_nothing(tmp_path):
    where = finished(tmp_path)
    page = written(where)
    assert page.loads == []
    assert "script" not in page.tags
    assert "link" not in page.tags
    text = (where / "report.html").read_bytes().decode()
    assert "@import" not in text
    assert "url(http" not in text
    assert "default-src 'none'" in text, "the browser itself is told to fetch nothing"


def test_whatever_a_run_says_is_text_and_never_markup(tmp_path):
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{ 7*7 }}"
    one = opened(tmp_path)
    one.note(plan={evil: evil}, settings={"data": evil, "nested": {"a": [evil]}}, cost={evil: evil})
    one.log(metrics(1))
    one.close("failed", 1, evil)
    (one.place / "verdict.json").write_json(
        {"outcome": "fail", "expected": evil, "observed": evil, "reasons": [{"rule": evil, "where": evil, "saw": evil, "do": evil}], "hosts": [{"host": evil}]}
    )
    (one.place / "samples.json").write_json([{"prompt": evil, "base": evil, "tuned": evil}])
    page = written(one.place)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.loads == []
    assert page.text.count("{{ 7*7 }}") >= 12, "shown as it was written, and not taken for a template"


def test_a_slow_rank_and_rollbacks_are_shown_and_a_rank_like_the_others_is_not(tmp_path):
    slow = {"rank": 3, "host": "<b>host</b>", "ratio": 1.5, "ownSeconds": 0.3, "medianSeconds": 0.2, "dataWait": 0.0, "steps": 40}
    one = opened(tmp_path, run="slow")
    one.log(metrics(8))
    one.rewind(5, {"step": 8, "attempt": 1, "why": "the loss is a spike (<b>9</b>)", "backTo": 5, "from": 5, "to": 8})
    one.note(stragglers=slow)
    one.close("done", 5)
    page = written(one.place)
    assert "rank 3 on host <b>host</b>: it takes 1.50 times what the median rank takes" in page.text
    assert "Step 8, attempt 1: the loss is a spike (<b>9</b>). Back to step 5" in page.text
    assert "No step has been logged yet" in page.text, "what was gone back from is no part of the curve"
    usual = opened(tmp_path, run="usual")
    usual.note(stragglers={**slow, "ratio": 1.1})
    usual.close("done", 0)
    assert "median rank" not in written(usual.place).text


def test_the_verdict_the_bytes_the_cost_and_the_samples_are_shown_when_they_are_there(tmp_path):
    where = finished(tmp_path)
    (where / "verdict.json").write_json(
        {
            "outcome": "fail",
            "expected": "efa",
            "observed": "tcp",
            "reasons": [{"rule": "provider", "where": "host-b", "saw": "network Socket", "do": "request the EFA device"}],
            "hosts": [{"host": "host-b", "efaTx": 0, "efaRx": None, "nicTx": 1.852e12, "nicRx": 3.1e9, "expected": 1.9e12}],
        }
    )
    (where / "samples.json").write_json([{"prompt": "def f(", "base": "zzz", "tuned": "x):"}])
    run = (where / "run.json").read_json()
    (where / "run.json").write_json({**run, "cost": 4.61})
    page = written(where)
    for text in (
        "fail expected efa, observed tcp",
        "host-b: network Socket request the EFA device",
        "host-b 0B not known 1.85 TB 3.1 GB 1.9 TB",
        "def f(",
        "x):",
        "total 4.61",
    ):
        assert text in page.text, text
    assert "Not judged" not in page.text


def test_a_run_without_a_logged_step_still_has_a_page(tmp_path):
    one = opened(tmp_path)
    one.close("failed", 0, "data = x: no such folder")
    page = written(one.place)
    assert "No step has been logged yet." in page.text
    assert "data = x: no such folder" in page.text


def test_a_running_run_has_a_page(tmp_path):
    one = opened(tmp_path)
    one.log(metrics(1))
    page = written(one.place)
    assert "running" in page.text
    assert page.tags.count("svg") == 4


# A page takes most of a second, so a failure is shown as found rather than shrunk.
@settings(max_examples=4, deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=90),
    resumes=st.lists(st.integers(0, 90), max_size=4),
)
@example(values=[1.5e259, 1.0, 5e-324, math.nan, -math.inf], resumes=[0, 0, 5])
@example(values=[0.0], resumes=[90])
@example(values=[math.nan, math.nan], resumes=[])
def test_any_numbers_make_a_page(tmp_path, values, resumes):
    one = opened(tmp_path, run=f"r{uuid.uuid4().hex}")
    for step, value in enumerate(values, start=1):
        positive = abs(value) if math.isfinite(value) else value
        one.log(metrics(step, loss=value, grad_norm=positive, tokens_per_second=positive, step_seconds=positive, mfu=value, data_wait=positive))
        one.log_evaluation(step, value)
    for step in sorted(resumes):
        one = opened(tmp_path, run=one.place.name, start_step=step, world_size=step + 1)
    assert written(one.place).loads == []


def test_pictures_of_the_same_data_are_the_same(tmp_path):
    where = finished(tmp_path)
    run, lines = report.read_run(where)
    steps = [line for line in lines if "loss" in line]
    assert report.charts(run, steps, []) == report.charts(run, steps, [])


def test_a_report_can_go_to_an_object_store(tmp_path):
    storage = f"memory://{uuid.uuid4().hex}"
    local = finished(tmp_path)
    remote = place(storage) / "r"
    for name in ("run.json", "metrics.jsonl"):
        (remote / name).write_bytes((local / name).read_bytes())
    assert written(remote).tags.count("svg") == 4


def command(*arguments, code="from training.report import main; sys.exit(main(sys.argv[1:]))"):
    return subprocess.run([sys.executable, "-c", f"import sys\n{code}", *map(str, arguments)], capture_output=True, text=True, check=False)


def test_the_command_prints_where_the_page_is(tmp_path):
    where = finished(tmp_path)
    done = subprocess.run([sys.executable, "-m", "training.report", where.path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{where.path}/report.html\n"


def test_a_folder_without_a_run_is_one_sentence_and_exit_code_two(tmp_path):
    done = command(tmp_path / "nothing")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no run here" in done.stderr


def test_without_matplotlib_one_sentence_says_how_to_make_the_page_elsewhere(tmp_path):
    where = finished(tmp_path)
    done = command(where.path, code="sys.modules['matplotlib'] = None\nfrom training.report import main\nsys.exit(main(sys.argv[1:]))")
    assert done.returncode == 2, done.stderr
    assert "needs matplotlib" in done.stderr
    assert "python -m training.report" in done.stderr
    assert not (where / "report.html").exists()


def test_a_verdict_that_is_no_json_is_named_and_not_taken_for_none(tmp_path):
    where = finished(tmp_path)
    (where / "verdict.json").write_bytes(json.dumps({"outcome": "pass"}).encode()[:-3])
    with pytest.raises(BadInput, match=r"verdict\.json: can't be read as JSON"):
        report.write_report(where)
