"""Memory that is quick to copy from and to, and memory that is used again.

Large flat tensors that live long, such as gradient buckets, lie in huge pages where the system offers them on
request: numpy asks for them, torch's allocator does not. Copies are quicker on them, since far fewer addresses have
to be looked up.

Gradients of large weights are dropped and made anew in every step. The system then finds and clears new pages for
them, which can take as long as the products that they are filled with. Here the memory is kept:

    backward takes it ─▶ param.grad ─▶ zero_grad() ─▶ no tensor refers to it ─▶ the next backward takes it again

What is kept is at most what was in use at one time. Processes that are forked off begin with none.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["REUSED_BYTES", "ReusedMemory", "flat_zeros", "gradient_memory", "set_gradient_memory"]

REUSED_BYTES = 512 << 10
"""From this size on memory is kept here: smaller pieces are kept by the allocator."""


def flat_zeros(numel: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return [numel] zeros; on the CPU in huge pages where the system has them; local."""
    if not numel or (device is not None and device.type != "cpu"):
        return torch.zeros(numel, dtype=dtype, device=device)
    # numpy has fewer dtypes than torch, but bytes are bytes.
    return torch.from_numpy(np.zeros(numel * dtype.itemsize, dtype=np.uint8)).view(dtype)


class ReusedMemory:
    """Memory for one tensor at a time: the next one gets it when nothing refers to the one before.

    Args:
        memory: Contiguous bytes; kept alive.
    """

    def __init__(self, memory: memoryview | bytearray | mmap.mmap) -> None:
        self._bytes = memoryview(memory)
        self._user: weakref.ref[Any] | None = None

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return self._bytes.nbytes

    @property
    def in_use(self) -> bool:
        """Whether a tensor refers to it."""
        return self._user is not None and self._user() is not None

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return a contiguous tensor on the memory's beginning, its values any; local.

        Args:
            shape: Of the tensor.
            dtype: Of the tensor.

        Returns:
            The tensor; None if the memory is in use, or too small.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.nbytes or self.in_use:
            return None
        # A view has an owner of its own, whose end is the end of the last tensor on it.
        view = np.frombuffer(self._bytes, dtype=np.uint8, count=nbytes)
        self._user = weakref.ref(view)
        return torch.from_numpy(view).view(dtype).view(*shape)


class _Kept:
    """Reused memory of all sizes, as much as was in use at one time, and what parameters have of their own."""

    def __init__(self) -> None:
        self.own: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._of_size: dict[int, list[ReusedMemory]] = {}
        self._most = 0
        self._lock = threading.Lock()

    def take(self, parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for a gradient; local."""
        with self._lock:
            known = self.own.get(parameter)
            own: ReusedMemory | None = None if known is None else known()
            if own is not None and tuple(shape) == parameter.shape and dtype == parameter.dtype:
                tensor = own.take(shape, dtype)
                if tensor is not None:
                    return tensor
            nbytes = math.prod(shape) * dtype.itemsize
            for memory in self._of_size.get(nbytes, ()):
                tensor = memory.take(shape, dtype)
                if tensor is not None:
                    return tensor
            return self._add(shape, dtype, nbytes)

    def _add(self, shape: Sequence[int], dtype: torch.dtype, nbytes: int) -> Tensor:
        # Not in huge pages: the rows of matrices are often as long as a power of 2, and where pages are larger
        # than that, fewer places of the cache serve a block of a matrix. Not shared with processes forked off.
        memory = ReusedMemory(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        tensor = memory.take(shape, dtype)
        assert tensor is not None
        self._of_size.setdefault(nbytes, []).append(memory)
        pieces = [piece for of_size in self._of_size.values() for piece in of_size]
        free = [piece for piece in pieces if not piece.in_use]
        total = sum(piece.nbytes for piece in pieces)
        self._most = max(self._most, total - sum(piece.nbytes for piece in free))
        while free and total > self._most:  # of sizes that were wanted before
            piece = free.pop(0)
            total -= piece.nbytes
            self._of_size[piece.nbytes].remove(piece)
        return tensor


_kept = _Kept()


def _begin_anew() -> None:
    """Forget all memory: in a process that was forked, where it is that of another one, and a lock may be held."""
    global _kept
    _kept = _Kept()


os.register_at_fork(after_in_child=_begin_anew)


def set_gradient_memory(parameter: Tensor, memory: ReusedMemory) -> None:
    """Say where a parameter's gradient shall be put if it can, as long as the memory is alive; local."""
    _kept.own[parameter] = weakref.ref(memory)


def gradient_memory(parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Return memory for a parameter's gradient, or for that of what it was made into, its values any; local.

    Args:
        parameter: The parameter.
        shape: Of the gradient.
        dtype: Of the gradient.

    Returns:
        A contiguous tensor; None where new memory serves as well.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if parameter.device.type != "cpu" or nbytes < REUSED_BYTES or not parameter.is_contiguous():
        return None
    return _kept.take(parameter, shape, dtype)
