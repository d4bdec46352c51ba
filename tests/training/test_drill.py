"""A drill on this machine: a real Ray cluster, a real SIGKILL."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from training import drill, faults, schema
from training.errors import EXIT_BAD_INPUT, BadInput
from training.record import read_run
from training.settings import Settings
from training.storage import place

MARKED = f"{drill.MARK}=".encode()


def left_behind() -> list[int]:
    """Processes of any drill."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if MARKED in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.soak
def test_a_worker_is_killed_and_the_drill_says_what_that_cost(data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    values = {"data": str(data), "storage": str(tmp_path), "model": {"random": "tiny"}, "workers": 2, "steps": 40, "tokensPerStep": 128}
    settings = schema.parse(Settings, {**values, "checkpointEvery": 8, "warmupSteps": 4, "learningRate": 1e-3, "evalRows": 4})
    before = left_behind()
    (toll,) = drill.drill(settings, [faults.WORKER], seed=3, away=0, say=said.append)
    assert toll.survived, (toll, said)
    assert toll.attempts == 2
    assert toll.at_step == faults.strike_at(40, 8, 3, faults.WORKER)
    (calm,) = tmp_path.glob("drill-*-none")
    (struck,) = tmp_path.glob("drill-*-worker")
    assert read_run(place(str(calm)))[0]["drill"] == faults.as_json([toll]), "the table is in the undisturbed run's record"
    first, second = read_run(place(str(struck)))[0]["attempts"]
    assert toll.steps_lost == first["endStep"] - second["startStep"]
    assert second["startStep"] >= 8, "it went on from a checkpoint"
    assert left_behind() == before, "no process of the drill outlives it"
    assert not list(Path(tempfile.gettempdir()).glob("drill-ray-*")), "nor does the folder of its Ray, where the address of a dead head would be found"


def test_what_can_not_be_drilled_is_refused_before_anything_starts(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = schema.parse(Settings, {"data": str(data), "storage": "s3://bucket/runs?region=us-east-1", "model": {"random": "tiny"}})
    with pytest.raises(BadInput, match="only a folder can be taken away here"):
        drill.drill(settings, [faults.STORAGE], 0, 0, print)
    assert drill.main(["--faults", "worker,flood", "--folder", str(tmp_path)]) == EXIT_BAD_INPUT
    assert "flood is no fault" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
