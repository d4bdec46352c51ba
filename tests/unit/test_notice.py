"""When all ranks ask whether the run is about to end, and when a checkpoint is due because of it. Time is the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training import notice
from training.notice import Notice, Watch

ROOT = Path(__file__).parents[2]


class Alone:
    """What Watch needs of a World of one rank."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


class Simulation:
    """A run whose steps, questions and checkpoints take set times, until its deadline."""

    def __init__(self, step: float, question: float, save: float, told_at: float | None = None, grace: float = 0.0, first_step: float | None = None) -> None:
        self.now, self.asked, self.saves = 1000.0, [], []
        start, done = self.now, 0
        clock = types.SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now)
        deadline = None if told_at is None else start + told_at + grace

        def ask() -> Notice | None:
            self.now += question
            self.asked.append(self.now)
            return None if told_at is None or self.now < start + told_at else Notice("preempted", "a node goes", deadline)

        real = notice.time
        notice.time = clock  # type: ignore[assignment]
        try:
            watch = Watch(Alone(), ask, 0)  # type: ignore[arg-type]
            end = deadline if deadline is not None else start + max(100.0, 40 * step)
            while self.now < end:
                self.now += first_step if first_step is not None and not done else step
                done += 1
                found = watch.look(done)
                if found is not None:
                    begun = self.now
                    self.now += save
                    self.saves.append((begun, self.now))
                    watch.saved(save)
        finally:
            notice.time = real
        self.start, self.deadline = start, deadline


@settings(max_examples=40, deadline=None)
@given(step=st.floats(0.1, 60), question=st.floats(0.0005, 0.008))
def test_asking_costs_less_than_a_thousandth_whatever_a_step_takes(step: float, question: float) -> None:
    run = Simulation(step, question, 1.0)
    between = [after - before for before, after in zip(run.asked, run.asked[1:], strict=False)][2:]  # the first two find out what a step takes
    assert all(seconds >= 1000 * question or seconds >= 8 for seconds in between), between
    assert not run.saves, "nobody told it anything"


@settings(max_examples=40, deadline=None)
@given(step=st.floats(0.1, 12), question=st.floats(0.0005, 0.05), save=st.floats(0.01, 1.0), told_at=st.floats(30, 90), grace=st.floats(25, 120))
def test_a_notice_is_answered_well_within_the_shortest_grace_time(step: float, question: float, save: float, told_at: float, grace: float) -> None:
    run = Simulation(step, question, save, told_at, grace)
    begun, _ = run.saves[0]
    assert begun - (run.start + told_at) <= notice.MOST_SECONDS + 2 * step + 2 * question, "seen too late"


@settings(max_examples=40, deadline=None)
@given(step=st.floats(0.1, 5), save=st.floats(0.01, 5), grace=st.floats(25, 120))
def test_the_last_checkpoint_is_near_the_deadline_and_complete_before_it(step: float, save: float, grace: float) -> None:
    run = Simulation(step, 0.004, save, 50.0, grace)
    assert 1 <= len(run.saves) <= 2, run.saves
    begun, ended = run.saves[-1]
    assert run.deadline is not None
    assert ended <= run.deadline, "it was not complete in time"
    assert run.deadline - begun <= notice.spare(save, step) + 2 * (save + step) + 1, "what is done after it is lost"


def test_a_slow_first_step_does_not_keep_the_last_checkpoint_from_being_written() -> None:
    run = Simulation(0.5, 0.004, 0.3, told_at=1.0, grace=25, first_step=9.0)
    assert len(run.saves) == 2
    assert run.deadline is not None
    assert run.deadline - run.saves[-1][0] < 6


def test_a_growth_has_no_deadline_and_is_answered_once() -> None:
    wanted = Notice("resized", "there is room")
    watch = Watch(Alone(), lambda: wanted, 0)  # type: ignore[arg-type]
    found = [watch.look(done) for done in range(1, 4)]
    assert found == [wanted, None, None]


def test_a_growth_that_did_not_come_is_answered_again_when_it_is_wanted_again() -> None:
    wanted: list[Notice | None] = [Notice("resized", "there is room"), None, Notice("resized", "there is room")]
    watch = Watch(Alone(), lambda: wanted[0], 0)  # type: ignore[arg-type]
    found = []
    for _ in range(3):
        watch._next = 0  # now, and not when the interval is over
        found.append(watch.look(1))
        wanted.pop(0)
    assert [notice is not None for notice in found] == [True, False, True]


TOLD = """
import signal, socket
from training.notice import terminated
woken, waker = socket.socketpair()  # remembers a signal that comes before it is waited for
waker.setblocking(False)
signal.set_wakeup_fd(waker.fileno())
with terminated() as ask:
    print("ready", flush=True)
    while True:
        woken.recv(1)
        print(ask().reason, flush=True)
"""


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_first_sigterm_is_told_and_a_second_one_ends_the_process_unless_torchrun_hands_the_same_on(by_torchrun: bool) -> None:
    environment = {**os.environ, **({"TORCHELASTIC_RUN_ID": "none"} if by_torchrun else {})}
    with subprocess.Popen([sys.executable, "-c", TOLD], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM was received\n"
        process.send_signal(signal.SIGTERM)
        if by_torchrun:
            assert process.stdout.readline() == "SIGTERM was received\n", "the same signal by two ways"
            process.kill()
        else:
            assert process.wait(60) == -signal.SIGTERM
