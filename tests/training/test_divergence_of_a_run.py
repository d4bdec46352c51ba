"""A run whose data or weights go wrong: it stops, or goes back and on without what was wrong, and never saves what is not finite.

The causes are real: the data holds one document of signs that occur nowhere else, and the model starts with weights that only those signs reach.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.faulty import group, values
from training import job, model, schema
from training.data import PreparedData, open_data, rows_of_step
from training.divergence import FILE, Diverged
from training.errors import JobError
from training.prepare import PrepareSettings, prepare
from training.record import read_run
from training.settings import ModelSettings, Settings
from training.storage import place

SIGNS = "#$%&*+/<=>@^_`|~"
ROWS_A_STEP = 4
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True)
class Odd:
    """Prepared data with rows that are unlike the others: their numbers, the tokens that are in them alone, and tokens that are nowhere."""

    folder: Path
    data: PreparedData
    rows: frozenset[int]
    tokens: list[int]
    unused: list[int]

    def seed(self, first: int, last: int, rows: int = ROWS_A_STEP) -> int:
        """A seed with which the first odd row is trained on between two steps."""
        return next(seed for seed in range(1000) if first <= self.bad_step(seed, rows) <= last)

    def bad_step(self, seed: int, rows: int = ROWS_A_STEP) -> int:
        """The first step (from 1) with an odd row."""
        return next(step + 1 for step in range(10**6) if self.rows & set(rows_of_step(self.data.rows("train"), step, rows, seed).tolist()))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Odd:
    folder = tmp_path_factory.mktemp("odd")
    draw = random.Random(1)
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "su") for b in ("ra", "ti", "von", "dek")]
    for i in range(40):
        (folder / f"{i}.txt").write_text(" ".join(draw.choices(words, weights=range(1, 21), k=180)))
    (folder / "20a.txt").write_text("".join(draw.choices(SIGNS, k=20)))
    prepare(
        PrepareSettings(sources=(str(folder),), output=str(folder / "prepared"), tokenizer="train:300", sequence_length=32, eval_fraction=0.1),
        say=lambda _: None,
    )
    data = open_data(str(folder / "prepared"))
    tokens = json.loads((folder / "prepared" / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    signs = {tokens[sign] for sign in SIGNS}
    rows = [set(data.row("train", i).tolist()) for i in range(data.rows("train"))]
    odd_rows = frozenset(i for i, row in enumerate(rows) if row & signs)
    seen = set().union(*rows)
    assert 1 <= len(odd_rows) <= 3, "the odd document must be in the training split, and small"
    return Odd(folder / "prepared", data, odd_rows, sorted(signs & seen), sorted(set(range(250)) - seen))


def poisoned(odd: Odd, folder: Path, tokens: list[int], value: float) -> str:
    """A model whose input weights for ``tokens`` are ``value``."""
    vocabulary = odd.data.manifest.vocab_size
    config = model.load_config(ModelSettings(random=CONFIG), vocabulary)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    net: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        net.model.embed_tokens.weight[tokens] = value
    net.save_pretrained(folder)
    return str(folder)


def settings(odd: Odd, folder: Path, **changes: Any) -> dict[str, Any]:
    usual = {"model": {"random": CONFIG}, "tokensPerStep": 32 * ROWS_A_STEP, "warmupSteps": 0, "learningRate": 3e-3}
    return values(odd.folder, folder, **{**usual, **changes})


def start(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    return job.run(schema.parse(Settings, raw), "process", said.append), said


def losses(folder: Path) -> dict[int, float]:
    lines = [line for line in read_run(place(str(folder / "r")))[1] if "loss" in line]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines}), "each step must be in the record once, in order"
    return {line["step"]: line["loss"] for line in lines}


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(child.name[5:13]) for child in (folder / "r" / "checkpoints").glob("step-*"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "r" / "model" / "model.safetensors")
    return found


def skipping(folder: Path, first: int, end: int) -> None:
    """A run folder in which those steps of data are left out from the beginning."""
    (folder / "r").mkdir(parents=True)
    (folder / "r" / FILE).write_text(json.dumps({"schema": 1, "skipped": [{"from": first, "to": end}]}))


@pytest.mark.parametrize(("first", "last", "checkpoint"), [(7, 9, 5), (2, 4, 0)], ids=["after a checkpoint", "before the first checkpoint"])
def test_bad_rows_stop_a_run_or_are_left_out_as_if_they_had_never_been(odd: Odd, tmp_path: Path, first: int, last: int, checkpoint: int) -> None:
    seed = odd.seed(first, last)
    bad = odd.bad_step(seed)
    changes = {"model": {"pretrained": poisoned(odd, tmp_path / "poisoned", odd.tokens, 3e38)}, "seed": seed, "export": True, "steps": 14}
    with pytest.raises(Diverged, match=f"not finite .* at step {bad}; no checkpoint was written from it.*onDivergence: rollback"):
        start(settings(odd, tmp_path / "a", **changes))
    assert all(step <= checkpoint for step in steps_saved(tmp_path / "a") or [0]) if checkpoint else not (tmp_path / "a" / "r" / "checkpoints").exists()

    summary, said = start(settings(odd, tmp_path / "a", **changes, onDivergence="rollback"))  # the same run goes on: how it meets a fault is no other run
    assert summary["step"] == 14
    assert any(f"at step {bad}: back to step {checkpoint}" in line for line in said), said
    run = read_run(place(str(tmp_path / "a" / "r")))[0]
    assert run["outcome"] == "done"
    assert [(entry["from"], entry["to"], entry["backTo"], entry["step"]) for entry in run["rollbacks"]] == [(checkpoint, bad, checkpoint, bad)]

    skipping(tmp_path / "b", checkpoint, bad)
    start(settings(odd, tmp_path / "b", **changes))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    ours, reference = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(ours[name], reference[name]) for name in reference), "the weights must be those of a run without these rows"


def test_what_is_left_out_stays_so_in_a_restart_on_another_number_of_workers(odd: Odd, tmp_path: Path) -> None:
    seed = odd.seed(7, 9)
    changes = {"model": {"pretrained": poisoned(odd, tmp_path / "poisoned", odd.tokens, 3e38)}, "seed": seed, "steps": 14, "onDivergence": "rollback"}
    with group(2, settings(odd, tmp_path / "a", **changes, stopAfter=10)) as run:
        assert [run.ended(0), run.ended(1)] == [0, 0]
    summary, _ = start(settings(odd, tmp_path / "a", **changes))
    assert summary["resumedFrom"] == 10
    skipping(tmp_path / "b", 5, odd.bad_step(seed))
    start(settings(odd, tmp_path / "b", **changes))
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-4), "step for step the same rows"


def test_weights_that_are_not_finite_are_never_saved_though_the_loss_is(odd: Odd, tmp_path: Path) -> None:
    changes = {"model": {"pretrained": poisoned(odd, tmp_path / "poisoned", odd.unused[:1], float("inf"))}}
    with group(2, settings(odd, tmp_path, **changes)) as run:
        outcomes = [run.answers.get(timeout=120) for _ in range(2)]
    for rank, _, error in outcomes:
        assert error[0] == "Diverged", f"rank {rank} must stop as the others do: {error}"
        assert "weights or their moments are not finite, though the loss is, at step 5" in error[1]
    assert len(losses(tmp_path)) == 5, "five steps had a finite loss"
    assert steps_saved(tmp_path) == []


def test_going_back_is_given_up_when_it_does_not_help(odd: Odd, tmp_path: Path) -> None:
    changes = {"model": {"pretrained": poisoned(odd, tmp_path / "poisoned", odd.unused[:1], float("inf"))}, "onDivergence": "rollback", "maxRollbacks": 1}
    with pytest.raises(JobError, match=r"at step 5, after 1 rollback \(maxRollbacks\)") as error:
        start(settings(odd, tmp_path, **changes))
    assert error.value.exit_code == 3
    assert steps_saved(tmp_path) == []
    assert read_run(place(str(tmp_path / "r")))[0]["attempts"][0]["outcome"] == "failed"


def test_a_spike_is_gone_back_from_where_that_is_asked_for(odd: Odd, tmp_path: Path) -> None:
    seed = odd.seed(42, 58, rows=1)
    bad = odd.bad_step(seed, rows=1)
    changes = {"tokensPerStep": 32, "seed": seed, "steps": 60, "microBatch": 1, "learningRate": 1e-2, "checkpointEvery": 20}
    _, said = start(settings(odd, tmp_path / "a", **changes, spikeFactor=6, onDivergence="rollback"))
    assert any(f"at step {bad}: back to step 40" in line and "the loss is a spike" in line for line in said), (bad, losses(tmp_path / "a"))
    start(settings(odd, tmp_path / "b", **changes))
    untouched = losses(tmp_path / "b")
    assert untouched[bad] > 1.3 * untouched[bad - 1], "without the guard the odd row must be seen in the loss"
