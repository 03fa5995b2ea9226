"""Products of matrices by torch and by oneDNN, compared with numpy's in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from axonmpi import matmul
from axonmpi.launch.settings import wanted_matmul
from axonmpi.utils.memory import REUSED_BYTES, ReusedMemory, _Kept, gradient_memory, set_gradient_memory
from axonmpi.wrapping.linear import linear

LIBRARIES = pytest.mark.parametrize("library", ["torch", "onednn"], indirect=True)
TOLERANCE = 1e-5


@pytest.fixture
def library(request, monkeypatch):
    """Leave products to one library, and count those of oneDNN."""
    counted = []
    compute = matmul._onednn
    monkeypatch.setattr(matmul, "onednn_is_quicker", lambda: request.param == "onednn")
    monkeypatch.setattr(matmul, "_onednn", lambda *tensors: counted.append(tensors) or compute(*tensors))
    yield request.param
    if request.param == "torch":
        assert not counted


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LAYOUTS = {
    "contiguous": lambda *shape: numbers(*shape),
    "transposed": lambda *shape: numbers(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2),
    "expanded": lambda *shape: numbers(*shape[:-1], 1).expand(shape),
    "one row for all": lambda *shape: numbers(shape[-1]).expand(shape),
    "one number for all": lambda *shape: numbers(1).expand(shape),
    "every second": lambda *shape: numbers(*shape[:-1], 2 * shape[-1])[..., ::2],
    "part of a row": lambda *shape: numbers(*shape[:-1], shape[-1] + 3)[..., 1:-2],
}


def assert_is_product(found: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> None:
    expected = left.double().numpy() @ right.double().numpy()
    if bias is not None:
        expected = expected + bias.double().numpy()
    scale = np.sqrt(left.shape[-1]) + 1
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=TOLERANCE, atol=TOLERANCE * scale)


@LIBRARIES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(16,), (5, 9), (67,), (2, 3, 7), (0,), (1,)], ids=str)
def test_values(library, layout, shape):
    x, w, b = LAYOUTS[layout](*shape, 384), LAYOUTS[layout](448, 384), numbers(448, seed=1)
    assert_is_product(matmul.linear(x, w, b), x, w.t(), b)
    assert_is_product(matmul.linear(x, w), x, w.t())
    y = LAYOUTS[layout](*shape, 448)
    assert_is_product(matmul.product(y, w), y, w)


@LIBRARIES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(16, 448, 384), (1, 448, 384), (40, 3000, 128), (33, 64, 64)], ids=str)
def test_gradients_of_weights(library, layout, sizes):
    rows, out, features = sizes
    weight = nn.Parameter(numbers(out, features))
    dy, x = LAYOUTS[layout](rows, out), LAYOUTS[layout](rows, features)
    for _ in range(2):
        found = matmul.weight_gradient(weight, dy.t(), x, quick=True)
        assert found.is_contiguous()
        assert_is_product(found, dy.t(), x)


def test_onednn_computes_what_is_large_enough(monkeypatch):
    monkeypatch.setattr(matmul, "onednn_is_quicker", lambda: True)
    weight, bias = numbers(448, 384), numbers(448)
    assert matmul.gains(16, weight.numel(), [weight, bias])
    assert not matmul.gains(1, weight.numel(), [weight, bias])
    assert not matmul.gains(64, 64 * 64, [weight, bias])
    assert not matmul.gains(16, weight.numel(), [weight.double(), bias.double()])
    assert not matmul.gains(16, weight.numel(), [weight.bfloat16()])
    assert not matmul.is_plain([weight.to("meta")])
    assert not matmul.is_plain([weight.to_sparse()])
    with torch.autocast("cpu", torch.bfloat16):
        assert not matmul.gains(16, weight.numel(), [weight, bias])
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)  # torch.backends.mkldnn.enabled = False
    assert not matmul.gains(16, weight.numel(), [weight, bias])


@LIBRARIES
def test_autograd_records_what_it_has_to(library):
    x, w = numbers(16, 384).requires_grad_(), numbers(448, 384).requires_grad_()
    assert matmul.linear(x, w).grad_fn is not None
    assert matmul.product(matmul.linear(x, w), w).grad_fn is not None
    with torch.no_grad():
        assert_is_product(matmul.linear(x, w), x.detach(), w.detach().t())


@LIBRARIES
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("trained", ["xwb", "w", "x", "b", "xb", "wb"])
@pytest.mark.parametrize("shape", [(12,), (3, 4)], ids=str)
def test_linear_differentiates_as_torch_does(library, quick, trained, shape):
    def tensors() -> tuple[Tensor, Tensor, Tensor]:
        x, w, b = numbers(*shape, 384), numbers(448, 384, seed=1), numbers(448, seed=2)
        for name, tensor in zip("xwb", (x, w, b), strict=True):
            tensor.requires_grad_(name in trained)
        return x, w, b

    ours, plain = tensors(), tensors()
    for compute, given in ((lambda *t: linear(*t, quick=quick), ours), (F.linear, plain)):
        compute(*given).square().sum().backward()
        compute(*given).sum().backward()  # the gradient that arrives is one number for all
    for one, other in zip(ours, plain, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-3)


def test_linear_can_be_differentiated_twice():
    x, w = torch.randn(3, 256, dtype=torch.float64), torch.randn(256, 256, dtype=torch.float64)
    b = torch.randn(256, dtype=torch.float64)
    given = [tensor.requires_grad_() for tensor in (x, w, b)]
    assert w.nbytes >= REUSED_BYTES
    assert torch.autograd.gradcheck(linear, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(linear, given, fast_mode=True)


def test_a_backward_for_one_tensor_does_not_compute_the_others(monkeypatch):
    computed = []
    compute = matmul.weight_gradient
    monkeypatch.setattr(matmul, "weight_gradient", lambda *a, **k: computed.append(1) or compute(*a, **k))
    x, w = numbers(12, 384).requires_grad_(), numbers(448, 384).requires_grad_()
    loss = linear(x, w).square().sum()
    loss.backward(inputs=[x], retain_graph=True)
    assert not computed
    assert w.grad is None
    loss.backward(inputs=[w])
    assert len(computed) == 1
    torch.testing.assert_close(w.grad, 2 * F.linear(x, w).t() @ x, rtol=1e-4, atol=1e-3)


# ---- memory -----------------------------------------------------------------------------------------------------


def test_memory_is_used_again_when_nothing_refers_to_it():
    memory = ReusedMemory(bytearray(1 << 10))
    first = memory.take([4, 8], torch.float32)
    place = first.data_ptr()
    assert memory.take([2], torch.uint8) is None
    row = first[2]
    first = None
    assert memory.take([2], torch.uint8) is None
    row = None
    again = memory.take([256], torch.float32)
    assert again.data_ptr() == place
    assert again.shape == (256,)
    assert row is None


def test_memory_of_the_pool_comes_back():
    weight = nn.Parameter(torch.zeros(512, 300))
    assert gradient_memory(weight, [512, 300], torch.float32).shape == (512, 300)
    places = {gradient_memory(weight, [512, 300], torch.float32).data_ptr() for _ in range(5)}
    held = [gradient_memory(weight, [512, 300], torch.float32) for _ in range(3)]
    assert len(places) == 1
    assert len({tensor.data_ptr() for tensor in held}) == 3
    assert places <= {tensor.data_ptr() for tensor in held}


def test_no_more_is_kept_than_was_in_use_at_one_time(monkeypatch):
    kept = _Kept()
    monkeypatch.setattr("axonmpi.utils.memory._kept", kept)
    for size in range(300, 306):  # six models, one after the other
        weight = nn.Parameter(torch.zeros(512, size))
        held = [gradient_memory(weight, weight.shape, weight.dtype) for _ in range(4)]
        assert all(tensor.shape == (512, size) for tensor in held)
        held = None
    pieces = [piece for of_size in kept._of_size.values() for piece in of_size]
    assert 4 * weight.nbytes <= sum(piece.nbytes for piece in pieces) <= 4.1 * weight.nbytes


def test_memory_too_small_is_not_taken():
    memory = ReusedMemory(bytearray(16))
    assert memory.take([5], torch.float32) is None
    assert memory.take([4], torch.float32) is not None


def test_a_process_that_is_forked_off_has_memory_of_its_own():
    weight = nn.Parameter(torch.zeros(512, 300))
    gradient = gradient_memory(weight, weight.shape, weight.dtype).fill_(1)
    gradient_memory(weight, weight.shape, weight.dtype).fill_(3)  # which is free then
    child = os.fork()
    if not child:  # few numbers at once: torch's threads have stayed with the parent
        gradient[0, :8] = 2
        gradient_memory(weight, weight.shape, weight.dtype)[0, :8] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (gradient == 1).all()
    assert (gradient_memory(weight, weight.shape, weight.dtype) == 3).all()


def test_memory_of_its_own_comes_first():
    weight = nn.Parameter(torch.zeros(512, 300))
    memory = ReusedMemory(bytearray(weight.nbytes))
    set_gradient_memory(weight, memory)
    own = gradient_memory(weight, [512, 300], torch.float32)
    assert memory.take([1], torch.uint8) is None
    other = gradient_memory(weight, [512, 300], torch.float32)
    assert other.data_ptr() != own.data_ptr()
    place = own.data_ptr()
    own = None
    assert gradient_memory(weight, [300, 512], torch.float32).data_ptr() != place
    assert gradient_memory(weight, [512, 300], torch.float32).data_ptr() == place
    assert own is None


@pytest.mark.parametrize(
    "parameter", [torch.zeros(8, 8), torch.zeros(600, 500).t(), torch.zeros(600, 500, device="meta")], ids=str
)
def test_gradients_for_which_new_memory_serves(parameter):
    assert gradient_memory(parameter, parameter.shape, torch.float32) is None


# ---- the setting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["torch", "onednn"])
def test_setting(monkeypatch, setting):
    monkeypatch.setenv("AXONMPI_MATMUL", setting)
    found = matmul.onednn_is_quicker.__wrapped__()
    assert found == (setting == "onednn" and torch.backends.mkldnn.is_available())


def test_unknown_setting(monkeypatch):
    monkeypatch.setenv("AXONMPI_MATMUL", "mkl")
    with pytest.raises(ValueError, match="expected 'auto', 'torch' or 'onednn', got 'mkl'"):
        wanted_matmul()


def test_nothing_is_decided_at_import():
    code = "import axonmpi; from axonmpi import matmul; print(matmul.onednn_is_quicker.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
