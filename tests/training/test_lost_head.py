"""A worker whose Ray head is gone says so, for nobody else can. The head is a socket that listens here."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from training import launch_ray
from training.errors import EXIT_TRAINING_FAILED


def test_what_fails_without_a_head_is_blamed_on_it_and_nothing_else_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = head.getsockname()
        assert launch_ray._blame(address) is None
    assert launch_ray._blame(address) == launch_ray.HEAD_LOST


def test_a_worker_that_loses_its_head_has_the_record_closed_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []
    ended = threading.Event()

    def end(code: int) -> None:
        happened.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(launch_ray, "GUARD_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as head, launch_ray._guard(head.getsockname(), happened.append):
        assert not ended.wait(2), "a head that is there"
        head.close()
        assert ended.wait(120)
    assert happened[:2] == [launch_ray.HEAD_LOST, EXIT_TRAINING_FAILED]
