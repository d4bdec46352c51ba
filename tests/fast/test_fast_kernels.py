"""Each kernel against the same arithmetic by PyTorch in float32."""

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="the fast kernels need Triton, which PyTorch brings along on Linux")

from training.fast import kernels

# Triton's interpreter (3.7) loses the carry where rounding to fp8 reaches the next power of two: 127.9 becomes 64.
CARRIES = torch.cuda.is_available()
FP8 = {"e4m3": (torch.float8_e4m3fn, 2**-4), "e5m2": (torch.float8_e5m2, 2**-3)}


def relative(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize("words", [7, 512, 1000])
@pytest.mark.parametrize("chunk_of_others", [False, True])
def test_cross_entropy_and_its_gradient_are_those_of_pytorch(device, words, chunk_of_others):
    torch.manual_seed(words)
    logits = torch.randn(13, words, device=device) * 4
    labels = torch.randint(0, words, (13,), device=device)
    labels[::5] = -100
    if chunk_of_others:
        labels[:] = -100
    reference = logits.clone().requires_grad_()
    losses = F.cross_entropy(reference, labels, ignore_index=-100, reduction="none")
    losses.sum().backward()
    found = kernels.cross_entropy_(logits, labels, -100, True)
    torch.testing.assert_close(found, losses.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, reference.grad, rtol=1e-5, atol=1e-6)


def test_without_a_gradient_the_logits_stay_as_they_are(device):
    logits = torch.randn(3, 40, device=device)
    before = logits.clone()
    kernels.cross_entropy_(logits, torch.zeros(3, dtype=torch.int64, device=device), -100, False)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("rows", [1, 5, 37])
def test_rms_norm_forward_and_backward_are_those_of_autograd(device, rows):
    torch.manual_seed(rows)
    x, add, past, dy = (torch.randn(rows, 24, device=device) for _ in range(4))
    w = torch.rand(24, device=device)
    peak = torch.zeros(1, device=device)
    total, y, rstd = kernels.rms_norm_forward(x, w, 1e-6, add, peak)
    reference, weight = (x + add).requires_grad_(), w.clone().requires_grad_()
    expected = F.rms_norm(reference, (24,), weight, 1e-6)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-5, atol=1e-6)
    assert peak.item() == pytest.approx(expected.abs().max().item(), rel=1e-5)
    torch.testing.assert_close(kernels.rms_norm_again(total, w, rstd), y, rtol=1e-6, atol=1e-6)
    expected.backward(dy)
    dx, dw = kernels.rms_norm_backward(dy, total, w, rstd, past)
    torch.testing.assert_close(dx, reference.grad + past, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dw, weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(FP8))
@pytest.mark.parametrize("shape", [(16, 32), (70, 130), (129, 65)])
def test_both_layouts_of_an_fp8_matrix_hold_it_to_half_a_unit_of_its_last_place(device, kind, shape):
    torch.manual_seed(shape[0])
    dtype, unit = FP8[kind]
    x = torch.randn(*shape, device=device)
    rows, cols = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape[::-1], dtype=dtype, device=device)
    scale = kernels.quantise(x, x.abs().max().view(1), dtype, rows, cols)
    for back in (rows.float() * scale, cols.float().t() * scale):
        # Half a unit of the last place, and by way of bf16 a little more; below the smallest normal number the error is absolute.
        bound = (unit * 1.1 * x.abs()).clamp(min=scale.item() * 2**-6)
        wrong = (back - x).abs() > bound
        if not CARRIES:
            wrong &= (torch.log2(x.abs() / scale) % 1) < 0.8
        assert not wrong.any()


@pytest.mark.parametrize("shape", [(16, 16), (70, 130)])
def test_swiglu_written_in_fp8_at_once_is_swiglu_written_and_then_quantised(device, shape):
    torch.manual_seed(3)
    gate_up = torch.randn(shape[0], 2 * shape[1], device=device, dtype=torch.bfloat16)
    gate, up = gate_up.chunk(2, dim=1)
    dy = torch.randn(shape, device=device, dtype=torch.bfloat16)
    limit, peak = torch.full((1,), 40.0, device=device), torch.zeros(1, device=device)
    y = F.silu(gate.float()) * up.float()
    rows, cols, scale = kernels.swiglu_forward_scaled(gate, up, limit, peak, torch.float8_e4m3fn)
    assert peak.item() == pytest.approx(y.abs().max().item(), rel=1e-3)
    assert relative(rows.float() * scale, y) < (0.03 if CARRIES else 0.12)
    assert relative(cols.float().t() * scale, y) < (0.03 if CARRIES else 0.12)
    g, u = gate.float().requires_grad_(), up.float().requires_grad_()
    (F.silu(g) * u).backward(dy.float())
    rows, cols, scale = kernels.swiglu_backward_scaled(gate, up, dy, limit, peak, torch.float8_e5m2)
    expected = torch.cat((g.grad, u.grad), dim=1)
    assert relative(rows.float() * scale, expected) < (0.06 if CARRIES else 0.2)
    assert relative(cols.float().t() * scale, expected) < (0.06 if CARRIES else 0.2)


def test_what_exceeds_the_expected_limit_is_clipped_and_reported(device):
    gate_up = torch.full((16, 32), 8.0, device=device, dtype=torch.bfloat16)
    limit, peak = torch.full((1,), 4.0, device=device), torch.zeros(1, device=device)
    rows, _, scale = kernels.swiglu_forward_scaled(*gate_up.chunk(2, dim=1), limit, peak, torch.float8_e4m3fn)
    assert torch.isfinite(rows.float()).all()
    assert (rows.float() * scale).max().item() == pytest.approx(4.0, rel=1e-3)
    assert peak.item() == pytest.approx(8 * 8 / (1 + 2.718281828**-8), rel=1e-3)
