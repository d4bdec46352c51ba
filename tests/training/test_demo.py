"""The demo's own code, start to end, on less text and fewer steps."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

from transformers import AutoModelForCausalLM

from training.demo import Size, demo
from training.record import read_run
from training.storage import place


def test_the_demo_trains_resumes_on_other_workers_exports_and_shows_it(tmp_path: Path) -> None:
    said: list[str] = []
    size = Size(
        sources=(f"{sysconfig.get_paths()['stdlib']}/json", f"{sysconfig.get_paths()['stdlib']}/asyncio"),
        vocabulary=400,
        sequence_length=64,
        model="tiny",
        tokens_per_step=1024,
        steps=24,
        first_steps=16,
        workers=(2, 1),
    )
    folder = demo(tmp_path, size, said.append)
    run, lines = read_run(place(str(folder)))
    assert run["outcome"] == "done"
    assert [attempt["worldSize"] for attempt in run["attempts"]] == [2, 1], "the second part runs on another number of workers"
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(losses) == sorted(losses), "one curve, in order"
    assert losses[24] < losses[min(losses)] - 0.3, f"the loss must visibly fall: {losses}"
    held_out = [line["evalLoss"] for line in lines if "evalLoss" in line]
    assert held_out[-1] < math.log(400) - 0.5, "held-out text must be far likelier than by chance"
    assert AutoModelForCausalLM.from_pretrained(folder / "model").num_parameters() > 0
    text = "\n".join(said)
    assert f"{folder}/report.html" in text, "the person must be told where the report is"
    assert "tokens/s" in text
    assert "left" in text, "progress has a time to go"
    assert (folder / "report.html").stat().st_size > 10_000
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 160
