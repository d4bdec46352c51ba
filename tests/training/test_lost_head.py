"""A worker whose Ray head is gone says so, for nobody else can. The head is a socket that listens here."""

from __future__ import annotations

import os
import socket
import threading
import types
from collections.abc import Iterator

import pytest

from training import launch_ray
from training.errors import EXIT_TRAINING_FAILED


def test_what_fails_without_a_head_is_blamed_on_it_and_nothing_else_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = head.getsockname()
        assert launch_ray._blame(address) is None
    assert launch_ray._blame(address) == launch_ray.HEAD_LOST


class Happened:
    """What a guard did, in its order; the process that it would end goes on."""

    def __init__(self) -> None:
        self.all: list[object] = []
        self.over = threading.Event()

    def ended(self, code: int) -> None:
        self.all.append(code)
        self.over.set()


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> Happened:
    said = Happened()
    monkeypatch.setattr(os, "_exit", said.ended)
    monkeypatch.setattr(launch_ray, "GUARD_SECONDS", 0.05)
    return said


def test_a_worker_that_loses_its_head_has_the_record_closed_and_then_ends(happened: Happened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that has ended refuses connections, and is not waited for as one that is only silent."""
    monkeypatch.setattr(launch_ray, "SILENT_SECONDS", 1e6)
    with socket.create_server(("127.0.0.1", 0)) as head, launch_ray._guard(head.getsockname(), happened.all.append):
        assert not happened.over.wait(2), "a head that is there"
        head.close()
        assert happened.over.wait(60)
    assert happened.all[:2] == [launch_ray.HEAD_LOST, EXIT_TRAINING_FAILED]


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """A host whose queue is full, with nobody who takes from it: it answers no connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as host, socket.create_connection(host.getsockname()):
        yield host.getsockname()


def test_a_head_that_is_only_silent_is_waited_for_longer(happened: Happened, silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_ray, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(launch_ray, "REFUSED_SECONDS", 0.0)
    with launch_ray._guard(silent, happened.all.append):
        assert not happened.over.wait(1), "a network's hiccup"
    monkeypatch.setattr(launch_ray, "SILENT_SECONDS", 0.5)
    with launch_ray._guard(silent, happened.all.append):
        assert happened.over.wait(60), "nobody waits for ever"
    assert happened.all[:2] == [launch_ray.HEAD_LOST, EXIT_TRAINING_FAILED]


REFUSED, TIMED_OUT = ConnectionRefusedError(), TimeoutError()


@pytest.mark.parametrize(
    ("answers", "looks"),
    [
        pytest.param([REFUSED, TIMED_OUT], 2, id="it ended, and then its address went"),
        pytest.param([TIMED_OUT], 10, id="it fell silent"),
        pytest.param([REFUSED, None, TIMED_OUT], 12, id="it came back, and then fell silent"),
    ],
)
def test_a_refusal_counts_until_the_head_answers(happened: Happened, monkeypatch: pytest.MonkeyPatch, answers: list[OSError | None], looks: int) -> None:
    """By a clock that goes on by a second with each look; the last answer is that of all later looks."""
    clock = types.SimpleNamespace(now=0)
    clock.monotonic = lambda: clock.now

    def silence(_address: tuple[str, int]) -> OSError | None:
        clock.now += 1
        return answers[min(clock.now, len(answers)) - 1]

    monkeypatch.setattr(launch_ray, "_silence", silence)
    monkeypatch.setattr(launch_ray, "time", clock)
    with launch_ray._guard(("head", 1), lambda reason: happened.all.append((reason, clock.now))):
        assert happened.over.wait(60)
    assert happened.all[:2] == [(launch_ray.HEAD_LOST, looks), EXIT_TRAINING_FAILED]
