import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("triton", reason="the fast kernels need Triton, which PyTorch brings along on Linux")

from training.fast import block
from training.fast.products import Fp8Products, Products

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def model_of(kind, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=dtype)
    for name, p in model.named_parameters():  # biases of 0 and norms of 1 would hide a gradient that went the wrong way
        if p.ndim == 1:
            torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model.train().to(DEVICE)


def loss_and_gradients(model, ids):
    loss = torch.nn.functional.cross_entropy(model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def with_fast_blocks(model, products, recompute):
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        block.install(layer, model.config, products(), recompute)
    return model


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_fast_block_gives_the_loss_and_every_gradient_of_transformers_own(kind, recompute):
    reference = model_of(kind)
    ids = torch.randint(0, 128, (2, 17), device=DEVICE)
    loss, gradients = loss_and_gradients(reference, ids)
    fast_loss, fast_gradients = loss_and_gradients(with_fast_blocks(reference, Products, recompute), ids)
    assert fast_loss == pytest.approx(loss, rel=1e-6)
    for name, g in gradients.items():
        error = (fast_gradients[name] - g).norm() / g.norm()
        assert error < 1e-5, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_fp8_products_stay_near_the_bf16_gradients(recompute):
    reference = model_of("qwen2", torch.bfloat16)
    ids = torch.randint(0, 128, (2, 17), device=DEVICE)
    loss, gradients = loss_and_gradients(reference, ids)
    fast = with_fast_blocks(reference, Fp8Products, recompute)
    first_loss, _ = loss_and_gradients(fast, ids)
    fast_loss, fast_gradients = loss_and_gradients(fast, ids)  # scales from the step before, from here on
    assert first_loss == pytest.approx(loss, rel=2e-2)
    assert fast_loss == pytest.approx(loss, rel=2e-2)
    for name, g in gradients.items():
        error = (fast_gradients[name].float() - g.float()).norm() / g.float().norm()
        assert error < 0.5, f"{name}: relative error {error:.2e}"


def test_what_fp8_remembers_of_a_tensor_stays_where_a_recorded_step_looks_for_it():
    products = Fp8Products()
    products._note("activation", torch.tensor([2.0]))
    place = products._seen["activation"]
    products._note("activation", torch.tensor([3.0]))
    assert products._seen["activation"] is place, "a replayed graph reads and writes the place it was recorded with"
    assert place.item() == 3.0
    products._note("activation", torch.tensor([1.0]))
    assert place.item() == pytest.approx(3.0 * Fp8Products.FADE), "it fades"
