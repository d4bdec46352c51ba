import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.errors import BadInput
from training.flops import ModelShape
from training.plan import Cluster, Fixed, choose, machine, micro_batches
from training.room import FILE, largest_that_fits, too_large
from training.sizes import NAMED_SIZES
from training.storage import place

QWEN = ModelShape.of(NAMED_SIZES["qwen2.5-1.5b"])


@given(st.integers(1, 64), st.integers(0, 80))
def test_the_largest_micro_batch_that_fits_is_found_without_trying_smaller_ones(rows, room):
    tried = []

    def attempt(size):
        tried.append(size)
        if size > room:
            raise torch.OutOfMemoryError("CUDA out of memory")

    sizes = micro_batches(1, rows)[::-1]
    found = largest_that_fits(sizes, attempt)
    fitting = [size for size in sizes if size <= room]
    assert found == (fitting[0] if fitting else None)
    assert tried == sizes[: len(tried)], "from the largest down"
    assert not [size for size in tried if found is not None and size < found], "once one fits nothing smaller is tried"


def test_another_error_than_lack_of_memory_is_not_taken_for_it():
    def attempt(_size):
        raise RuntimeError("a kernel is broken")

    with pytest.raises(RuntimeError, match="broken"):
        largest_that_fits([4, 2], attempt)


def test_what_did_not_fit_is_not_planned_again(tmp_path):
    cluster = Cluster(1, 1, machine("NVIDIA H200"))
    planned, _ = choose(QWEN, cluster, 64 * 2048, 2048)
    folder = place(str(tmp_path))
    assert too_large(folder) is None
    (folder / FILE).write_json({"rows": planned.micro_batch, "length": 2048, "workers": 1})
    again, _ = choose(QWEN, cluster, 64 * 2048, 2048, Fixed(micro_batch_below=too_large(folder)))
    assert again.micro_batch < planned.micro_batch


def test_when_not_even_one_row_fits_the_way_out_is_told():
    with pytest.raises(BadInput, match=r"one row did not fit.*activationCheckpointing"):
        choose(QWEN, Cluster(1, 1, machine("NVIDIA H200")), 8 * 2048, 2048, Fixed(micro_batch_below=1))
