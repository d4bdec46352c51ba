"""Base and tuned model side by side, on a run that was really trained."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.test_scoring import KEY, answer, serving
from training import evaluate, job, model, tokenizer
from training.data import MANIFEST, Manifest, Source, open_data
from training.errors import BadInput, JobError
from training.evaluate import Evaluation, Sample, beginnings, lines, measure
from training.packing import ShardWriter
from training.scoring import Scores
from training.settings import ModelSettings, Settings
from training.storage import place

SEED = 3


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A finished run of a tiny model: (its folder, its summary)."""
    summary = job.run(
        Settings(
            data=str(data), model=ModelSettings(random="tiny"), run="r", storage=str(tmp_path_factory.mktemp("runs")), steps=25,
            tokens_per_step=8 * 32, learning_rate=5e-3, warmup_steps=2, seed=SEED, device="cpu",
        ),
        launcher="process",
        say=lambda _: None,
    )  # fmt: skip
    return Path(summary["folder"]), summary


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(trained[0], tmp_path / "r", ignore=shutil.ignore_patterns("checkpoints")))


def rewritten(run, **values):
    """Changes fields of run.json; a mapping is laid over the one that is there."""
    document = json.loads((run / "run.json").read_text())
    for key, value in values.items():
        document[key] = {**document[key], **value} if isinstance(value, dict) else value
    (run / "run.json").write_text(json.dumps(document))


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "training.evaluate", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def quick(run, **values):
    return measure(place(str(run)), **{"samples": 1, "tokens": 4, "rows": 4, **values})


def refused(run, match, **values):
    with pytest.raises(BadInput, match=match) as told:
        quick(run, **values)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_both_losses_are_those_of_the_same_held_out_rows(trained, data):
    folder, summary = trained
    result = measure(place(str(folder)), samples=0)
    rows = open_data(str(data)).rows("eval")
    assert (result.rows, result.tokens) == (rows, rows * 32)
    # The export holds bf16, the run evaluated its float32 weights.
    assert result.tuned_loss == pytest.approx(summary["evalLoss"], rel=2e-3)
    assert result.tuned_loss != pytest.approx(result.base_loss, rel=2e-2), "training changed nothing, so this test shows nothing"

    settings = ModelSettings(random="tiny")
    prepared = open_data(str(data))
    config = model.load_config(settings, prepared.manifest.vocab_size)
    began_with = AutoModelForCausalLM.from_config(config)
    began_with.load_state_dict(model.full_weights(settings, config, SEED))
    read = torch.from_numpy(np.stack([prepared.row("eval", i) for i in range(rows)]))
    with torch.no_grad():
        logits = began_with(input_ids=read[:, :-1]).logits
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, 1), read[:, 1:].flatten())
    assert result.base_loss == pytest.approx(float(by_hand), rel=1e-5)


def test_the_result_is_saved_and_shown_in_the_report(run):
    result = evaluate.evaluate(place(str(run)), prompts=["kara <b>loti</b>", "mivon"], tokens=6, rows=3)
    samples = json.loads((run / "samples.json").read_text())
    assert samples == [dataclasses.asdict(sample) for sample in result.samples]
    assert [sample["prompt"] for sample in samples] == ["kara <b>loti</b>", "mivon"]
    assert {tuple(sample) for sample in samples} == {("prompt", "base", "tuned")}
    saved = json.loads((run / "evaluation.json").read_text())
    assert saved["tuned"]["loss"] == result.tuned_loss
    assert saved["base"]["perplexity"] == pytest.approx(np.exp(result.base_loss))
    assert (saved["rows"], saved["step"], saved["steps"], saved["scores"]) == (3, 25, 25, None)
    assert "kara &lt;b&gt;loti&lt;/b&gt;" in (run / "report.html").read_text()


def test_samples_are_the_same_every_time_and_differ_between_the_models(run):
    first, second = (quick(run, samples=3, tokens=12) for _ in range(2))
    assert first == second
    assert len(first.samples) == 3
    assert all(sample.base != sample.tuned for sample in first.samples)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    quick(run)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random numbers were touched"


def test_prompts_are_the_beginnings_of_held_out_documents(run, data):
    prepared = open_data(str(data))
    words = AutoTokenizer.from_pretrained(data / "tokenizer")
    stream = np.concatenate([prepared.row("eval", i)[:-1] for i in range(prepared.rows("eval"))]).tolist()
    documents = words.decode(stream).split(words.eos_token)
    result = quick(run, samples=2)
    assert [d.startswith(s.prompt) for s, d in zip(result.samples, documents, strict=False)] == [True, True]


def test_another_base_takes_the_place_of_the_one_the_run_began_with(run):
    result = quick(run, base=str(run / "model"))
    assert result.base_loss == result.tuned_loss
    assert all(sample.base == sample.tuned for sample in result.samples)
    assert result.base == str(run / "model")


def test_a_run_of_a_pretrained_model_is_compared_with_that_model(run, data, tmp_path):
    summary = job.run(
        Settings(
            data=str(data), model=ModelSettings(pretrained=str(run / "model")), run="t", storage=str(tmp_path), steps=3, tokens_per_step=8 * 32,
            warmup_steps=0, learning_rate=1e-3, device="cpu",
        ),
        launcher="process",
        say=lambda _: None,
    )  # fmt: skip
    tuned = quick(run)
    again = quick(summary["folder"])
    assert again.base_loss == tuned.tuned_loss
    assert again.tuned_loss != again.base_loss


def test_a_run_without_held_out_rows_gets_samples_only_and_says_so(run, data, tmp_path):
    without = Path(shutil.copytree(data, tmp_path / "data"))
    manifest = Manifest.from_json(json.loads((without / MANIFEST).read_text()))
    manifest = dataclasses.replace(manifest, splits={"train": manifest.splits["train"]})
    (without / MANIFEST).write_text(json.dumps(manifest.as_json()))
    rewritten(run, settings={"data": str(without)}, identity={"dataHash": manifest.hash})
    result = evaluate.evaluate(place(str(run)), samples=2, tokens=4)
    assert (result.base_loss, result.tuned_loss, result.rows) == (None, None, 0)
    assert len(result.samples) == 2
    text = " ".join("\n".join(lines(result)).split())
    assert "no held-out row" in text
    assert "beginnings of training documents" in text
    assert json.loads((run / "evaluation.json").read_text())["base"]["loss"] is None


def test_a_folder_without_a_run_is_bad_input(tmp_path):
    refused(tmp_path, "no run here")
    refused(tmp_path / "nowhere", "no run here")


def test_a_run_without_an_export_says_why_there_is_none(run):
    shutil.rmtree(run / "model")
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    rewritten(run, settings={"export": False})
    refused(run, "told not to export.*export=true")
    rewritten(run, settings={"export": True}, outcome="failed", attempts=[{**attempts[0], "outcome": "failed", "endStep": 17, "reason": "disk full"}])
    refused(run, r"failed at step 17 of 25 \(disk full\)")
    rewritten(run, outcome="running")
    refused(run, "still going on")


def test_an_export_older_than_the_last_attempt_is_named_as_such(run):
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    rewritten(run, outcome="failed", attempts=[*attempts, {**attempts[0], "number": 2, "outcome": "failed", "endStep": 30}])
    result = quick(run)
    assert result.step == 25
    assert any("exported at step 25" in note for note in result.notes)


def test_an_export_that_the_last_start_did_not_make_has_no_step(run):
    rewritten(run, settings={"export": False})
    result = quick(run)
    assert result.step is None
    assert any("earlier step" in note for note in result.notes)
    assert "unknown step" in "\n".join(lines(result))


def test_a_run_in_an_object_store_is_evaluated_there(run):
    store = fsspec.filesystem("memory")
    store.put(str(run), "/bucket/r", recursive=True)
    there = place("memory://bucket/r")
    result = evaluate.evaluate(there, samples=1, tokens=4, rows=4)
    assert dataclasses.replace(result, tuned="") == dataclasses.replace(quick(run), tuned="")
    assert json.loads(store.cat_file("/bucket/r/evaluation.json"))["tuned"]["loss"] == result.tuned_loss
    assert result.samples[0].tuned in json.loads(store.cat_file("/bucket/r/samples.json"))[0]["tuned"]
    store.rm("/bucket/r/model/model.safetensors")
    with pytest.raises(BadInput) as told:
        measure(there, samples=1)
    assert str(there / "model") in str(told.value)
    store.rm("/bucket", recursive=True)


def test_data_that_is_gone_or_another_is_bad_input(run, data, tmp_path):
    rewritten(run, settings={"data": str(tmp_path / "gone")})
    refused(run, "can't be opened.*gone: no such folder")
    rewritten(run, settings={"data": str(data)}, identity={"dataHash": "0" * 64})
    refused(run, "not what the run was trained on")


def test_another_tokenizer_is_bad_input(run):
    other = tokenizer.train(["quite another text, with other letters in it " * 20], 280)
    base = Path(shutil.copytree(run / "model", run.parent / "base"))
    tokenizer.save(other, place(str(base)))
    refused(run, "--base .*base: its tokenizer is not that of the run's data", base=str(base))
    (base / "tokenizer.json").write_text("{")
    refused(run, "--base .*base: .*no telling", base=str(base))
    refused(run, "--base .*nowhere", base=str(run / "nowhere"))
    tokenizer.save(other, place(str(run / "model")))
    refused(run, "model: its tokenizer is not that of the run's data")


@pytest.mark.parametrize("spoil", ["cut", "gone", "config"])
def test_a_damaged_export_is_bad_input_that_names_it(run, spoil):
    weights = run / "model" / "model.safetensors"
    if spoil == "cut":
        weights.write_bytes(weights.read_bytes()[:-5000])
    elif spoil == "gone":
        weights.unlink()
    else:
        (run / "model" / "config.json").write_text("{")
    assert str(run / "model") in refused(run, "model")


def test_prompts_come_from_a_file_one_a_line(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffkara \r\n\n  \nloti\u2028mi\n".encode())
    found = evaluate.read_prompts(str(file))
    assert found == ["kara ", "loti\u2028mi"]
    assert [s.prompt for s in quick(run, prompts=found, samples=None).samples] == found
    assert [s.prompt for s in quick(run, prompts=found, samples=1).samples] == found[:1]


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe\x00"])
def test_a_prompt_file_that_holds_none_is_bad_input(tmp_path, content):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadInput, match=r"--prompts .*prompts\.txt"):
        evaluate.read_prompts(str(file))


def test_what_has_no_room_in_the_model_is_bad_input(run):
    refused(run, "limit of 2048; shorten the prompt", prompts=["kara " * 2100])
    refused(run, "lower --tokens", tokens=2048)


@pytest.mark.parametrize("values", [{"samples": -1}, {"tokens": 0}, {"rows": 0}])
def test_numbers_out_of_range_are_bad_input(run, values):
    refused(run, f"--{next(iter(values))} ", **values)


def test_a_folder_that_can_not_be_written_is_told_after_the_result_is_shown(run, capsys):
    (run / "samples.json").mkdir()
    (run / "samples.json" / "full").touch()
    for more in ([], ["--json"]):
        assert evaluate.main([str(run), "--samples", "0", "--rows", "2", *more]) == 3
        out, err = capsys.readouterr()
        assert "perplexity" in out
        assert "can't be saved" in err


def test_the_command_scores_samples_and_shows_the_key_nowhere(run):
    with serving(lambda *_: answer('{"A": 5, "B": 5}')) as (url, seen):
        done = command(run, "--samples", 2, "--tokens", 8, "--rows", 4, "--endpoint", url, "--judge-model", "judge-1", OPENAI_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert all(columns(line) <= 80 for line in done.stdout.split("\n"))
    for word in ("perplexity", "sample 2 of 2", "scores of judge-1", "mean of 2"):
        assert word in done.stdout
    saved = json.loads((run / "evaluation.json").read_text())
    assert saved["scores"]["scores"] == [{"base": 5, "tuned": 5}] * 2
    assert [request["headers"]["Authorization"] for request in seen] == [f"Bearer {KEY}"] * 2
    written = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    assert not [text for text in (done.stdout.encode(), done.stderr.encode(), *written) if KEY.encode() in text]


def test_an_endpoint_that_fails_loses_nothing_of_what_was_measured(run, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(lambda *_: (401, {}, b"")) as (url, _):
        arguments = [str(run), "--samples", "1", "--tokens", "4", "--rows", "2", "--endpoint", url, "--judge-model", "judge-1"]
        assert evaluate.main(arguments) == 2
    out, err = capsys.readouterr()
    assert "perplexity" in out
    assert "error: " in err
    assert "OPENAI_API_KEY" in err
    assert json.loads((run / "evaluation.json").read_text())["scores"]["failure"]

    monkeypatch.setattr(evaluate, "endpoint", functools.partial(_impatient, evaluate.endpoint))
    (run / "evaluation.json").unlink()
    assert evaluate.main([*arguments, "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["tuned"]["perplexity"] > 1
    assert "can be reached" in err
    saved = json.loads((run / "evaluation.json").read_text())
    assert saved["tuned"]["loss"]
    assert saved["scores"]["scores"] == [None]


def _impatient(make, *arguments):
    return dataclasses.replace(make(*arguments), pauses=(0.0,))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--endpoint", "http://127.0.0.1/v1"], "go together"),
        (["--judge-model", "m"], "go together"),
        (["--endpoint", "https://api.example.com/v1", "--judge-model", "m"], "OPENAI_API_KEY"),
        (["--endpoint", "http://127.0.0.1/v1", "--judge-model", "m", "--samples", "0"], "--samples 0"),
        (["--prompts", "/nowhere/prompts.txt"], "--prompts"),
        (["--rows", "0"], "--rows"),
    ],
)
def test_a_command_that_can_not_be_meant_is_refused_before_any_work(trained, arguments, says, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert evaluate.main([str(trained[0]), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "loading" not in err


@settings(max_examples=50, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 50), max_size=30), min_size=1, max_size=8),
    length=st.integers(2, 9),
    count=st.integers(0, 5),
    tokens=st.integers(1, 12),
)
def test_a_beginning_is_the_first_half_of_a_document_at_most(tmp_path_factory, documents, length, count, tokens):
    at = place(str(tmp_path_factory.mktemp("d")))
    stream = [token for document in documents for token in (*document, 0)]
    writer = ShardWriter(at, "eval", "uint16", 1024, length)
    writer.write(np.asarray(stream), documents=len(documents))
    manifest = Manifest(length, 51, 0, "h", "uint16", {"eval": writer.finish()}, (Source("t", 1, 1, "s"),), {}, "i")
    (at / MANIFEST).write_json(manifest.as_json())
    data = open_data(str(at))
    if data.rows("eval") == 0:
        return
    found = beginnings(data, "eval", count, tokens, lambda ids: " ".join(map(str, ids)))
    readable = stream[: data.rows("eval") * length]
    whole = _split(readable)
    assert len(found) == min(count, len(whole))
    for text, document in zip(found, whole, strict=False):
        ids = [int(part) for part in text.split()]
        assert ids == document[: max(1, min(tokens, len(document) // 2))]


def _split(stream):
    parts = [[]]
    for token in stream:
        if token == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def some(**values):
    known = {
        "run": "r", "base": "random weights (tiny, seed 0)", "tuned": "/runs/r/model", "step": 25, "steps": 25, "sequence_length": 32, "rows": 10,
        "tokens": 320, "base_loss": 7.5, "tuned_loss": 3.25, "samples": (), "seed": 0, "compute": "cpu float32", "notes": (),
    }  # fmt: skip
    return Evaluation(**{**known, **values})


def columns(line):
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200), st.text(alphabet="ab \n\t\x1b界", max_size=300), st.floats(), st.floats())
def test_the_table_fits_80_columns_and_sends_no_control_character(one, two, base_loss, tuned_loss):
    result = some(samples=(Sample(one, two, one),), base=one, notes=(two,), base_loss=base_loss, tuned_loss=tuned_loss)
    for line in lines(result):
        assert line.isprintable(), repr(line)
        assert columns(line) <= 80, repr(line)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab 界é.", max_size=300))
def test_no_character_of_a_sample_is_lost_where_a_line_is_cut(text):
    shown = lines(some(samples=(Sample("p", "b", text),)))
    start = next(i for i, line in enumerate(shown) if line.startswith("  tuned  |"))
    joined = "".join(line[11:] for line in shown[start:])
    assert joined.replace(" ", "") == (text.replace(" ", "") if text else "(nothing:itendsthedocumentatonce)")


def test_the_table_says_what_changed():
    shown = "\n".join(lines(some(samples=(Sample("p", "", "t"),))))
    for text in (
        "7.5000",
        "3.2500",
        "-4.2500",
        "1,808",
        "25.79",
        "x 0.01426",
        "10 held-out rows of 32 tokens (320 predicted)",
        "step 25 of 25",
        "ends the document",
    ):
        assert text in shown, text


@pytest.mark.parametrize(("loss", "shown"), [(float("nan"), "NaN"), (800.0, "Infinity"), (None, None)])
def test_a_loss_that_is_no_number_is_written_by_name(loss, shown):
    values = some(tuned_loss=loss).as_json()
    assert json.loads(json.dumps(values, allow_nan=False))["tuned"]["perplexity"] == shown


def test_the_scores_are_shown_sample_by_sample():
    shown = "\n".join(lines(some(samples=(Sample("p", "b", "t"),) * 2, scores=Scores("judge-1", "http://127.0.0.1/v1", ((3, 8), None), 1))))
    for text in ("judge-1", "mean of 1", "8.00", "+5.00", "1 of the answers"):
        assert text in shown, text


def test_an_error_of_the_store_is_a_sentence(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(JobError):
        measure(place(str(file / "run")))
