"""The call of a collective, which the ranks of a group compare before data moves.

A `Call` is the operation, dtype, shape, reduction and root of one rank's call, with a fingerprint. Backends compare
the fingerprints of all ranks first; if they differ, `mismatch_error` lists the call of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any
from zlib import crc32

import torch

from ..errors import CollectiveMismatchError
from ..record import describe
from ..types import ReduceOp
from ..utils.text import MAX_LISTED, lines_of_ranks, listed, ranks_by_text
from .ranks import Parts
from .reduction import DTYPES

_DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}
_MAX_SHOWN = 4

Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""Dtype and shape of each of the tensors that lie end to end in a flat one."""


@dataclass(frozen=True)
class Call:
    """One rank's call of a collective; ranks compare their calls before data moves.

    Attributes:
        operation: Name of the collective.
        dtype: Dtype of the tensors, or None.
        shape: Shape of this rank's tensor; -1 for dimensions in which the ranks may differ.
        op: The reduction, or None.
        root: Source or destination rank within the group, or None.
        dim: Dimension along which tensors are cut or concatenated.
        layout: Shapes of the tensors in a flat tensor, if any.
        parts: The ranks of each new group, of operations that make groups.
        label: Owner of the tensors, such as a unit of a model; may be empty.
        key: A 62-bit fingerprint of all of these, the same in every process.
        numel: Number of elements of this rank's tensor.
        nbytes: Their size, 0 if a dimension is free; of rows that are exchanged, the size of one.
        is_free: True if a dimension is free, or the number of rows.
        description: Text for the rank's record.
    """

    operation: str
    # An operation knows which of these its calls have: Any spares it a check in each place.
    dtype: torch.dtype | Any = None
    shape: tuple[int, ...] = ()
    op: ReduceOp | Any = None
    root: int | Any = None
    dim: int | None = None
    layout: Layout | None = None
    parts: Parts | None = None
    label: str = ""
    key: int = field(init=False, compare=False)
    numel: int = field(init=False, compare=False)
    nbytes: int = field(init=False, compare=False)
    is_free: bool = field(init=False, compare=False)
    description: bytes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        dtype_code = -1 if self.dtype is None else _DTYPE_CODE[self.dtype]
        op_code = -1 if self.op is None else int(self.op)
        # hash() of a tuple of integers and such tuples does not depend on the process's hash seed.
        made_of = tuple((_DTYPE_CODE[dtype], shape) for dtype, shape in self.layout or ())
        divided = -1 if self.parts is None else self.parts.key
        what = (
            crc32(self.operation.encode()),
            dtype_code,
            op_code,
            -1 if self.root is None else self.root,
            -1 if self.dim is None else self.dim,
            self.layout is None,
            made_of,
            divided,
            crc32(self.label.encode()),
            *self.shape,
        )
        key = hash(what) & ((1 << 62) - 1)
        numel = prod(self.shape)
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "numel", numel)
        known = self.dtype is not None and -1 not in self.shape
        is_free = self.dtype is not None and (not known or self.operation == "exchange_rows")
        object.__setattr__(self, "is_free", is_free)
        object.__setattr__(self, "nbytes", numel * self.dtype.itemsize if known else 0)
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        told = describe(self.operation, dtype, self.shape, self.op, self.root, nbytes=self.nbytes)
        object.__setattr__(self, "description", told)

    def __str__(self) -> str:
        parts = []
        if self.dtype is not None:
            parts.append(self._tensor_text(self.dtype, self.shape))
        if self.op is not None:
            parts.append(self.op.name)
        if self.parts is not None:
            parts.append(f"{'ranks=' if self.operation == 'split' else ''}{self._parts_text(self.parts)}")
        if self.root is not None:
            parts.append(f"root={self.root}")
        if self.dim is not None:
            parts.append(f"dim={self.dim}")
        if self.layout is not None:
            parts.append(f"made of {self._layout_text(self.layout)}")
        return f"{self.operation}({', '.join(parts)}){self.label and f' of {self.label}'}"

    def _parts_text(self, parts: Parts) -> str:
        first = [parts[number] for number in range(min(len(parts), _MAX_SHOWN))]
        is_whole = len(parts) <= _MAX_SHOWN and all(len(part) <= MAX_LISTED for part in first)
        return self._shown(list(map(listed, first)), is_whole)

    def _layout_text(self, layout: Layout) -> str:
        shown = [self._tensor_text(dtype, shape) for dtype, shape in layout[:_MAX_SHOWN]]
        count = f"{len(layout)} tensor{'s' if len(layout) > 1 else ''}"
        return f"{count}: {self._shown(shown, len(layout) <= _MAX_SHOWN)}" if shown else "no tensors"

    def _tensor_text(self, dtype: torch.dtype, shape: Sequence[int]) -> str:
        sizes = ["*" if size < 0 else str(size) for size in shape[:MAX_LISTED]]
        return f"{str(dtype).removeprefix('torch.')} [{self._shown(sizes, len(shape) <= MAX_LISTED)}]"

    def _shown(self, texts: list[str], is_whole: bool) -> str:
        """Join texts with commas; the call's fingerprint replaces omitted texts."""
        return ", ".join(texts if is_whole else [*texts, f"... #{self.key:x}"])


def mismatch_error(calls: Sequence[str]) -> CollectiveMismatchError:
    """Make the error that lists the call of each rank; `calls` has one text a rank."""
    groups = sorted(ranks_by_text(dict(enumerate(calls))).items(), key=lambda entry: -len(entry[1]))
    error = CollectiveMismatchError(
        "the ranks of this group made different calls, so no data was moved:\n  "
        + lines_of_ranks(groups)
        + "\nAll ranks of a group have to make the same calls in the same order."
    )
    error.calls = tuple(calls)
    return error
