"""Rows from an S3 store that is slow, fails and lies: a real HTTP server, a proxy before it, and the loader as a rank uses it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.fs as pafs
import pytest

from tests.training.proxy import SLOW_DOWN, Fault, Proxy, Request, moto
from tests.unit.test_data_loading import copied, numbered, write
from training import shards
from training.data import Batches, PreparedData, open_data
from training.errors import BadInput, TrainingFailed

ROWS, LENGTH = 400, 16


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return write(tmp_path_factory.mktemp("near"), {"train": numbered(ROWS, LENGTH)}, LENGTH, shard_tokens=999)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, near: PreparedData) -> Iterator[str]:
    with moto(tmp_path_factory.mktemp("moto")) as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}.items():
            patch.setenv(name, value)
        fs = pafs.S3FileSystem(endpoint_override=address, scheme="http", region="us-west-2", allow_bucket_creation=True)
        fs.create_dir("bucket")
        pafs.copy_files(near.folder.path, "bucket/far", destination_filesystem=fs)
        yield address


@pytest.fixture
def proxy(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv(shards.CACHE_VARIABLE, str(tmp_path / "cache"))
    with Proxy(server) as proxy:
        yield proxy


def steps(prepared: PreparedData, count: int, global_batch: int = 8) -> list[list[list[int]]]:
    with Batches(prepared, "train", global_batch, 2, 1, 0, 5, 0, document_mask=False) as batches:
        return [[row for batch in next(batches).micro_batches for row in batch.input_ids.tolist()] for _ in range(count)]


def row_reads(proxy: Proxy) -> list[Request]:
    """What was asked of shards, without the copies of whole ones."""
    asked = [request for request in proxy.requests if request.method == "GET" and request.headers.get("range", "") and "train-" in request.path]
    return [request for request in asked if span(request) <= 4 * (LENGTH + 1)]


def span(request: Request) -> int:
    first, last = request.headers["range"].removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


def test_the_first_step_needs_its_own_rows_and_no_copy(proxy: Proxy, near: PreparedData) -> None:
    """Copies are held up at the store until the steps are there."""
    enough = threading.Event()

    def hold_copies(request: Request) -> Fault | None:
        copies = request.method == "GET" and "range" in request.headers and "train-" in request.path and span(request) > 4 * (LENGTH + 1)
        return Fault(gate=enough) if copies else None

    prepared = open_data(proxy.uri("bucket/far"))
    proxy.fault = hold_copies
    try:
        assert steps(prepared, 3) == steps(near, 3)
        assert not list(Path(shards.cache_folder(prepared.manifest.hash)).glob("*.bin"))
        assert proxy.most_at_once > 8, "one row after the other would wait a round trip for each"
    finally:
        enough.set()
    copied()
    before = len(proxy.requests)
    assert steps(prepared, 60) == steps(near, 60), "and in the second epoch"
    assert len(proxy.requests) == before, "what is copied is not asked for again"
    prepared.close()


def test_refusals_and_cut_connections_lose_no_row(proxy: Proxy, near: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shards.LIMIT_VARIABLE, "0")
    prepared = open_data(proxy.uri("bucket/far"))

    def often(request: Request) -> Fault | None:
        return Fault(refusal=SLOW_DOWN) if request.number % 3 == 0 else Fault(cut="after") if request.number % 7 == 0 else None

    proxy.fault = often
    assert steps(prepared, 3) == steps(near, 3)
    assert not list(Path(shards.cache_folder(prepared.manifest.hash)).glob("*.bin")), "nothing may be copied"
    prepared.close()


def test_a_store_that_stays_away_is_one_sentence(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PATIENCE", 0.3)
    prepared = open_data(proxy.uri("bucket/far"))
    proxy.fault = lambda _: Fault(refusal=SLOW_DOWN)
    with pytest.raises(TrainingFailed, match=r"could not be read for 0 seconds \(.*\); start the same command again when the store answers"):
        steps(prepared, 1)
    prepared.close()


def test_a_shard_that_is_damaged_on_its_way_is_copied_once_more_and_one_that_stays_so_ends_the_run(server: str, proxy: Proxy, near: PreparedData) -> None:
    fs = pafs.S3FileSystem(endpoint_override=server, scheme="http", region="us-west-2")
    pafs.copy_files(near.folder.path, "bucket/worse", destination_filesystem=fs)
    with fs.open_output_stream("bucket/worse/train-00002.bin") as stream:
        stream.write(np.zeros(999, "<u4").tobytes())
    prepared = open_data(proxy.uri("bucket/worse"))
    with pytest.raises(BadInput, match=r"train-00002.bin is damaged \(its SHA-256 is not the manifest's\)"):  # noqa: PT012
        prepared.row("train", 0)
        copied()
        steps(prepared, 1)
    assert len([request for request in proxy.requests if "train-00002" in request.path and request.method == "GET" and span(request) == 4 * 999]) == 2
    prepared.close()


def test_two_processes_of_a_host_copy_once(proxy: Proxy) -> None:
    """The lock is between processes as it is between two readers of one process."""
    readers = [open_data(proxy.uri("bucket/far")) for _ in range(2)]
    for prepared in readers:
        prepared.row("train", 0)
    copied()
    whole = [request.path for request in proxy.requests if request.method == "GET" and "train-" in request.path and span(request) > 4 * (LENGTH + 1)]
    assert len(whole) == len(set(whole)) == 7
    for prepared in readers:
        prepared.close()
