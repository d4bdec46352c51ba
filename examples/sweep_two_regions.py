"""A sweep of the learning rate over two regions at once, through the library: one stack a region, one process a stack.

Each stack has its file, which differs in aws:region at least: copy Pulumi.dev.yaml to Pulumi.west.yaml and Pulumi.east.yaml, name the regions and the
data, then

    .venv-pulumi/bin/python examples/sweep_two_regions.py west east --rates 1e-5 2e-5 4e-5

Rates are shared out by whoever is free first, so a region that comes up late does less. Whatever happens, both stacks are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, wherever the script is started

from ops import Stack
from ops.errors import BadInput, OpsError
from ops.runs import of_stack


def work(name: str, rates: Any, results: Any) -> None:
    """Brings one stack up, trains on it until no rate is left, and removes it."""
    try:
        stack = Stack(name)
        try:
            stack.up()
            while True:
                try:
                    rate = rates.get_nowait()
                except queue.Empty:
                    break
                job = stack.train([f"learningRate={rate}", f"run=sweep-{rate:g}", "transport=efa"], replace=True)
                job = stack.wait()
                run = of_stack(name, f"sweep-{rate:g}")
                losses = [line["evalLoss"] for line in run.metrics if "evalLoss" in line]
                network = (run.verdict or {}).get("outcome")
                results.put({"stack": name, "rate": rate, "state": job.state, "heldOutLoss": losses[-1] if losses else None, "network": network})
        finally:
            done = stack.down()
            results.put({"stack": name, "clean": done.clean, "usd": done.receipt.usd if done.receipt else None})
    except (OpsError, BadInput) as error:
        results.put({"stack": name, "error": str(error)})


def main() -> int:
    """Prints a line of JSON for each run and each stack; exit code 0 where every stack is gone and none failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("stacks", nargs=2, metavar="STACK")
    parser.add_argument("--rates", nargs="+", type=float, required=True)
    given = parser.parse_args()
    # The engine keeps a state of its own in a process: two stacks at once are two processes.
    context = multiprocessing.get_context("spawn")
    rates, results = context.Queue(), context.Queue()
    for rate in given.rates:
        rates.put(rate)
    workers = [context.Process(target=work, args=(name, rates, results)) for name in given.stacks]
    for worker in workers:
        worker.start()
    ok = True
    while any(worker.is_alive() for worker in workers) or not results.empty():
        try:
            found = results.get(timeout=1)
        except queue.Empty:
            continue
        ok = ok and "error" not in found and found.get("clean", True)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
