"""Tensors as the plain memory that MPI reads and writes, and their descriptions for receivers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CollectiveMismatchError
from .reduction import DTYPES

DESCRIPTION_BYTES = 112
"""Size of the description of a tensor with up to 12 dimensions."""

Words = np.ndarray[Any, np.dtype[np.int64]]
"""A description as 14 integers."""


def describe(tensor: Tensor) -> Words:
    """Return the dtype and shape (up to 12 dimensions) as integers; local."""
    words = np.zeros(DESCRIPTION_BYTES // 8, dtype=np.int64)
    words[: 2 + tensor.dim()] = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return words


def described(description: Words) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape of a description; local."""
    words = description.tolist()
    return DTYPES[words[0]], tuple(words[2 : 2 + words[1]])


def buffer_of(mpi: Any, tensor: Tensor) -> Any:
    """Return the memory of a contiguous tensor as a buffer for MPI; the tensor must outlive it."""
    return mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def flat_elements(tensor: Tensor) -> Tensor:
    """Return the elements in order in contiguous memory, the tensor's own if it is contiguous; local."""
    is_plain = tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    return _line(tensor if is_plain else tensor.detach().resolve_conj().resolve_neg().contiguous())


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Copy `flat`, which MPI has filled, into the tensor, and tell autograd that the tensor has changed; local."""
    if flat.data_ptr() != tensor.data_ptr() or tensor.is_neg() or tensor.is_conj():
        tensor.detach().copy_(flat.view(tensor.shape))  # autograd may have marked it since
    else:
        torch.autograd.graph.increment_version(tensor)


def as_bytes(tensor: Tensor) -> Tensor:
    """View contiguous memory as bytes; local."""
    return _line(tensor).view(torch.uint8) if tensor.numel() else empty([0], torch.uint8)


def bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a contiguous tensor's bytes as numpy's, which copies small ones in a fraction of torch's time; local.

    The tensor is not kept alive.

    Raises:
        RuntimeError: The tensor's storage is smaller than the tensor, or there is none, as in wrapper subclasses.
    """
    if not tensor.numel():
        return np.empty(0, np.uint8)
    _line(tensor)
    pointer = tensor.data_ptr()
    if not pointer:
        raise RuntimeError(
            f"expected a tensor with a storage of its own, got a {type(tensor).__name__} without any"
        )
    memory: Any = (ctypes.c_uint8 * tensor.nbytes).from_address(pointer)
    return np.frombuffer(memory, np.uint8)


def _line(tensor: Tensor) -> Tensor:
    """View contiguous memory as one dimension of stride 1: a single element may have any other stride."""
    return tensor.as_strided((tensor.numel(),), (1,))


def copy_of(tensor: Tensor) -> Tensor:
    """Return a contiguous copy without autograd history; local."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def copy_message(message: Tensor, tensor: Tensor, src: int) -> None:
    """Copy a message of rank `src`, contiguous and of any dtype and shape, into a tensor of the same size; local.

    Raises:
        CollectiveMismatchError: The sizes differ.
    """
    if message.nbytes != tensor.nbytes:
        raise CollectiveMismatchError(
            f"recv: expected {tensor.nbytes} bytes ({tensor.dtype} {list(tensor.shape)}) from rank {src}, "
            f"which sent {message.nbytes}"
        )
    tensor.copy_(message.view(-1).view(tensor.dtype).view(tensor.shape))


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor on the CPU, whatever torch's default device is at the moment; local."""
    return torch.empty(shape, dtype=dtype, device="cpu")
