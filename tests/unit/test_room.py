import pytest

from training.errors import BadInput
from training.flops import ModelShape
from training.plan import Cluster, Fixed, choose, machine
from training.room import FILE, too_large
from training.sizes import NAMED_SIZES
from training.storage import place

QWEN = ModelShape.of(NAMED_SIZES["qwen2.5-1.5b"])


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
