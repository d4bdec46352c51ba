"""Does the loader keep a GPU busy? A fake step of the length that a GPU would take, on data in a folder and on S3 with latency.

    python -m benchmarks.loader --seconds 20 --tokens-per-second 60000 --latency 0.03

Prints, for each case, the part of the time that the training loop waited for data, and the loader's own CPU time for a token (all its threads; the
fake step sleeps, and the S3 server is another process). A step's rows come as they come to one rank. On a CPU: no GPU is needed, and none is used.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow.fs as pafs

from training import data, shards
from training.data import Batches, Manifest, PreparedData, open_data
from training.packing import ShardWriter
from training.storage import place

VOCABULARY = 50_000
WARM_UP = 2
"""Steps that are not counted: a run's first ones wait for whatever is opened for the first time."""

# Moto's server, and every request held up by argv[1] seconds, as a round trip to S3 would.
SLOW_S3 = """
import sys, time
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_request(self, *arguments): pass
inside = DomainDispatcherApplication(create_backend_app)
def slow(environ, start_response):
    time.sleep(float(sys.argv[1]))
    return inside(environ, start_response)
server = make_server("127.0.0.1", 0, slow, threaded=True, request_handler=Quiet)
print(f"port {server.server_port}", flush=True)
server.serve_forever()
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """first: seconds from nothing to the first step's rows. wait: part of the time after the warm-up that the loop waited. nanoseconds: CPU time of the
    loader for a token. copied: part of the shards that lay on this host at the end.
    """

    case: str
    steps: int
    first: float
    wait: float
    longest_wait: float
    nanoseconds: float
    copied: float


@contextlib.contextmanager
def slow_s3(latency: float) -> Iterator[str]:
    """An S3 server on this machine that answers each request after ``latency`` seconds; yields host:port."""
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    server = subprocess.Popen([sys.executable, "-c", SLOW_S3, str(latency)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"port (\d+)", server.stdout.readline())
        assert found, "the S3 server did not start; it needs moto[server] (requirements-dev.txt)"
        yield f"127.0.0.1:{found[1]}"
    finally:
        server.terminate()
        server.wait()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def make(folder: Path, rows: int, length: int, shard_tokens: int, vocabulary: int = VOCABULARY) -> None:
    """Prepared data of random tokens."""
    at = place(str(folder))
    at.make_folder()
    writer = ShardWriter(at, "train", "uint16", shard_tokens, length)
    tokens = np.random.default_rng(0)
    for _ in range(rows // 1000):
        writer.write(tokens.integers(0, vocabulary, 1000 * length, dtype=np.uint16), documents=1)
    writer.write(tokens.integers(0, vocabulary, rows % 1000 * length + 1, dtype=np.uint16), documents=1)
    manifest = Manifest(length, vocabulary, vocabulary - 1, "", "uint16", {"train": writer.finish()}, (), {}, "")
    (at / data.MANIFEST).write_json(manifest.as_json())


def measure(case: str, prepared: PreparedData, rows_per_step: int, tokens_per_second: float, seconds: float) -> Result:
    """Steps of ``rows_per_step`` rows for about ``seconds``, each as long as it takes at ``tokens_per_second``."""
    length = prepared.manifest.sequence_length
    step_seconds = rows_per_step * length / tokens_per_second
    steps = max(3, round(seconds / step_seconds))
    waits: list[float] = []
    with Batches(prepared, "train", rows_per_step, rows_per_step, 1, 0, 0, 0, document_mask=False) as batches:
        began, cpu = 0.0, 0.0
        for number in range(WARM_UP + steps):
            if number == WARM_UP:
                began, cpu = time.perf_counter(), time.process_time()
            step = next(batches)
            waits.append(step.wait_seconds)
            time.sleep(step_seconds)
        passed, spent = time.perf_counter() - began, time.process_time() - cpu
    counted = waits[WARM_UP:]
    whole = len(prepared.manifest.splits["train"].shards)
    there = len(list(shards.cache_folder(prepared.manifest.hash).glob("*.bin"))) if not prepared.folder.local else whole
    return Result(case, steps, waits[0], sum(counted) / passed, max(counted), spent / (steps * rows_per_step * length) * 1e9, there / whole)


def run(seconds: float, tokens_per_second: float, latency: float, rows: int, length: int, rows_per_step: int) -> list[Result]:
    """The cases one after the other: a folder; S3 with nothing copied; S3 while copies are made; S3 with one row a step."""
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="loader-") as folder, slow_s3(latency) as address:
        make(Path(folder) / "data", rows, length, shard_tokens=max(length + 1, rows * length // 20))
        fs = pafs.S3FileSystem(endpoint_override=address, scheme="http", region="us-west-2", allow_bucket_creation=True)
        fs.create_dir("bucket")
        pafs.copy_files(f"{folder}/data", "bucket/data", destination_filesystem=fs)
        far = f"s3://bucket/data?endpoint_override={address}&scheme=http&region=us-west-2"
        cases = [("folder", f"{folder}/data", "0", rows_per_step), ("S3, no copy", far, "0", rows_per_step), ("S3, no copy, 1 row a step", far, "0", 1)]
        for case, uri, limit, rows_of_step in [*cases, ("S3, copied meanwhile", far, "1000", rows_per_step)]:
            os.environ.update({shards.CACHE_VARIABLE: f"{folder}/cache", shards.LIMIT_VARIABLE: limit})
            prepared = open_data(uri)
            try:
                found.append(measure(case, prepared, rows_of_step, tokens_per_second, seconds))
            finally:
                prepared.close()
    return found


def table(results: Sequence[Result]) -> str:
    """The results for a terminal of 80 columns."""
    lines = [f"{'':26}{'first step':>10}{'data wait':>10}{'longest':>11}{'CPU/token':>11}{'copied':>8}"]
    lines += [f"{r.case:26}{r.first:>8.2f} s{r.wait:>10.2%}{r.longest_wait * 1e3:>8.1f} ms{r.nanoseconds:>8.0f} ns{r.copied:>8.0%}" for r in results]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20, help="for each case (20)")
    parser.add_argument("--tokens-per-second", type=float, default=60_000, help="of the fake GPU (60000)")
    parser.add_argument("--latency", type=float, default=0.03, help="of each request to S3, in seconds (0.03)")
    parser.add_argument("--rows", type=int, default=20_000, help="in the data (20000)")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a row (1024)")
    parser.add_argument("--rows-per-step", type=int, default=32, help="of one rank (32)")
    parser.add_argument("--output", metavar="FILE", help="writes the results there as JSON")
    chosen = parser.parse_args()
    results = run(chosen.seconds, chosen.tokens_per_second, chosen.latency, chosen.rows, chosen.length, chosen.rows_per_step)
    print(table(results))  # noqa: T201
    if chosen.output:
        Path(chosen.output).write_text(json.dumps({"settings": vars(chosen), "results": [dataclasses.asdict(r) for r in results]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
