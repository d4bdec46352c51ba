"""The drill's documents; the drill itself runs in test_stack_cluster.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from ops import drill
from training import schema
from training.settings import Settings

GIVEN: dict[str, Any] = {"data": "/storage/data", "model": {"random": "tiny"}, "steps": 9000, "stopAfter": 8000, "warmupSteps": 300, "transport": "tcp"}


def test_a_leg_is_the_stacks_own_job_but_short_and_under_a_name_of_its_own() -> None:
    found = drill.settings_of(GIVEN, 200, "drill-1-worker")
    settings = schema.parse(Settings, found)
    assert (settings.steps, settings.run, settings.stop_after, settings.export) == (200, "drill-1-worker", None, False)
    assert (settings.log_every, settings.checkpoint_every, settings.warmup_steps) == (1, 20, 200)
    assert (settings.transport, settings.data) == ("tcp", "/storage/data")


def test_a_store_is_cut_off_without_cutting_ray_off_from_itself() -> None:
    policy = drill.cut_off("ray", "cluster", "cluster-drill-storage")
    spec = policy["spec"]
    mine = {"matchLabels": {"ray.io/cluster": "cluster"}}
    assert spec["podSelector"] == mine
    assert spec["policyTypes"] == ["Egress"], "what comes in is another policy's business"
    assert {"to": [{"podSelector": mine}]} in spec["egress"]
    assert [port["port"] for rule in spec["egress"] if "ports" in rule for port in rule["ports"]] == [53, 53]


def test_checkpoints_that_are_moved_away_come_back_as_they_were(tmp_path: Path) -> None:
    def move(where: str) -> None:
        subprocess.run([sys.executable, "-c", drill._MOVE, where, str(tmp_path)], check=True)

    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    move("away")
    assert (tmp_path / "checkpoints").is_file(), "whatever is written there fails"
    move("back")
    assert (tmp_path / "checkpoints" / "step-1").is_dir()
    move("back")
    assert (tmp_path / "checkpoints" / "step-1").is_dir(), "a second time it changes nothing"


def test_a_pod_without_a_training_worker_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", drill._KILL.replace("ray::RayTrainWorker", "no such process"), "3"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (1, "no training worker runs in this pod")
