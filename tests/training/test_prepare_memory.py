"""What `prepare` needs of memory does not follow the size of the text."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import training
from training import tokenizer
from training.data import open_data
from training.storage import place

ROOT = Path(training.__file__).parents[1]
GIB, MIB = 2**30, 2**20


WORDS = ["".join(random.Random(number).choices("etaoinshrdlucmfwyp", k=8 + number % 23)) for number in range(1000)]


def lines(seed: int, size: int) -> Iterator[str]:
    """Documents of 1 to 20 kB, about ``size`` bytes in all, of made-up WORDS, a few of them much more often than the others."""
    dice = random.Random(seed)
    pool = dice.choices(WORDS, [1 / (rank + 1) for rank in range(len(WORDS))], k=200_000)
    while size > 0:
        at, count = dice.randrange(len(pool)), dice.randint(50, 1000)
        text = " ".join(pool[at : at + count])
        size -= len(text)
        yield text


def save_words(folder: Path) -> None:
    """A tokenizer that knows a word as a token: several times as fast as byte-level BPE, so that five gigabytes take minutes."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["<unk>", "<eos>", *sorted(set(WORDS))])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>"), place(str(folder)))


def write_jsonl(file: Path, seed: int, size: int) -> None:
    with file.open("w") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in lines(seed, size))


# Prepares in this one process and prints the most memory that it ever held, in bytes.
ALONE = """
import resource, sys
from training.prepare import main
code = main(["--launcher", "process", *sys.argv[1:]])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def arguments(source: Path, output: Path, using: str) -> list[str]:
    named = {"sources": source, "output": output, "tokenizer": using, "shardTokens": 2**20}
    return [word for key, value in named.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.soak
def test_three_times_the_text_takes_no_more_memory(tmp_path: Path) -> None:
    """Pieces are of 8 MiB, so from there on nothing may grow; the text held once would be 24 MB more."""
    save_words(tmp_path / "tokenizer")
    peaks = []
    for number, size in enumerate((12_000_000, 36_000_000)):
        write_jsonl(tmp_path / f"{number}.jsonl", 1, size)
        command = [sys.executable, "-c", ALONE, *arguments(tmp_path / f"{number}.jsonl", tmp_path / f"out-{number}", str(tmp_path / "tokenizer"))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] < peaks[0] + 12 * MIB, f"the peak grew with the text: {[f'{peak / MIB:.0f} MiB' for peak in peaks]}"


CGROUP = Path("/sys/fs/cgroup/memory")


class Watched:
    """The memory of a process and all that it started: the most of their proportional shares at once, in bytes, twice a second."""

    def __init__(self, pid: int) -> None:
        self.pid, self.peak, self.over = pid, 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self) -> None:
        while not self.over.wait(0.5):
            self.peak = max(self.peak, sum(map(share, family(self.pid))))

    def end(self) -> int:
        self.over.set()
        self.thread.join()
        return self.peak


def family(pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has just ended
    found = [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def share(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))


@pytest.mark.soak
def test_five_gigabytes_are_prepared_in_two(tmp_path: Path) -> None:
    """JSON lines, text and Parquet, 5 GB in all, by Ray's tasks; nothing may be killed for memory under a limit of 2 GiB on all processes together."""
    size = int(os.environ.get("SOAK_BYTES", 5_000_000_000))
    group = CGROUP / f"soak-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"this machine lets nobody limit memory here ({error})")
    source, output = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    try:
        write_jsonl(source / "a.jsonl", 1, size // 2)
        with (source / "b.txt").open("w") as out:
            out.writelines(text + "\n" for text in lines(2, size // 4))
        schema = pa.schema([("text", pa.string())])
        with pq.ParquetWriter(source / "c.parquet", schema) as writer:
            batch: list[str] = []
            for text in lines(3, size // 4):
                batch.append(text)
                if len(batch) == 5000:
                    writer.write_table(pa.table({"text": batch}, schema))
                    batch = []
            writer.write_table(pa.table({"text": batch}, schema))
        save_words(tmp_path / "tokenizer")
        (group / "memory.limit_in_bytes").write_text(str(2 * GIB))
        limited = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)]
        began = time.monotonic()
        command = [*limited, sys.executable, "-m", "training.prepare", *arguments(source, output, str(tmp_path / "tokenizer")), "--set", f"shardTokens={2**27}"]
        with (tmp_path / "log").open("w") as log:
            child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"})
            watched = Watched(child.pid)
            code = child.wait()
        peak = watched.end()
        said = (tmp_path / "log").read_text()
        assert code == 0, said
        kernel = int((group / "memory.max_usage_in_bytes").read_text())
        killed = (group / "memory.oom_control").read_text()
        assert "oom_kill 0" in killed, killed
        manifest = open_data(str(output)).manifest
        total = sum(item.bytes for item in manifest.sources)
        tokens = sum(split.tokens for split in manifest.splits.values())
        print(
            f"{total / 1e9:.2f} GB, {tokens:,} tokens in {time.monotonic() - began:.0f} s; peak of all processes {peak / MIB:.0f} MiB"
            f" (with the kernel's file cache {kernel / MIB:.0f} of 2048 MiB)\n{said}"
        )
        assert peak < 2 * GIB
    finally:
        shutil.rmtree(source)
        shutil.rmtree(output, ignore_errors=True)
        while (group / "cgroup.procs").read_text():  # Ray's own processes end a moment after the one that started them
            time.sleep(0.2)
        group.rmdir()
