"""The loader: rows by number, one order for every world size, and folders that are not what they should be."""

import json
import tempfile
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training import data, shards
from training.data import Batches, Manifest, Source, eval_batches, open_data
from training.errors import BadInput
from training.packing import IGNORED, ShardWriter
from training.permutation import permuted
from training.storage import place

LENGTH = 4
EOS = 2**20 - 1


def write(folder, streams, length=LENGTH, shard_tokens=1024, dtype="uint32", eos=EOS):
    """A folder as `prepare` leaves it, with the given token streams."""
    at = place(str(folder))
    at.make_folder()
    splits = {}
    for name, stream in streams.items():
        writer = ShardWriter(at, name, dtype, shard_tokens, length)
        writer.write(np.asarray(stream), documents=1)
        splits[name] = writer.finish()
    manifest = Manifest(length, 2**20, eos, "hash", dtype, splits, (Source("text", 1, 1, "sha"),), {"sequenceLength": length}, "inputs")
    (at / data.MANIFEST).write_json(manifest.as_json())
    return open_data(str(folder))


def numbered(rows, length=LENGTH, tail=0):
    """A stream whose row i starts with the token i * length, so that a row tells its number."""
    return np.arange(rows * length + 1 + tail)


def rows_taken(step):
    """The numbers of the rows in a rank's step, in order, without those that only fill the shape."""
    inputs = torch.cat([batch.input_ids for batch in step.micro_batches])
    labels = torch.cat([batch.labels for batch in step.micro_batches])
    return [int(row[0]) // LENGTH for row, label in zip(inputs, labels, strict=True) if (label != IGNORED).any()]


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 30), length=st.integers(2, 20), tail=st.integers(0, 1), shard_tokens=st.integers(5, 99), dtype=st.sampled_from(["uint16", "uint32"]))
def test_a_row_is_the_same_however_the_stream_is_cut_into_shards(rows, length, tail, shard_tokens, dtype):
    stream = numbered(rows, length, tail)
    with tempfile.TemporaryDirectory() as folder:
        prepared = write(folder, {"train": stream}, length, shard_tokens, dtype)
        assert prepared.rows("train") == rows
        for i in range(rows):
            row = prepared.row("train", i)
            assert row.dtype == np.int64
            assert row.tolist() == stream[i * length : i * length + length + 1].tolist()
        with pytest.raises(IndexError):
            prepared.row("train", rows)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    global_batch=st.integers(1, 17),
    micro_batch=st.integers(1, 5),
    world=st.integers(1, 7),
    seed=st.integers(0, 100),
    start=st.integers(0, 20),
)
def test_every_world_reads_the_same_global_batches(rows, global_batch, micro_batch, world, seed, start):
    with tempfile.TemporaryDirectory() as folder:
        prepared = write(folder, {"train": numbered(rows)})
        per_rank = []
        for rank in range(world):
            with Batches(prepared, "train", global_batch, micro_batch, world, rank, seed, start, document_mask=False) as batches:
                per_rank.append([next(batches) for _ in range(2)])
        for number in range(2):
            steps = [rank[number] for rank in per_rank]
            assert [step.index for step in steps] == [start + number] * world
            together = [0] * global_batch
            for rank, step in enumerate(steps):
                together[rank::world] = rows_taken(step)
            samples = range((start + number) * global_batch, (start + number + 1) * global_batch)
            expected = [int(permuted(n % rows, rows, seed, n // rows)) for n in samples]
            assert together == expected, "the ranks together are the global batch, in its order"
            assert len({len(step.micro_batches) for step in steps}) == 1, "ranks with other counts would wait for each other for ever"
            assert all(batch.input_ids.shape == batch.labels.shape == (micro_batch, LENGTH) for step in steps for batch in step.micro_batches)
            assert sum(step.valid_tokens for step in steps) == global_batch * LENGTH


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 40), global_batch=st.integers(1, 9), stop=st.integers(1, 8), first=st.integers(1, 4), second=st.integers(1, 5))
def test_another_world_goes_on_where_the_first_one_stopped(rows, global_batch, stop, first, second):
    def read(world, start, count):
        taken = []
        ranks = [Batches(prepared, "train", global_batch, 2, world, rank, 5, start, document_mask=False) for rank in range(world)]
        for _ in range(count):
            step = [0] * global_batch
            for rank, batches in enumerate(ranks):
                step[rank::world] = rows_taken(next(batches))
            taken += step
        for batches in ranks:
            batches.close()
        return taken

    with tempfile.TemporaryDirectory() as folder:
        prepared = write(folder, {"train": numbered(rows)})
        assert read(first, 0, stop) + read(second, stop, 10 - stop) == read(1, 0, 10)


@pytest.mark.parametrize("rows", [1, 7, 13])
def test_an_epoch_is_every_row_once_and_the_next_one_has_another_order(tmp_path, rows):
    prepared = write(tmp_path, {"train": numbered(rows)})
    with Batches(prepared, "train", 3, 2, 1, 0, 1, 0, document_mask=False) as batches:
        taken = [row for _ in range(rows) for row in rows_taken(next(batches))]
    epochs = [taken[i * rows : (i + 1) * rows] for i in range(3)]
    assert all(Counter(epoch) == Counter(range(rows)) for epoch in epochs)
    assert rows == 1 or epochs[0] != epochs[1]


def test_the_labels_are_the_tokens_that_follow(tmp_path):
    prepared = write(tmp_path, {"train": [5, 6, EOS, 7, 8, 9, EOS, 1, 2]})
    with Batches(prepared, "train", 2, 2, 1, 0, 0, 0, document_mask=False) as plain:
        step = next(plain)
    rows = {tuple(i): tuple(t) for i, t in zip(step.micro_batches[0].input_ids.tolist(), step.micro_batches[0].labels.tolist(), strict=True)}
    assert rows == {(5, 6, EOS, 7): (6, EOS, 7, 8), (8, 9, EOS, 1): (9, EOS, 1, 2)}
    assert step.micro_batches[0].position_ids is None
    assert step.valid_tokens == 8
    with Batches(prepared, "train", 2, 2, 1, 0, 0, 0, document_mask=True) as masked:
        step = next(masked)
    batch = step.micro_batches[0]
    rows = {tuple(i): (tuple(t), tuple(p)) for i, t, p in zip(batch.input_ids.tolist(), batch.labels.tolist(), batch.position_ids.tolist(), strict=True)}
    assert rows == {(5, 6, EOS, 7): ((6, EOS, IGNORED, 8), (0, 1, 2, 0)), (8, 9, EOS, 1): ((9, EOS, IGNORED, 2), (0, 1, 2, 0))}
    assert step.valid_tokens == 6, "what is not trained on does not count"
    assert {t.dtype for t in batch} == {torch.int64}


def test_a_rank_without_a_sample_still_takes_part(tmp_path):
    prepared = write(tmp_path, {"train": numbered(10)})
    with Batches(prepared, "train", 2, 3, 4, 3, 0, 0, document_mask=True) as batches:
        step = next(batches)
    assert step.valid_tokens == 0
    assert [batch.labels.tolist() for batch in step.micro_batches] == [[[IGNORED] * LENGTH] * 3]
    assert step.micro_batches[0].input_ids.max() < 2**20, "filling rows hold ids that every model has"


@pytest.mark.parametrize(("asked", "world", "micro_batch"), [(100, 1, 4), (5, 2, 2), (7, 3, 1), (2, 3, 2), (0, 2, 2)])
def test_evaluation_takes_each_row_once_over_all_ranks_spread_over_the_split(tmp_path, asked, world, micro_batch):
    prepared = write(tmp_path, {"train": numbered(2), "eval": numbered(7)})
    per_rank = [list(eval_batches(prepared, asked, micro_batch, world, rank, document_mask=False)) for rank in range(world)]
    assert len({len(batches) for batches in per_rank}) == 1, "ranks with other counts would wait for each other for ever"
    rows = [int(row[0]) // LENGTH for batches in per_rank for b in batches for row, label in zip(b.input_ids, b.labels, strict=True) if (label >= 0).all()]
    count = min(asked, 7)
    assert sorted(rows) == [i * 7 // count for i in range(count)]


def test_data_without_an_eval_split_evaluates_nothing(tmp_path):
    prepared = write(tmp_path, {"train": numbered(2)})
    assert prepared.rows("eval") == 0
    assert list(eval_batches(prepared, 5, 2, 1, 0, document_mask=False)) == []


def test_an_error_while_reading_ahead_reaches_the_caller(tmp_path):
    prepared = write(tmp_path, {"train": numbered(5)})
    (tmp_path / "train-00000.bin").unlink()
    with Batches(prepared, "train", 2, 1, 1, 0, 0, 0, document_mask=False) as batches, pytest.raises(FileNotFoundError, match="train-00000"):
        next(batches)


def test_closing_ends_the_thread_and_the_steps(tmp_path):
    prepared = write(tmp_path, {"train": numbered(5)})
    batches = Batches(prepared, "train", 2, 1, 1, 0, 0, 0, document_mask=False)
    assert any(thread.name.startswith("prefetch") for thread in threading.enumerate()), "steps are read ahead in a thread"
    assert next(batches).wait_seconds >= 0
    batches.close()
    batches.close()
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())
    with pytest.raises(StopIteration):
        next(batches)


def test_a_split_without_a_row_is_refused(tmp_path):
    prepared = write(tmp_path, {"train": [1, 2]})
    with pytest.raises(BadInput, match="no train row; prepare it with more text"):
        Batches(prepared, "train", 2, 1, 1, 0, 0, 0, document_mask=False)


# Folders that are not what they should be


def test_a_manifest_survives_being_written_and_read(tmp_path):
    prepared = write(tmp_path, {"train": numbered(5), "eval": numbered(2)})
    again = Manifest.from_json(json.loads(json.dumps(prepared.manifest.as_json())))
    assert again == prepared.manifest
    assert again.hash == prepared.manifest.hash


def test_the_hash_follows_the_rows_and_nothing_else(tmp_path):
    one = write(tmp_path / "one", {"train": numbered(50)}, shard_tokens=1024).manifest
    elsewhere = write(tmp_path / "two", {"train": numbered(50)}, shard_tokens=7).manifest
    assert one.hash == elsewhere.hash, "neither the folder nor the size of the shards is part of it"
    assert one.hash != write(tmp_path / "three", {"train": numbered(51)}).manifest.hash
    assert one.hash != write(tmp_path / "four", {"train": numbered(100, 2)}, length=2).manifest.hash
    assert one.hash != write(tmp_path / "five", {"train": numbered(50)}, eos=3).manifest.hash, "with a document mask it decides the labels"


def refusal(folder):
    with pytest.raises(BadInput) as raised:
        open_data(str(folder))
    return str(raised.value)


def test_a_missing_folder_is_told(tmp_path):
    assert refusal(tmp_path / "no") == f"data = {tmp_path}/no: no such folder; give the output of `python -m training.prepare`"


def test_a_folder_without_a_manifest_is_unfinished(tmp_path):
    write(tmp_path, {"train": numbered(5)})
    (tmp_path / "manifest.json").unlink()
    assert "no manifest.json in it, so it is unfinished" in refusal(tmp_path)


@pytest.mark.parametrize("size", [0, 83, 85])
def test_a_shard_of_another_size_is_damaged(tmp_path, size):
    write(tmp_path, {"train": numbered(5)})
    (tmp_path / "train-00000.bin").write_bytes(bytes(size))
    told = refusal(tmp_path)
    assert f"train-00000.bin is damaged ({size} bytes, the manifest says 84)" in told
    assert "run `python -m training.prepare` again" in told


def test_a_missing_shard_is_told(tmp_path):
    write(tmp_path, {"train": numbered(5), "eval": numbered(1)})
    (tmp_path / "eval-00000.bin").unlink()
    assert "eval-00000.bin is damaged (it is missing)" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}', '{"schema": 1}', '{"schema": 1, "splits": 3}', '{"schema": null}'])
def test_a_manifest_that_is_none_is_one_sentence(tmp_path, content):
    write(tmp_path, {"train": numbered(5)})
    (tmp_path / "manifest.json").write_text(content)
    told = refusal(tmp_path)
    assert "manifest.json" in told
    assert "delete the folder" in told
    assert "\n" not in told


# Folders elsewhere


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """Prepared data behind a URI, and a cache of its own."""
    monkeypatch.setenv(shards.CACHE_VARIABLE, str(tmp_path / "cache"))
    uri = f"memory://{tmp_path.name}/far"
    write(uri, {"train": numbered(30)}, shard_tokens=50)
    yield uri
    place(uri).delete()


def overwrite(uri, file):
    shard = place(uri) / file
    shard.write_bytes(bytes(shard.info().size))


def copied():
    """Waits until nothing is copied any more."""
    for thread in threading.enumerate():
        if thread.name == "copying":
            thread.join()


def numbers_of(prepared):
    return prepared.read("train", np.arange(30))[:, 0].tolist()


def test_remote_rows_are_there_at_once_and_come_from_this_hosts_copy_later(tmp_path, remote):
    prepared = open_data(remote)
    assert not prepared.folder.local
    assert [prepared.row("train", i).tolist() for i in range(30)] == [list(range(4 * i, 4 * i + 5)) for i in range(30)]
    copied()
    for number in range(3):
        overwrite(remote, f"train-0000{number}.bin")
    assert numbers_of(prepared) == [4 * i for i in range(30)], "it goes over to the copy"
    assert numbers_of(open_data(remote)) == [4 * i for i in range(30)], "so does another process of the host"


def test_data_of_one_shard_goes_over_to_its_copy_though_other_files_lie_beside_it(tmp_path, remote):
    place(remote).delete()
    prepared = write(remote, {"train": numbered(30)})
    (shards.cache_folder(prepared.manifest.hash)).mkdir(parents=True)
    for name in ("a.part", "b.lock"):
        (shards.cache_folder(prepared.manifest.hash) / name).touch()
    prepared.row("train", 0)
    copied()
    overwrite(remote, "train-00000.bin")
    assert numbers_of(prepared) == [4 * i for i in range(30)]


def test_a_remote_shard_with_other_content_is_damaged(tmp_path, remote):
    overwrite(remote, "train-00001.bin")
    prepared = open_data(remote)
    # The first read begins the copying, and may be told already what that has found.
    with pytest.raises(BadInput, match=r"train-00001.bin is damaged \(its SHA-256 is not the manifest's\)"):  # noqa: PT012
        prepared.row("train", 0)
        copied()
        prepared.row("train", 0)
    assert [path for path in Path(tmp_path / "cache").rglob("*") if path.suffix == ".part"] == []


def test_a_token_beyond_the_vocabulary_is_damage_that_no_model_gets_to_see(tmp_path):
    write(tmp_path, {"train": [1, 2, 3, 4, 5]})
    (tmp_path / "train-00000.bin").write_bytes(np.array([1, 2, 2**20, 4, 5], "<u4").tobytes())
    with pytest.raises(BadInput, match=r"the train split is damaged \(it holds token 1,048,576, the vocabulary has 1,048,576\)"):
        open_data(str(tmp_path)).row("train", 0)


@pytest.mark.parametrize(("limit", "copies"), [("0", 0), (str(450 / 2**30), 2), ("1", 3)])
def test_copies_take_no_more_room_than_they_may(tmp_path, remote, limit, copies, monkeypatch):
    """Shards of 200, 200 and 84 bytes."""
    monkeypatch.setenv(shards.LIMIT_VARIABLE, limit)
    prepared = open_data(remote)
    prepared.row("train", 0)
    copied()
    assert len(list(Path(tmp_path / "cache").rglob("*.bin"))) == copies
    assert numbers_of(prepared) == [4 * i for i in range(30)], "what has no room here comes from afar"


def test_what_is_copied_of_other_data_counts_too(tmp_path, remote, monkeypatch):
    (tmp_path / "cache" / "other").mkdir(parents=True)
    (tmp_path / "cache" / "other" / "0.bin").write_bytes(bytes(300))
    monkeypatch.setenv(shards.LIMIT_VARIABLE, str(450 / 2**30))
    open_data(remote).row("train", 0)
    copied()
    assert [path.name for path in Path(tmp_path / "cache").rglob("*.bin")] == ["0.bin"]


@pytest.mark.parametrize("limit", ["much", "-1", "nan", ""])
def test_a_limit_that_is_no_number_is_told(remote, limit, monkeypatch):
    monkeypatch.setenv(shards.LIMIT_VARIABLE, limit)
    with pytest.raises(BadInput, match=f"{shards.LIMIT_VARIABLE} = '{limit}' is no number of GiB"):
        open_data(remote).row("train", 0)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 40), length=st.integers(2, 9), shard_tokens=st.integers(5, 99), limit=st.sampled_from([0, 100, 10**6]), micro_batch=st.integers(1, 3)
)
def test_the_order_is_the_same_from_afar(rows, length, shard_tokens, limit, micro_batch):
    def steps(prepared):
        with Batches(prepared, "train", 4, micro_batch, 2, 1, 3, 1, document_mask=False) as batches:
            return [[batch.input_ids.tolist() for batch in next(batches).micro_batches] for _ in range(6)]

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(shards.CACHE_VARIABLE, f"{folder}/cache")
        patch.setenv(shards.LIMIT_VARIABLE, str(limit / 2**30))
        uri = f"memory://{Path(folder).name}/far"
        far = write(uri, {"train": numbered(rows, length)}, length, shard_tokens)
        assert steps(far) == steps(write(f"{folder}/near", {"train": numbered(rows, length)}, length, shard_tokens))
        far.close()
        place(uri).delete()


def test_a_cache_that_cannot_be_written_is_told(tmp_path, remote, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(shards.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(BadInput, match=f"set {shards.CACHE_VARIABLE} to another folder"):
        open_data(remote).row("train", 0)
