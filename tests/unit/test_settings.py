"""What a person can write into a settings file, and what each mistake is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training import schema
from training.errors import BadInput
from training.settings import FREE_TO_CHANGE, RUN_NAME, ModelSettings, Settings, identity, load, run_name

GOOD: dict[str, Any] = {"data": "d", "model": {"random": "tiny"}}


def parse(**changes: Any) -> Settings:
    return schema.parse(Settings, {**GOOD, **changes})


def message(**changes: Any) -> str:
    with pytest.raises(BadInput) as error:
        parse(**changes)
    return str(error.value)


def test_the_least_that_must_be_given_is_data_and_a_model() -> None:
    assert parse().steps == 1000
    with pytest.raises(BadInput, match="data is missing"):
        schema.parse(Settings, {"model": {"random": "tiny"}})
    with pytest.raises(BadInput, match="model is missing"):
        schema.parse(Settings, {"data": "d"})


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("steps", "many", ["steps = 'many'", "whole number"]),
        ("steps", 1.5, ["steps = 1.5", "whole number"]),
        ("steps", True, ["steps = True", "whole number"]),
        ("steps", 0, ["steps = 0", "at least 1"]),
        ("steps", None, ["steps is empty", "leave the line out"]),
        ("workers", 0, ["workers = 0", "at least 1"]),
        ("learningRate", 0, ["learningRate = 0", "more than 0"]),
        ("learningRate", float("nan"), ["learningRate = nan", "a number expected"]),
        ("finalLearningRate", 2, ["finalLearningRate = 2", "at most 1"]),
        ("parallel", "tensor", ["parallel = 'tensor'", "auto, fsdp, hsdp"]),
        ("reshard", "maybe", ["reshard = 'maybe'", "auto, yes, no"]),
        ("export", "yes", ["export = 'yes'", "true or false"]),
        ("run", "My Run", ["run = 'My Run'", "lower-case"]),
        ("run", "../up", ["run = '../up'", "lower-case"]),
        ("run", "a" * 64, ["run = ", "1 to 63"]),
        ("data", "", ["data = ''", "a text expected"]),
        ("model", "tiny", ["model must be a mapping", "'tiny'"]),
        ("model", {}, ["exactly one of model.pretrained"]),
        ("model", {"random": "tiny", "pretrained": "x"}, ["exactly one of model.pretrained"]),
        ("model", {"pretraind": "x"}, ["model.pretraind is no setting", "did you mean model.pretrained?"]),
        ("checkpoint_every", 5, ["checkpoint_every is no setting", "did you mean checkpointEvery?"]),
        ("tokenPerStep", 5, ["tokenPerStep is no setting", "did you mean tokensPerStep?"]),
        ("colour", 5, ["colour is no setting", "known: ", "checkpointEvery"]),
    ],
)
def test_a_mistake_names_the_key_the_value_and_the_way_out(key: str, value: Any, parts: list[str]) -> None:
    text = message(**{key: value})
    for part in parts:
        assert part in text, text
    assert "Traceback" not in text


def test_combinations_that_can_not_be_are_refused() -> None:
    assert "beyond steps = 10" in message(steps=10, stopAfter=11)
    assert "minWorkers = 3 is more than workers = 2; lower it, or raise workers" in message(workers=2, minWorkers=3)
    assert "longer than the run" in message(steps=10, warmupSteps=11)
    text = message(tokensPerStep=1000, sequenceLength=300)
    assert "not a multiple" in text
    assert "900 or 1200" in text, "the nearest that work must be named"
    assert "use 300" in message(tokensPerStep=10, sequenceLength=300)


def test_all_problems_come_at_once() -> None:
    text = message(steps="x", workers=0, nonsense=1)
    assert "3 problems" in text
    assert text.count("\n  - ") == 3


def test_yaml_habits_are_understood() -> None:
    assert parse(learningRate="1e-4").learning_rate == 1e-4, "YAML reads 1e-4 as a text"
    assert parse(reshard=True).reshard == "yes", "YAML reads yes as a boolean"
    assert parse(reshard=False).reshard == "no"
    assert parse(tokensPerStep=4096.0).tokens_per_step == 4096


def test_a_number_without_a_dot_is_one_inside_a_models_configuration_too(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("data: d\nmodel: {random: {model_type: qwen2, rms_norm_eps: 1e-6, name: 1e6x}}\n")
    random = load(str(file), ["model.random.rope_theta=1E+6"]).model.random
    assert random == {"model_type": "qwen2", "rms_norm_eps": 1e-6, "name": "1e6x", "rope_theta": 1e6}


def test_set_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("data: d\nmodel: {random: tiny}\nsteps: 5\nwarmupSteps: 0\n")
    settings = load(str(file), ["steps=7", "model.random=small", "learningRate=1e-3"])
    assert (settings.steps, settings.model.random, settings.learning_rate) == (7, "small", 1e-3)
    assert load(str(file), ["model.random=", "model.pretrained=x"]).model == ModelSettings(pretrained="x"), "an empty value clears"


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"steps: [1", "not valid YAML"), (b"- 1\n", "must be a mapping"), (b"\xff\xfe\x00", "not a text file"), (None, "can't be read")],
)
def test_a_file_that_can_not_be_used_is_named(tmp_path: Path, content: bytes | None, part: str) -> None:
    file = tmp_path / "job.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadInput) as error:
        load(str(file))
    assert part in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("override", ["steps", "=5", "steps=[1"])
def test_a_set_that_is_no_setting_is_told(override: str) -> None:
    with pytest.raises(BadInput, match="--set"):
        schema.apply_overrides({}, [override])


def test_every_setting_is_documented_and_checked() -> None:
    rows = schema.describe(Settings)
    assert all(meaning for _, _, meaning in rows), "a setting without a meaning helps nobody"
    assert {key for key, _, _ in rows} >= {"data", "model.pretrained", "steps", "reduceDtype"}
    assert {schema.file_key(f.name) for f in dataclasses.fields(Settings)} >= FREE_TO_CHANGE, "a stale name would free nothing"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "steps": st.integers(1, 10**6),
            "seed": st.integers(0, 100),
            "learningRate": st.floats(1e-9, 1),
            "parallel": st.sampled_from(["auto", "fsdp", "hsdp"]),
            "run": st.from_regex(RUN_NAME, fullmatch=True),
            "export": st.booleans(),
            "microBatch": st.none() | st.integers(1, 64),
        },
    )
)
def test_settings_survive_being_written_down(changes: dict[str, Any]) -> None:
    settings = parse(**{**changes, "warmupSteps": 0})
    assert schema.parse(Settings, schema.as_mapping(settings)) == settings


def test_the_run_name_follows_what_decides_the_result_only() -> None:
    name = run_name(parse(), "hash")
    assert name.startswith("tiny-")
    assert RUN_NAME.fullmatch(name), name
    assert run_name(parse(workers=4, storage="elsewhere", logEvery=1), "hash") == name, "where and how it runs is free"
    assert run_name(parse(seed=1), "hash") != name
    assert run_name(parse(), "other data") != name
    assert run_name(parse(run="mine"), "hash") == "mine"
    long = run_name(parse(model={"pretrained": "s3://bucket/Some Model_" + "x" * 90 + "/"}), "hash")
    assert RUN_NAME.fullmatch(long), long


def test_the_identity_holds_no_setting_that_is_free_to_change() -> None:
    assert not FREE_TO_CHANGE & set(identity(parse(), "hash"))


EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "training" / "examples").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_is_accepted(file: Path) -> None:
    if file.stem.startswith("job-"):
        settings = load(str(file))
        assert settings.tokens_per_step % 256 == 0
    else:
        from training.prepare import PrepareSettings

        schema.parse(PrepareSettings, schema.read_file(str(file)))
    assert len(EXAMPLES) >= 4, "the examples must be found"
