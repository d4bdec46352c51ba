"""Packing: every token predicted exactly once, order kept, nothing invented; and shards that never claim to be whole."""

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import training
from training.errors import TrainingFailed
from training.packing import IGNORED, ShardWriter, cut, dropped_from, joined, rows_in, token_dtype
from training.storage import place

EOS = 0
ROOT = Path(training.__file__).parents[1]
DOCUMENTS = st.lists(st.lists(st.integers(1, 60000), max_size=30), min_size=1, max_size=20)


def stream_of(documents):
    return joined([(document, True) for document in documents], EOS, "<u2")


def rows_of(stream, length):
    return np.array([stream[i * length : i * length + length + 1] for i in range(rows_in(len(stream), length))], dtype=np.int64).reshape(-1, length + 1)


@given(documents=DOCUMENTS)
def test_the_stream_is_every_document_in_order_each_with_an_end(documents):
    expected = [token for document in documents for token in [*document, EOS]]
    assert stream_of(documents).tolist() == expected


@given(document=st.lists(st.integers(1, 60000), min_size=1, max_size=30), at=st.integers(0, 30))
def test_a_document_in_parts_has_one_end(document, at):
    assert joined([(document[:at], False), (document[at:], True)], EOS, "<u2").tolist() == [*document, EOS]


@given(documents=DOCUMENTS, length=st.integers(2, 40))
def test_every_token_is_predicted_exactly_once(documents, length):
    stream = stream_of(documents).astype(np.int64)
    inputs, labels, positions = cut(rows_of(stream, length), EOS, document_mask=False)
    used = rows_in(len(stream), length) * length
    assert inputs.ravel().tolist() == stream[:used].tolist(), "inputs are the stream, in order"
    assert labels.ravel().tolist() == stream[1 : used + 1].tolist(), "labels are the stream one further, in order"
    assert inputs.shape == labels.shape == (used // length, length), "rows have one length, without padding"
    assert positions is None
    dropped = dropped_from(len(stream), length)
    assert dropped <= length, "only what fills no row is dropped"
    assert len(stream) == (used + 1 if used else 0) + dropped


@given(documents=DOCUMENTS, length=st.integers(2, 40))
def test_with_a_document_mask_no_document_predicts_the_next(documents, length):
    rows = rows_of(stream_of(documents), length)
    inputs, labels, positions = cut(rows, EOS, document_mask=True)
    for row, asked, label, place_ in zip(rows, inputs, labels, positions, strict=True):
        expected_place = 0
        for t, token in enumerate(asked):
            assert place_[t] == expected_place, "positions count from the last document's end, or the row's start"
            assert label[t] == (IGNORED if token == EOS else row[t + 1])
            expected_place = 0 if token == EOS else expected_place + 1


@given(tokens=st.integers(0, 500), length=st.integers(2, 60))
def test_rows_are_as_many_as_fit(tokens, length):
    rows = rows_in(tokens, length)
    assert rows * length + 1 <= tokens or rows == 0
    assert (rows + 1) * length + 1 > tokens


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.lists(st.integers(0, 65535), max_size=40), max_size=12), shard_tokens=st.integers(1, 50))
def test_shards_put_together_are_the_stream(parts, shard_tokens):
    with tempfile.TemporaryDirectory() as folder:
        writer = ShardWriter(place(folder), "train", "uint16", shard_tokens, 8)
        for part in parts:
            writer.write(np.array(part, dtype=np.uint16), documents=1)
        split = writer.finish()
        data = [(Path(folder) / shard.file).read_bytes() for shard in split.shards]
        stream = [token for part in parts for token in part]
        assert np.frombuffer(b"".join(data), "<u2").tolist() == stream
        assert [len(d) for d in data[:-1]] == [2 * shard_tokens] * max(0, len(data) - 1), "all but the last are full"
        assert [hashlib.sha256(d).hexdigest() for d in data] == [shard.sha256 for shard in split.shards]
        assert split.sha256 == hashlib.sha256(b"".join(data)).hexdigest(), "the stream's hash does not depend on the shards"
        assert (split.tokens, split.documents) == (len(stream), len(parts))
        assert sorted(os.listdir(folder)) == [shard.file for shard in split.shards], "no empty shard, nothing else"


def test_large_vocabularies_take_four_bytes_a_token():
    assert (token_dtype(65536), token_dtype(65537)) == ("uint16", "uint32")


FILL = """
import resource, sys
import numpy as np
from training.errors import TrainingFailed
from training.packing import ShardWriter
from training.storage import place
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
writer = ShardWriter(place(sys.argv[1]), "train", "uint16", 2**20, 8)
try:
    for _ in range(100):
        writer.write(np.ones(4096, dtype=np.uint16), documents=1)
    writer.finish()
except TrainingFailed as error:
    writer.abandon()
    print(error)
    sys.exit(error.exit_code)
"""


def test_no_room_for_a_shard_is_one_sentence_and_exit_3(tmp_path):
    """The kernel itself refuses the write, here through the process's own limit on file sizes."""
    done = subprocess.run([sys.executable, "-c", FILL, str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/train-00000.bin: no room to write on ({os.strerror(errno.EFBIG)})")
    assert "free some space" in done.stdout
    assert done.stderr == ""


def test_an_error_that_is_no_full_disk_is_not_called_one(tmp_path):
    writer = ShardWriter(place(str(tmp_path / "missing")), "train", "uint16", 100, 8)
    with pytest.raises(TrainingFailed, match=r"missing/train-00000.bin: can't be written \(No such file or directory\)"):
        writer.write(np.ones(4, dtype=np.uint16), documents=1)
