"""Rows of windows and sizes, against torch's own functions on one process; layouts of reshapes against reshapes."""

import random

import pytest
import torch
from torch.nn import functional

from axonmpi.domain import Transposed, Window
from axonmpi.domain.layout import Factor, Layout, reshaped


def windows(seed: int) -> tuple[Window, int]:
    draw = random.Random(seed)
    kernel = draw.randint(1, 5)
    numbers = kernel, draw.randint(1, 4), draw.randint(0, kernel // 2), None, draw.randint(1, 3)
    return Window(*numbers, ceil_mode=bool(seed % 2)), draw.randint(1, 20)


@pytest.mark.parametrize("seed", range(60))
def test_a_window_has_torchs_size_and_its_outputs_depend_on_its_rows_alone(seed: int) -> None:
    window, n = windows(seed)
    numbers = window.kernel, window.stride, window.padding, window.dilation
    x = torch.randn(1, 1, n, dtype=torch.float64, requires_grad=True)
    if window.size(n) < 1:
        with pytest.raises(RuntimeError):
            functional.max_pool1d(x, *numbers, window.ceil_mode)
        return
    if window.ceil_mode:  # a pool; a convolution leaves out windows that are not filled
        assert functional.max_pool1d(x.detach(), *numbers, True).shape[2] == window.size(n)
        return
    output = functional.conv1d(x, torch.rand(1, 1, window.kernel, dtype=torch.float64) + 1, None, *numbers[1:])
    assert output.shape[2] == window.size(n)
    first = random.Random(seed).randrange(window.size(n))
    last = random.Random(seed + 1).randrange(first, window.size(n))
    (gradient,) = torch.autograd.grad(output[0, 0, first : last + 1].sum(), x)
    used = gradient[0, 0].nonzero().flatten().tolist()
    start, stop = window.needs(n, first, last)
    assert all(start <= row < stop for row in used)
    assert stop - start == (last - first) * window.stride + window.dilation * (window.kernel - 1) + 1
    if used and start >= 0 and stop <= n:
        assert (used[0], used[-1]) == (start, stop - 1)


@pytest.mark.parametrize("seed", range(60))
def test_a_transposed_window_names_the_rows_that_add_to_its_outputs(seed: int) -> None:
    draw = random.Random(seed)
    stride, dilation = draw.randint(1, 4), draw.randint(1, 3)
    more = draw.randint(0, max(stride, dilation) - 1)
    window = Transposed(draw.randint(1, 4), stride, draw.randint(0, 3), more, dilation)
    n = draw.randint(1, 12)
    if window.size(n) < 1:
        return
    x = torch.randn(1, 1, n, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(1, 1, window.kernel, dtype=torch.float64) + 1
    options = {"stride": stride, "padding": window.padding, "output_padding": more, "dilation": dilation}
    output = functional.conv_transpose1d(x, weight, None, **options)
    assert output.shape[2] == window.size(n)
    first = draw.randrange(window.size(n))
    last = draw.randrange(first, window.size(n))
    (gradient,) = torch.autograd.grad(output[0, 0, first : last + 1].sum(), x)
    used = gradient[0, 0].nonzero().flatten().tolist()
    start, stop = window.needs(n, first, last)
    assert all(start <= row < stop for row in used)
    if dilation == 1:  # else the kernel's gaps may pass over a row at an end
        assert used == [row for row in range(start, stop) if stride <= window.kernel or row in used]
        assert bool(used) == (start < stop)


def test_reshapes_keep_factors_and_cut_the_outermost_part_of_a_divided_one() -> None:
    image = Layout.cut((8, 3, 100, 64), {2: "y"})
    cases = {
        (8, 3, 6400): ("[8, 3, 100 y, 64]", "[8, 3, 100 y · 64]"),
        (24, 100, 64): ("[8, 3, 100 y, 64]", "[24, 100 y, 64]"),
        (2400, 64): ("[8, 3, 100 y, 64]", "[24 · 100 y, 64]"),
        (8, 3, 20, 5, 8, 8): ("[8, 3, 20 y · 5, 64]", "[8, 3, 20 y, 5, 8, 8]"),
        (1, 8, 3, 1, 100, 64): ("[8, 3, 100 y, 64]", "[1, 8, 3, 1, 100 y, 64]"),
    }
    for shape, texts in cases.items():
        found = reshaped(image, shape)
        assert found is not None
        assert tuple(map(str, found)) == texts
    assert reshaped(image, (8, 3, 8, 100, 8)) == reshaped(image, (4, 2, 3, 7, 100, 64)) is None
    single = Layout.cut((2, 1, 5), {1: "y"})
    found = reshaped(single, (10,))
    assert found is not None
    assert found[1].dims == ((Factor(2), Factor(1, "y"), Factor(5)),)
