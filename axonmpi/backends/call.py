"""What the ranks of a group have to agree on before a collective moves data (layer 1).

A `Call` is the operation, dtype, shape, reduction and root of one rank's call, with a fingerprint. Backends compare
the fingerprints of all ranks first; where they differ, `mismatch_error` says which ranks called what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..errors import CollectiveMismatchError
from ..types import ReduceOp
from .reduction import DTYPES

__all__ = ["Call", "mismatch_error"]

_OPERATIONS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "split",
)
_CODE = {name: code for code, name in enumerate(_OPERATIONS)}
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class Call:
    """What the ranks of a group have to agree on before a collective moves data.

    Attributes:
        operation: Name of the collective.
        dtype: Dtype of the tensors, None where there is none.
        shape: Shape of this rank's tensor; -1 where the ranks may differ.
        op: The reduction.
        root: Source or destination rank within the group.
        key: A 62-bit fingerprint of all of these, the same in every process.
        numel: Number of elements of this rank's tensor.
        nbytes: Their size, 0 where a dimension is free.
    """

    operation: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    op: ReduceOp | None = None
    root: int | None = None
    key: int = field(init=False, compare=False)
    numel: int = field(init=False, compare=False)
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        dtype_code = -1 if self.dtype is None else _DTYPE_CODE[self.dtype]
        op_code = -1 if self.op is None else int(self.op)
        root = -1 if self.root is None else self.root
        # hash() of a tuple of small integers does not depend on the process's hash seed.
        key = hash((_CODE[self.operation], dtype_code, op_code, root, *self.shape)) & ((1 << 62) - 1)
        numel = 1
        for size in self.shape:
            numel *= size
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "numel", numel)
        known = self.dtype is not None and numel >= 0 and -1 not in self.shape
        object.__setattr__(self, "nbytes", numel * self.dtype.itemsize if self.dtype and known else 0)

    def __str__(self) -> str:
        parts = []
        if self.dtype is not None:
            sizes = ", ".join("*" if size < 0 else str(size) for size in self.shape)
            parts.append(f"{str(self.dtype).removeprefix('torch.')} [{sizes}]")
        if self.op is not None:
            parts.append(self.op.name)
        if self.operation == "split":
            parts.append(f"ranks={list(self.shape)}")
        if self.root is not None:
            parts.append(f"root={self.root}")
        return f"{self.operation}({', '.join(parts)})"


def mismatch_error(calls: Sequence[str]) -> CollectiveMismatchError:
    """Make the error that names what each rank called; `calls` has one text a rank."""
    ranks_of: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks_of.setdefault(call, []).append(rank)
    groups = sorted(ranks_of.items(), key=lambda entry: -len(entry[1]))
    lines = [f"rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}: {call}" for call, r in groups]
    return CollectiveMismatchError(
        "the ranks of this group made different calls, so no data was moved:\n  "
        + "\n  ".join(lines)
        + "\nAll ranks of a group have to make the same calls in the same order."
    )
