"""Runs a function as N real processes with gloo, and returns what each gave back."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

# Children are forked from a server process that has imported these once: torch and transformers take seconds to import.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["training.worker", "training.checkpoint", "training.export"])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _child(rank: int, size: int, local_size: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...], answers: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank % local_size),
        LOCAL_WORLD_SIZE=str(local_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    from training.world import process_group

    torch.set_num_threads(1)
    try:
        with process_group("cpu", 60) as world:
            result = work(world, *arguments)
        answers.put((rank, result, None))
    except BaseException as error:
        answers.put((rank, None, (type(error).__name__, str(error), traceback.format_exc())))


def start_ranks(size: int, work: Callable[..., Any], *arguments: Any, local_size: int | None = None) -> tuple[list[Any], Any]:
    answers = _context.Queue()
    port = free_port()
    processes = [_context.Process(target=_child, args=(rank, size, local_size or size, port, work, arguments, answers)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes, answers


def collect(processes: list[Any], answers: Any) -> list[tuple[Any, tuple[str, str, str] | None]]:
    found = {}
    for _ in processes:
        rank, result, error = answers.get(timeout=120)
        found[rank] = (result, error)
    for process in processes:
        process.join(timeout=30)
    return [found[rank] for rank in range(len(processes))]


def run_ranks(size: int, work: Callable[..., Any], *arguments: Any, local_size: int | None = None) -> list[Any]:
    """``work(world, *arguments)`` on ``size`` ranks, ``local_size`` of them to a (pretended) host; raises what any rank raised."""
    outcomes = collect(*start_ranks(size, work, *arguments, local_size=local_size))
    for rank, (_, error) in enumerate(outcomes):
        assert error is None, f"rank {rank} raised:\n{error[2]}"
    return [result for result, _ in outcomes]
