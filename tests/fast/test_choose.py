import pytest
import torch
from transformers import AutoConfig

from training.errors import BadInput
from training.fast.choose import choose

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}


def config(kind="qwen2", **more):
    return AutoConfig.for_model(kind, **{**SIZES, **more})


def picked(device=GPU, blocks="auto", precision="auto", row_length=128, document_mask=False, **more):
    kind = more.pop("kind", "qwen2")
    return choose(config(kind, **more), device, blocks, precision, row_length, document_mask)


@pytest.fixture
def capability(monkeypatch):
    def be(major, minor, name="NVIDIA X"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device=None: name)

    return be


def test_on_a_gpu_known_blocks_are_fast_and_others_compiled_with_the_reason():
    assert picked().blocks == "fast"
    assert picked(kind="llama").blocks == "fast"
    other = picked(kind="qwen3")
    assert (other.blocks, other.fp8) == ("compiled", False)
    assert "qwen3" in other.why


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"document_mask": True}, "documentMask"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "sliding window"),
        ({"attention_dropout": 0.1}, "dropout"),
        ({"kind": "llama", "attention_bias": True}, "bias"),
        ({"kind": "llama", "mlp_bias": True}, "bias"),
        ({"hidden_act": "gelu"}, "activation"),
    ],
)
def test_what_the_fast_block_does_not_compute_runs_the_default_way(more, reason):
    pieces = picked(**more)
    assert pieces.blocks == "compiled"
    assert reason in pieces.why
    with pytest.raises(BadInput, match="blocks = fast"):
        picked(**more, blocks="fast")


def test_on_a_cpu_blocks_are_plain():
    assert picked(CPU).blocks == "plain"
    assert not picked(CPU, precision="fp8").fp8


@pytest.mark.parametrize(("major", "minor", "has"), [(8, 0, False), (8, 6, False), (8, 9, True), (9, 0, True)])
def test_fp8_is_used_from_ada_on_and_else_a_sentence_says_why_not(capability, major, minor, has):
    capability(major, minor, "NVIDIA Y")
    pieces = picked(precision="fp8")
    assert pieces.fp8 is has
    if not has:
        assert f"bf16 instead of fp8: NVIDIA Y (compute capability {major}.{minor}) has no fp8" in str(pieces)


def test_fp8_needs_fast_blocks_and_sizes_that_tensor_cores_take(capability):
    capability(9, 0)
    assert "only blocks = fast has it" in picked(precision="fp8", blocks="compiled").why
    assert "a size of 120 is not a multiple of 16" in picked(precision="fp8", row_length=120).why
    assert not picked(precision="fp8", kind="qwen3").fp8
