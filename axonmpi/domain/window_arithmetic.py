"""The rows that an output needs: windows (convolutions, pools), transposed windows, and resampling.

    Window(3, padding=1)          output o needs rows o−1 to o+1
    Window(4, stride=2)           rows 2o to 2o+3
    Transposed(4, stride=2)       rows ⌈(o−3)/2⌉ to ⌊o/2⌋
    Resample("linear", 12)        the two rows beside the output's position

Arithmetic along one dimension. Rows are those of the whole tensor; a window may reach beyond its ends.
Sources: Dumoulin and Visin 2016, "A guide to convolution arithmetic for deep learning"; torch's own sizes; for
resampling Keys 1981, "Cubic convolution interpolation", and the roundings of torch's kernels for the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..utils.arguments import check_flags


@dataclass(frozen=True)
class Window:
    """The window of a convolution or of a pool along one dimension.

    Attributes:
        kernel: Rows of the kernel, at least 1.
        stride: Rows from one output to the next, at least 1.
        padding: Rows before the first row.
        padding_after: Rows behind the last one; None: as many as before.
        dilation: Rows from one of the kernel's to the next, at least 1.
        ceil_mode: Whether a last window that begins within the rows, but is not filled, counts.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    padding_after: int | None = None
    dilation: int = 1
    ceil_mode: bool = False

    def __post_init__(self) -> None:
        check_flags(ceil_mode=self.ceil_mode)

    @property
    def extent(self) -> int:
        """Rows from the first of a window to its end."""
        return self.dilation * (self.kernel - 1) + 1

    def size(self, n: int) -> int:
        """Return the number of outputs of `n` rows; may be below 1, which torch refuses."""
        after = self.padding if self.padding_after is None else self.padding_after
        room = n + self.padding + after - self.extent
        outputs = (room + self.stride - 1 if self.ceil_mode else room) // self.stride + 1
        if self.ceil_mode and (outputs - 1) * self.stride >= n + self.padding:
            outputs -= 1
        return outputs

    def needs(self, n: int, first: int, last: int) -> tuple[int, int]:
        """Return the rows of the windows of outputs `first` to `last`, both included.

        Args:
            n: Number of rows; windows may reach beyond them.
            first: The first output.
            last: The last output.

        Returns:
            The first row and the row after the last.
        """
        return first * self.stride - self.padding, last * self.stride - self.padding + self.extent


@dataclass(frozen=True)
class Transposed:
    """The window of a transposed convolution along one dimension.

    Attributes:
        kernel: Rows of the kernel, at least 1.
        stride: Outputs from one row to the next, at least 1.
        padding: Outputs that are cut off at both ends.
        output_padding: Outputs that are added behind the last one.
        dilation: Outputs from one row of the kernel to the next, at least 1.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1

    @property
    def extent(self) -> int:
        """Outputs to which one row adds, from the first to the end."""
        return self.dilation * (self.kernel - 1) + 1

    def size(self, n: int) -> int:
        """Return the number of outputs of `n` rows."""
        return (n - 1) * self.stride - 2 * self.padding + self.extent + self.output_padding

    def needs(self, n: int, first: int, last: int) -> tuple[int, int]:
        """Return the rows that add to outputs `first` to `last`, both included, within the `n` rows.

        Returns:
            The first row and the row after the last, the same if there is none.
        """
        start = max(-(-(first + self.padding - self.extent + 1) // self.stride), 0)
        stop = min((last + self.padding) // self.stride + 1, n)
        return start, max(start, stop)

    def first_output(self, start: int) -> int:
        """Return the first output to which row `start` adds; below 0: it is cut off."""
        return start * self.stride - self.padding


@dataclass(frozen=True)
class Resample:
    """The rows of which `torch.nn.functional.interpolate` makes an output, along one dimension.

    Attributes:
        mode: "nearest", "nearest-exact", "linear" or "cubic".
        outputs: Number of outputs; None: the rows times the factor, rounded down.
        factor: Outputs of a row, from which positions are computed; None: as many as the sizes say.
        align_corners: Whether the first and the last output lie on the first and the last row.
        dtype: The precision of positions; torch computes them in float64 for float64, else in float32.
        small: Whether positions of "nearest" and "nearest-exact" are those of torch's kernel for small images, in
            two dimensions with a height and width of at most 128 together: always in float32, and copies.
    """

    mode: str
    outputs: int | None = None
    factor: float | None = None
    align_corners: bool = False
    dtype: torch.dtype = torch.float64
    small: bool = False

    def __post_init__(self) -> None:
        check_flags(align_corners=self.align_corners, small=self.small)

    def size(self, n: int) -> int:
        """Return the number of outputs of `n` rows."""
        return int(n * (self.factor or 1.0)) if self.outputs is None else self.outputs

    def needs(self, n: int, first: int, last: int) -> tuple[int, int]:
        """Return the rows of which outputs `first` to `last`, both included, are made, within the `n` rows.

        Returns:
            The first row and the row after the last.
        """
        return _rows_between(self, n, first, last)

    def sources(self, n: int, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of which outputs are made, and their weights.

        Args:
            n: Number of rows.
            outputs: [O] int64, numbers of outputs.

        Returns:
            [O, K] int64, rows, and [O, K] weights in `dtype`; K is 1, 2 or 4.
        """
        if self.mode.startswith("nearest"):
            rows = self._nearest(n, outputs)
            return rows[:, None], torch.ones(len(rows), 1, dtype=self.dtype)
        step, cubic = self._step(n, self.dtype), self.mode == "cubic"
        places = outputs.double() if self.align_corners else outputs.double() + 0.5
        position = (places * step - (0.0 if self.align_corners else 0.5)).to(self.dtype)
        if self.size(n) == n and not cubic:
            position = outputs.to(self.dtype)  # copies, whatever the factor
        base = (position if cubic else position.clamp(min=0)).floor().long().clamp(max=n - 1)
        t = (position - base).clamp(0, 1)
        if not cubic:
            return torch.stack([base, (base + 1).clamp(max=n - 1)], 1), torch.stack([1 - t, t], 1)
        rows = (base[:, None] + torch.arange(-1, 3)).clamp(0, n - 1)
        return rows, torch.stack([_far(t + 1), _near(t), _near(1 - t), _far(2 - t)], 1)

    def _nearest(self, n: int, outputs: Tensor) -> Tensor:
        size, exact = self.size(n), self.mode == "nearest-exact"
        if self.small and not exact and size in (n, 2 * n):
            return outputs // (size // n)
        dtype = torch.float32 if self.small else self.dtype
        position = (outputs.double() + (0.5 if exact else 0.0)) * self._step(n, dtype)
        if exact and not self.small:
            position = (position - 0.5).to(dtype).clamp(min=0) + 0.5
        return position.to(dtype).float().floor().long().clamp(max=n - 1)

    def _step(self, n: int, dtype: torch.dtype) -> float:
        """Return the rows from one output to the next, rounded as torch does."""
        size = self.size(n)
        top, bottom = (
            (n - 1, max(size - 1, 1)) if self.align_corners else (1, self.factor) if self.factor else (n, size)
        )
        return torch.tensor(top / bottom, dtype=dtype).item()


@lru_cache(maxsize=1024)
def _rows_between(resample: Resample, n: int, first: int, last: int) -> tuple[int, int]:
    rows, _ = resample.sources(n, torch.tensor([first, last]))
    return int(rows.min()), int(rows.max()) + 1


def _near(t: Tensor) -> Tensor:
    """Return the cubic weight of a row at most one row away."""
    return (1.25 * t - 2.25) * t * t + 1


def _far(t: Tensor) -> Tensor:
    """Return the cubic weight of a row that is one to two rows away."""
    return ((-0.75 * t + 3.75) * t - 6) * t + 3
