"""Rules of convolutions and pools: a rank fetches the rows of its outputs, and computes them without padding.

output o         needs rows o·stride − padding …; beyond the ends they are zeros, or −∞ for a maximum
several dims     one after the other, so that corners come along
no outputs       a rank computes one of constants and drops it: its weights take part in the sum of gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...mesh import DeviceMesh
from ...utils.partition import split_bounds, split_sizes
from ...utils.rows import row_plan
from ..domain_tensor import DomainTensor, made, part_of, refused, rule
from ..edges import Padded
from ..layout import Factor, Layout, bounds
from ..movement import shared, simplified
from ..window_arithmetic import Transposed, Window
from .functions import each, named


@rule(functional.conv1d, functional.conv2d, functional.conv3d)
def _convolution(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    x = checked_input(func, input, weight.dim() - 2, [weight, bias])
    kernels, count = weight.shape[2:], weight.dim() - 2
    strides, dilations = each(stride, count), each(dilation, count)
    if padding == "same":
        totals = [step * (kernel - 1) for kernel, step in zip(kernels, dilations, strict=True)]
        before, after = [total // 2 for total in totals], [total - total // 2 for total in totals]
    else:
        before = after = [0] * count if padding == "valid" else each(padding, count)
    windows = [Window(*numbers) for numbers in zip(kernels, strides, before, after, dilations, strict=True)]
    weight, bias = _shared_weights(x, weight, bias)  # first: their gradients are added last on all ranks
    fetch = fetch_windows(func, x, windows, 0.0, channels=weight.shape[0])

    def convolve(rows: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
        outputs: Tensor = func(rows, weight, bias, strides, padding, dilations, groups)
        return outputs

    return fetch.of_outputs(fetch.padded.convolved(convolve, weight, bias, fetch.padding))


@rule(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
def _transposed_convolution(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    count = weight.dim() - 2
    x = checked_input(func, input, count, [weight, bias])
    numbers = [each(value, count) for value in (stride, padding, output_padding, dilation)]
    windows = [Transposed(*values) for values in zip(weight.shape[2:], *numbers, strict=True)]
    strides, paddings, more, dilations = numbers
    first = len(x.whole.dims) - count
    whole = _result_layout(func, x, windows, weight.shape[1] * groups)
    padded, starts = Padded(part_of(x)), dict[int, int]()
    for dim, window in enumerate(windows, first):
        if (axis := x.whole.axis_of(dim)) is None:
            continue
        rows, ranges = x.whole.shape[dim], []
        for low, high in split_bounds(whole.shape[dim], x.mesh.size(axis)):
            start, stop = window.needs(rows, low, high - 1)
            ranges.append((start, stop) if start < stop and low < high else (rows, rows + 1))
        starts[dim] = window.first_output(ranges[x.mesh.rank(axis)][0])
        paddings[dim - first] = more[dim - first] = 0
        plan = row_plan(split_sizes(rows, x.mesh.size(axis)), tuple(ranges), "zeros")
        padded.fetch(plan, x.mesh.group(axis), dim, 0.0)
    weight, bias = _shared_weights(x, weight, bias)
    result = padded.computed(lambda part: func(part, weight, None, strides, paddings, more, groups, dilations))
    for dim, start in starts.items():
        low, high = (output - start for output in bounds(x.mesh, whole.dims[dim][0]))
        before, behind = max(-low, 0), max(high - result.shape[dim], 0)
        if before or behind:  # outputs to which no row adds
            result = functional.pad(result, [0, 0] * (result.dim() - dim - 1) + [before, behind])
        if result.shape[dim] > high - low:
            result = result.narrow(dim, low + before, high - low)
    return made(result if bias is None else result + bias.view(-1, *[1] * count), whole, x.mesh)


# ---- pools ------------------------------------------------------------------------------------------------------


@rule(*named("max_pool1d max_pool2d max_pool3d"))
def _max_pool(
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    count = int(func.__name__[-2])
    if return_indices:
        raise refused(func, "would return places within a part", input)
    kernels, paddings, dilations = each(kernel_size, count), each(padding, count), each(dilation, count)
    strides = each(stride, count) if stride else kernels  # torch takes [] for the kernel's, too
    _check_padding(func, kernels, paddings)
    x = checked_input(func, input, count, channels_are_cut=True)
    numbers = zip(kernels, strides, paddings, paddings, dilations, [ceil_mode] * count, strict=True)
    fetch = fetch_windows(func, x, [Window(*values) for values in numbers], -inf)
    return fetch.result(lambda rows: func(rows, kernels, strides, fetch.padding, dilations, ceil_mode))


@rule(*named("avg_pool1d avg_pool2d avg_pool3d"))
def _average_pool(
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    count = int(func.__name__[-2])
    kernels, paddings = each(kernel_size, count), each(padding, count)
    strides = each(stride, count) if stride else kernels
    _check_padding(func, kernels, paddings)
    x = checked_input(func, input, count, channels_are_cut=True)
    numbers = zip(kernels, strides, paddings, paddings, [1] * count, [ceil_mode] * count, strict=True)
    windows = [Window(*values) for values in numbers]
    fetch = fetch_windows(func, x, windows, 0.0)

    def sums(rows: Tensor) -> Tensor:
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # sums beyond the range of 16 bits
        if count > 1:
            return func(rows, kernels, strides, fetch.padding, ceil_mode, divisor_override=1)  # type: ignore[no-any-return]
        numbers = [1, *kernels], [1, *strides], [0, *fetch.padding]  # torch has no sums of one dimension
        return functional.avg_pool2d(rows.unsqueeze(-2), *numbers, ceil_mode, divisor_override=1).squeeze(-2)

    result = fetch.result(sums)
    for dim, window in enumerate(windows, -count) if divisor_override is None else ():
        counts = _divisors(fetch, dim, window, x, padded=count_include_pad)
        result = result / counts.to(result.dtype).view(-1, *[1] * (-dim - 1))
    return made((result / (divisor_override or 1)).to(x.dtype), fetch.whole, x.mesh)


def _divisors(fetch: _Fetch, dim: int, window: Window, x: DomainTensor, *, padded: bool) -> Tensor:
    """Return how many elements each of this rank's windows averages along a dimension."""
    rows, (factor,) = x.whole.shape[dim], fetch.whole.dims[dim] or (Factor(1),)
    low, high = bounds(x.mesh, factor)
    start = torch.arange(low, high, device=x.device) * window.stride - window.padding
    stop = (start + window.kernel).clamp(max=rows + window.padding)
    return stop - start if padded else stop.clamp(max=rows) - start.clamp(min=0)


def _check_padding(func: Any, kernels: Sequence[int], paddings: Sequence[int]) -> None:
    if any(2 * padding > kernel or padding < 0 for kernel, padding in zip(kernels, paddings, strict=True)):
        raise RuntimeError(
            f"{func.__name__}: expected padding of at most half the kernel {kernels}, got {paddings}"
        )


# ---- rows of windows --------------------------------------------------------------------------------------------


@dataclass
class _Fetch:
    """Rows for the windows of this rank's outputs.

    Attributes:
        padded: The rows.
        padding: Rows that the function itself pads, in dimensions that no axis cuts.
        whole: How the result is cut.
        mesh: The ranks.
        empty: Dimensions in which this rank has no outputs, but has computed one.
    """

    padded: Padded
    padding: list[int]
    whole: Layout
    mesh: DeviceMesh
    empty: list[int]

    def result(self, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's part of the result, which a function computes of the rows."""
        return self.of_outputs(self.padded.computed(compute))

    def of_outputs(self, computed: Tensor) -> Tensor:
        """Return what this rank has computed as its part of the result; local."""
        for dim in self.empty:
            computed = computed.narrow(dim, 0, 0)
        return made(computed, self.whole, self.mesh)


def fetch_windows(
    func: Any, x: DomainTensor, windows: Sequence[Window], value: float, channels: int | None = None
) -> _Fetch:
    """Return the rows of the windows of this rank's outputs, `value` beyond the ends; collective."""
    first, mesh = len(x.whole.dims) - len(windows), x.mesh
    whole = _result_layout(func, x, windows, channels)
    part = part_of(x)
    empty = [dim for dim in range(first) if part.shape[dim] == 0]
    if empty:  # torch refuses pools without channels
        part = part.sum(empty, keepdim=True, dtype=part.dtype)
    fetch = _Fetch(Padded(part), [window.padding for window in windows], whole, mesh, empty)
    # In the same order on all ranks. Those fetched last can travel during computation: of the outermost axis, which
    # is the one between nodes.
    axes = [None, *reversed(mesh.axes)]
    order = sorted(enumerate(windows, first), key=lambda each: axes.index(x.whole.axis_of(each[0])))
    for dim, window in order:
        rows, axis = x.whole.shape[dim], x.whole.axis_of(dim)
        if axis is None:
            after = window.padding if window.padding_after is None else window.padding_after
            if after != window.padding:
                fetch.padded.pad(dim, window.padding, after, value)
                fetch.padding[dim - first] = 0
            continue
        outputs = split_bounds(whole.shape[dim], mesh.size(axis))
        ranges = [
            window.needs(rows, low, high - 1) if low < high else (rows + 1, rows + 1 + window.extent)
            for low, high in outputs
        ]
        # Beyond the end by a window's rows: nobody has them, whatever the padding.
        plan = row_plan(split_sizes(rows, mesh.size(axis)), tuple(ranges), "zeros")
        group = mesh.group(axis)
        travels = group.backend.spans_nodes and group.backend.overlaps
        is_apart = channels is not None and dim == order[-1][0]
        if not is_apart or not fetch.padded.begin(plan, group, dim, window, travels=travels):
            fetch.padded.fetch(plan, group, dim, value)
        fetch.padding[dim - first] = 0
        low, high = outputs[mesh.rank(axis)]
        if low == high:
            fetch.empty.append(dim)
    return fetch


def _result_layout(
    func: Any, x: DomainTensor, windows: Sequence[Window | Transposed], channels: int | None
) -> Layout:
    first = len(x.whole.dims) - len(windows)
    changes: dict[int, list[Factor]] = {}
    for dim, window in enumerate(windows, first):
        size = window.size(x.whole.shape[dim])
        if size < 1:
            raise RuntimeError(
                f"{func.__name__}: expected a window of at most the padded size, got {window} on "
                f"{x.whole.shape[dim]} elements of dimension {dim}"
            )
        changes[dim] = [Factor(size, x.whole.axis_of(dim))]
    if channels is not None:
        changes[first - 1] = [Factor(channels)]
    return x.whole.replaced(changes)


def checked_input(
    func: Any, x: Tensor, count: int, others: Sequence[Tensor | None] = (), *, channels_are_cut: bool = False
) -> DomainTensor:
    """Return the input of a function with windows, each of its last dimensions cut by one axis at most."""
    if not isinstance(x, DomainTensor) or any(isinstance(other, DomainTensor) for other in others):
        raise refused(func, "has a weight that is cut", x, *others)
    dims = len(x.whole.dims)
    if not channels_are_cut and x.whole.is_cut(dims - count - 1):
        raise refused(func, "adds over channels, which are cut", x)
    for dim in range(dims - count, dims):
        simple = simplified(x, dim)
        assert isinstance(simple, DomainTensor)  # one axis that cuts a dimension is left to cut it
        x = simple
    return x


def _shared_weights(x: DomainTensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    weight, *rest = shared(x.mesh, x.whole.axes, [weight] if bias is None else [weight, bias])
    return weight, rest[0] if rest else None
