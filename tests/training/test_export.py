"""The export is the trained model: same logits, loaded by transformers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.training.ranks import run_ranks
from tests.training.tiny import Case, build, rows_of
from training import tokenizer
from training.export import export
from training.storage import place
from training.world import World


def _export(world: World, case: Case, folder: str, shard_bytes: int) -> list[float]:
    _, net, _ = build(world, case)
    export(net, place(folder) / "tokenizer", place(folder) / "model", world, eos_token_id=0, shard_bytes=shard_bytes)
    # The logits of the sharded float32 model whose weights are rounded to bf16, as the export's are.
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(p.to(torch.bfloat16).to(torch.float32))
        logits = net(input_ids=rows_of(0, False)[0][:2]).logits
    return logits.flatten()[:500].tolist() if world.is_main else []


@pytest.mark.parametrize(("tied", "shard_bytes"), [(True, 2**30), (False, 2**30), (True, 20_000)], ids=["tied", "untied", "several files"])
def test_the_export_gives_the_same_logits(tmp_path: Path, tied: bool, shard_bytes: int) -> None:
    _tokenizer(tmp_path / "tokenizer")
    expected = run_ranks(2, _export, Case(tied=tied), str(tmp_path), shard_bytes)[0]
    net, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    logits = net(input_ids=rows_of(0, False)[0][:2]).logits.flatten()[:500]
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    files = sorted(file.name for file in (tmp_path / "model").iterdir())
    assert ("model.safetensors.index.json" in files) == (shard_bytes < 2**30), files
    assert (net.get_output_embeddings().weight is net.get_input_embeddings().weight) == tied, "tied must stay tied"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["dtype"] == "bfloat16", "transformers loads in this type"
    assert config["architectures"] == ["Qwen2ForCausalLM"], "the name must be the one that transformers knows"
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("hello world").input_ids, "the tokenizer must come along"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    from safetensors import safe_open

    _tokenizer(tmp_path / "tokenizer")
    run_ranks(1, _export, Case(), str(tmp_path), 2**30)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (no dict)
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118


def test_an_export_replaces_the_one_before(tmp_path: Path) -> None:
    _tokenizer(tmp_path / "tokenizer")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old.txt").write_text("old")
    run_ranks(1, _export, Case(), str(tmp_path), 2**30)
    assert not (tmp_path / "model" / "old.txt").exists(), "nothing of the old export may stay"
    assert [child.name for child in tmp_path.iterdir() if child.name.startswith(".")] == [], "no scratch folder may stay"


def _tokenizer(folder: Path) -> None:
    tokenizer.save(tokenizer.train(["hello world, hello text"] * 20, 280), place(str(folder)))
