"""When a run has diverged, and which rows it goes on with afterwards.

Rows that were skipped are kept as ranges of data steps in ``skips.json`` in the run's folder: step s of the run trains on the s-th data step that is in
no range. That needs no world size and no history, so every restart of the run, on any number of workers, reads the same rows at the same step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from training.errors import BadInput, TrainingFailed
from training.storage import Place

FILE = "skips.json"
SCHEMA = 1
# Logged losses that a spike is measured against, and as few as say what is usual.
RECENT_LINES, FEWEST_LINES = 40, 10
# Of a normal distribution, the median absolute deviation is this part of its standard deviation (the normal quantile of 3/4).
MAD_OF_SIGMA = 0.6745
# A loss that hardly moves has a deviation of about zero; below this part of the median nothing is a spike.
LEAST_DEVIATION = 0.01

Range = tuple[int, int]


class Diverged(TrainingFailed):
    """The run diverged at ``step`` (steps done); raised on all ranks alike, before anything of that step was saved. ``why`` begins a sentence."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(
            f"{why} at step {step}; no checkpoint was written from it. Start again with onDivergence: rollback to go on from the last checkpoint with"
            " other rows, or as another run (run: ...) with a lower learningRate or gradClip"
        )
        self.step, self.why = step, why

    def after(self, rollbacks: int) -> TrainingFailed:
        """What is told when going back has not helped."""
        return TrainingFailed(
            f"{self.why} at step {self.step}, after {rollbacks} rollback{'' if rollbacks == 1 else 's'} (maxRollbacks); no checkpoint was written from it."
            " Other rows don't help: start another run (run: ...) with a lower learningRate or gradClip"
        )


class Spikes:
    """Knows a loss that is far above the usual."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.recent: deque[float] = deque(maxlen=RECENT_LINES)

    def judge(self, loss: float) -> str | None:
        """What is wrong with this line's loss (finite); None: nothing, and it becomes part of what is usual."""
        if self.factor > 0 and len(self.recent) >= FEWEST_LINES:
            median = statistics.median(self.recent)
            deviation = statistics.median(abs(value - median) for value in self.recent) / MAD_OF_SIGMA
            if loss > median + self.factor * max(deviation, LEAST_DEVIATION * abs(median)):
                return f"the loss is a spike ({loss:.4g}, the median of the last {len(self.recent)} lines is {median:.4g})"
        self.recent.append(loss)
        return None


def not_finite(loss: float, grad_norm: float) -> str | None:
    """What is wrong with a loss or gradient that is not finite."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    return f"the loss or its gradient is not finite (loss {loss}, gradient norm {grad_norm})"


def all_finite(net: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether all weights and moments are finite, the same answer on every rank. A collective; reads them once, with one host sync."""
    shards = [_local(p) for p in net.parameters()]
    shards += [_local(value) for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    shards = [shard for shard in shards if shard.numel() and shard.is_floating_point()]
    device = _local(next(net.parameters())).device
    bad = torch.zeros((), device=device)
    for kind in {(shard.device, shard.dtype) for shard in shards}:
        largest: Sequence[torch.Tensor] = torch._foreach_norm([s for s in shards if (s.device, s.dtype) == kind], math.inf)
        bad += (~torch.isfinite(torch.stack(list(largest)))).sum().to(device)
    dist.all_reduce(bad)
    return bad.item() == 0


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


# ---- which rows a step trains on


def data_step(step: int, skipped: Sequence[Range]) -> int:
    """The number of the data step that step ``step`` (both from 0) trains on: the ``step``-th that lies in no range [from, to)."""
    for first, end in merged(skipped):
        if first > step:
            break
        step += end - first
    return step


def merged(skipped: Sequence[Range]) -> list[Range]:
    """The same data steps as disjoint ranges in order, none empty and no two touching."""
    found: list[Range] = []
    for first, end in sorted(r for r in skipped if r[0] < r[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return found


def bad_range(good: int, bad: int, skipped: Sequence[Range]) -> Range:
    """The data steps of the steps after ``good`` done up to and including the ``bad``-th."""
    return data_step(good, skipped), data_step(bad - 1, skipped) + 1


def read_skips(run: Place) -> list[dict[str, Any]]:
    """The entries of the run's skips.json, each with at least ``from`` and ``to``; none where there is no file. Raises BadInput for a damaged one."""
    file = run / FILE
    try:
        found = file.read_json()
        if found["schema"] != SCHEMA or not all(isinstance(entry[key], int) for entry in found["skipped"] for key in ("from", "to")):
            raise ValueError(f"schema {SCHEMA} with ranges of whole numbers expected")
        return list(found["skipped"])
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{file}: can't be read ({error})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file}: damaged ({error}); it says which rows this run leaves out. Mend it by what run.json says of rollbacks, or start another run"
        ) from error


def write_skips(run: Place, entries: Sequence[dict[str, Any]]) -> None:
    """Raises TrainingFailed where it can't be written: going on without it would train a restart on other rows."""
    try:
        (run / FILE).write_json({"schema": SCHEMA, "skipped": list(entries)})
    except OSError as error:
        raise TrainingFailed(f"{run / FILE}: can't be written ({error}); make room or give access, and start the same run again") from error


def ranges(entries: Sequence[dict[str, Any]]) -> list[Range]:
    """The ranges of :func:`read_skips`' entries."""
    return merged([(entry["from"], entry["to"]) for entry in entries])
