"""A rank that is slower than the others is named in the record, and on the report, with its host and by how much."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

from tests.training.faulty import group, values
from training.record import read_run
from training.report import write_report
from training.storage import place


def test_a_rank_that_is_held_up_again_and_again_is_the_slowest_in_the_record(data: Path, tmp_path: Path) -> None:
    over = threading.Event()

    def hold_up(pid: int) -> None:
        # Two thirds of the time it is stopped, as by a neighbour that takes its processor.
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.2)
            os.kill(pid, signal.SIGCONT)
            over.wait(0.1)

    with group(2, values(data, tmp_path, steps=40, checkpointEvery=40, logEvery=5, tokensPerStep=32 * 128, microBatch=64)) as run:
        run.until("micro-batches of")
        thread = threading.Thread(target=hold_up, args=(run.pids[1],))
        thread.start()
        try:
            run.until("step 40/40")
        finally:
            over.set()
            thread.join()
        summary = next(summary for rank, summary, _ in (run.answers.get(timeout=120) for _ in range(2)) if rank == 0)
        assert [run.ended(0), run.ended(1)] == [0, 0]
    place_of_run = place(str(tmp_path / "r"))
    found = read_run(place_of_run)[0]["stragglers"]
    assert (found["rank"], found["host"]) == (1, socket.gethostname())
    assert found["ratio"] > 1.2, f"stopped two thirds of the time, it must be clearly slower: {found}"
    assert summary["slowest"].startswith("slowest: rank 1 on host")
    write_report(place_of_run)
    assert "rank 1 on host" in (tmp_path / "r" / "report.html").read_text()
