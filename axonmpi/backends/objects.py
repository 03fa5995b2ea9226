"""Small Python objects over a backend: pickled, and sent as tensors of bytes.

Tensors in them arrive on the CPU: a receiver may not see the device that the sender has them on.
"""

from __future__ import annotations

import io
import pickle
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..types import ReduceOp
from .contract import Backend
from .ranks import Parts


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Let tensors on other devices travel as tensors on the CPU; parameters there as plain tensors."""
        if isinstance(obj, Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _pack(obj: Any, place: torch.device) -> Tensor:
    file = io.BytesIO()
    _Pickler(file).dump(obj)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(place)


def _unpack(data: Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())


def broadcast_object(backend: Backend, obj: Any, src: int = 0) -> Any:
    """Return rank `src`'s object on all ranks (a copy on the others); collective.

    Args:
        backend: The communicator.
        obj: Anything that can be pickled; ignored on other ranks than `src`.
        src: Rank to copy from.

    Raises:
        ValueError: `src` is no rank of the group.
    """
    backend = backend.control
    place = backend.place
    data = _pack(obj, place) if backend.rank == src else torch.empty(0, dtype=torch.uint8, device=place)
    length = torch.tensor([data.numel()], device=place)
    backend.broadcast(length, src)
    if backend.rank != src:
        data = torch.empty(int(length), dtype=torch.uint8, device=place)
    backend.broadcast(data, src)
    return obj if backend.rank == src else _unpack(data)


def all_gather_object(backend: Backend, obj: Any) -> list[Any]:
    """Return the objects of all ranks (copies), in rank order; collective.

    Args:
        backend: The communicator.
        obj: Anything that can be pickled.
    """
    backend = backend.control
    data = _pack(obj, backend.place)
    lengths = backend.all_gather(torch.tensor([data.numel()], device=backend.place))
    return [_unpack(part) for part in backend.all_gather(data).split(lengths.tolist())]


def all_gather_number(backend: Backend, number: int) -> NDArray[np.int32]:
    """Return [ranks] a number of each rank, in rank order; collective."""
    backend = backend.control
    gathered = backend.all_gather(torch.tensor([number], dtype=torch.int32, device=backend.place))
    numbers: NDArray[np.int32] = gathered.cpu().numpy()
    return numbers


def parts_by_node(backend: Backend) -> Parts:
    """Return the ranks that share memory, node by node in the order of their lowest ranks; collective."""
    lowest = all_gather_number(backend, backend.control.node_ranks[0])
    counts = np.unique(lowest, return_counts=True)[1]
    return Parts(lowest.argsort(kind="stable").astype(np.int32), counts.cumsum())


def gather_if_different(backend: Backend, obj: Any) -> list[Any]:
    """Return the objects of all ranks, in rank order, or only one if all are the same; collective.

    The ranks compare fingerprints by one small reduction, and objects are sent only if these differ.

    Args:
        backend: The communicator.
        obj: Anything that can be pickled.
    """
    backend = backend.control
    content = _pack(obj, torch.device("cpu")).numpy().tobytes()
    key = int.from_bytes(blake2b(content, digest_size=7).digest(), "little")
    both = torch.tensor([key, -key], device=backend.place)
    backend.all_reduce(both, ReduceOp.MAX)
    highest, lowest = both.tolist()
    return [obj] if highest == -lowest else all_gather_object(backend, obj)
