"""Where the tensors of a collective lie: in shared memory, beside it, or somewhere else on each rank.

    ordinary       in ordinary memory, another one each time
    whole          a symmetric tensor as it was made
    view           inside a symmetric tensor, at the same place on all ranks
    scattered      inside one, at another place on each rank
    mixed          inside one on even ranks, in ordinary memory on odd ones
    alone          inside one on the last rank only
    foreign        inside a symmetric tensor of another group of the same ranks

All of them but `ordinary` and `whole` lie among other values, which nobody may change.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from axonmpi import MpiBackend, ProcessGroup, World
from axonmpi.backends.connection.connection import ChunkSizes
from axonmpi.backends.tuning import CHUNK_BYTES, SLICE_BYTES, replicated_bytes
from axonmpi.launch.launcher_variables import launched_ranks
from helpers.collective_checks import Watched

REAL = pytest.mark.skipif(launched_ranks() < 2, reason="about memory that processes share: needs an mpirun")
WITH_NCCL = pytest.mark.skipif(
    not any(metadata.distributions(name="nccl4py")), reason="needs a real NCCL: pip install 'axonmpi[nccl]'"
)
PLACEMENTS = ("whole", "view", "scattered", "mixed", "alone", "foreign")
SMALL_CHUNK_BYTES = 4096
_MARGIN = 64
_TURNS = 4


class Places:
    """Puts tensors somewhere; every call is collective over the group, all ranks name sizes of the same bound.

    Args:
        group: Whose shared memory it is.
        kind: One of `PLACEMENTS`, or `ordinary`.
        nbytes: The largest tensor.
        other: The group of kind `foreign`, of the same ranks.
    """

    def __init__(self, group: ProcessGroup, kind: str, nbytes: int, other: ProcessGroup | None = None) -> None:
        self.group = group
        self.kind = kind
        self._room = -(-(nbytes + (group.size + 4) * _MARGIN) // 4096) * 4096
        self._turn = 0
        self._memory: Tensor | None = None
        if kind not in ("ordinary", "whole"):
            owner = other if kind == "foreign" else group
            assert owner is not None
            self._memory = owner.symmetric_empty((_TURNS * self._room,), torch.uint8)
            if (kind == "mixed" and group.rank % 2) or (kind == "alone" and group.rank != group.size - 1):
                self._memory = torch.zeros(_TURNS * self._room, dtype=torch.uint8)

    def put(self, source: Tensor) -> Watched:
        """Copy a tensor to the next place; four at a time may be in use."""
        if self.kind == "ordinary":
            return Watched(source.clone(), [])
        if self._memory is None:
            return Watched(self.group.symmetric_empty(source.shape, source.dtype).copy_(source), [])
        room = self._memory[self._turn * self._room : (self._turn + 1) * self._room]
        self._turn = (self._turn + 1) % _TURNS
        # Not on a cache line of its own: an odd number of elements from the beginning.
        margins = 1 + self.group.rank if self.kind == "scattered" else 1
        start = margins * _MARGIN + 3 * source.element_size()
        stop = start + source.nbytes
        tensor = room[start:stop].view(source.dtype).view(source.shape).copy_(source)
        return Watched(tensor, [part.fill_(0xA5) for part in (room[:start], room[stop : stop + _MARGIN])])


@contextmanager
def new_groups_of(world: World, sizes: ChunkSizes | None) -> Iterator[None]:
    """Let real ranks make groups with other sizes of chunks and messages; mock ranks have none."""
    backend = world.default_group.backend
    if sizes is None or not isinstance(backend, MpiBackend):
        yield
        return
    before, backend.sizes = backend.sizes, sizes
    yield
    backend.sizes = before


@contextmanager
def places_in(world: World, kind: str, nbytes: int, sizes: ChunkSizes | None = None) -> Iterator[Places]:
    """Make room for tensors of up to `nbytes` bytes in a new group of all ranks, of other sizes; collective."""
    with new_groups_of(world, sizes):
        groups = [world.new_group(range(world.size)) for _ in range(2 if kind == "foreign" else 1)]
    yield Places(groups[0], kind, nbytes, groups[-1])
    for group in groups:
        group.close()


def limits(ranks: int) -> SimpleNamespace:
    """Return the sizes in bytes at which data takes another way, for a group on one node.

    Attributes of it:
        direct: Up to it each rank reduces all of the data.
        medium: The same for tensors that are not symmetric.
        slices: What is reduced in one piece a rank.
        chunk: What goes through scratch memory at a time.
    """
    return SimpleNamespace(
        direct=replicated_bytes(ranks, symmetric=True),
        medium=replicated_bytes(ranks, symmetric=False),
        slices=SLICE_BYTES * ranks,
        chunk=CHUNK_BYTES,
    )


def shared_mappings() -> list[range]:
    """Return the addresses of memory that processes share with this one for axonmpi."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:axonmpi" in line]
    return [range(int(low, 16), int(high, 16)) for low, high in spans]


def is_shared(tensor: Tensor) -> bool:
    """Whether a tensor lies in such memory."""
    return any(tensor.data_ptr() in span for span in shared_mappings())


def agree_on_bits(group: ProcessGroup, tensor: Tensor) -> bool:
    """Whether all ranks have the same bits; collective, by way of digests."""
    own = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    digests = group.all_gather_object((tensor.dtype, tensor.shape, hashlib.sha256(own.numpy().data).hexdigest()))
    return len(set(digests)) == 1
