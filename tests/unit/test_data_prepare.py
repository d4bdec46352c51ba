"""What `prepare` says before it starts Ray."""

import dataclasses

import pytest
import ray

from training import prepare
from training.errors import TrainingFailed
from training.prepare import PrepareSettings, main


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no settings; give --config FILE or --set key=value"),
        (["--config", "/nowhere.yaml"], "--config /nowhere.yaml: can't be read"),
        (["--set", "sources=x"], "output is missing"),
        (["--set", "sources=stdlib", "--set", "output=o", "--set", "tokenizer=train:12"], "write train:SIZE"),
        (["--set", "sources=stdlib", "--set", "output=o", "--set", "tokenizer=train:300", "--set", "textcolum=x"], "did you mean textColumn?"),
        (["--set", "sources=stdlib", "--set", "output=o", "--set", "tokenizer=train:300", "--set", "sequenceLength=1"], "must be at least 2"),
    ],
)
def test_settings_that_cannot_be_are_exit_2(arguments, told, capsys):
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_every_setting_is_listed_with_its_meaning(capsys):
    assert main(["--help-settings"]) == 0
    listed = capsys.readouterr().out
    for field in dataclasses.fields(PrepareSettings):
        assert field.metadata["doc"].split(".")[0] in listed


def test_a_cluster_that_cannot_be_reached_is_one_sentence(monkeypatch):
    """Ray itself would end the process from within C++."""
    assert not ray.is_initialized(), "another test left its Ray running"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    told = r"the Ray cluster at RAY_ADDRESS=127.0.0.1:1 can't be reached \(Connection refused\); check the address, or unset it"
    with pytest.raises(TrainingFailed, match=told), prepare._ray(print):
        pass
