"""How long a rank of thousands plans before it writes: one rank, and what the others would tell it.

The model is fully sharded over all ranks. What messages take is not measured; to unpack them is.
"""

from __future__ import annotations

import math
import pickle
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....checkpoint.agreed import Agreed, agree
from ....checkpoint.catalogue import digests_of
from ....checkpoint.files.tensor_file import TensorSpec
from ....checkpoint.parts.boxes import Box
from ....checkpoint.parts.holdings import ALONE, Copies, Holding
from ....checkpoint.parts.part import Part, Piece
from ....checkpoint.writing.plan import Share
from ....fsdp.layout import Layout, by_elements
from .models import build_model

FEW, MANY = 8, 4096
_STATE = ("exp_avg", "exp_avg_sq")
_RANDOM_BYTES = 5056
_FILE_BYTES = 50 * 10**9
_TURNS = 5

Parts = dict[str, list[Part]]


class _Parameter(NamedTuple):
    """A parameter, and its place in the flat one of its block."""

    name: str
    shape: tuple[int, ...]
    place: int


def measure(mebibytes: int, blocks: int) -> dict[str, dict[str, float]]:
    """Measure so many plans, five times as many; local. Medians of seconds for few and for many ranks.

    Returns:
        For each number of ranks what the first plan takes, and what another one takes after it.
    """
    with torch.device("meta"):
        model = build_model(mebibytes)
    shapes = {name: tuple(parameter.shape) for name, parameter in model[0].named_parameters()}
    parameters = [
        _Parameter(f"{block}.{name}", shape, index)
        for block in range(len(model))
        for index, (name, shape) in enumerate(shapes.items())
    ]
    ranks = {size: _Rank(parameters, list(shapes.values()), size) for size in (FEW, MANY)}
    taken: dict[int, dict[str, list[float]]] = {size: {"first": [], "again": []} for size in ranks}
    for _ in range(blocks * _TURNS):
        for size, rank in ranks.items():
            before = None
            for turn in ("first", "again"):
                begin = time.perf_counter()
                before, _share = rank.plan(before)
                taken[size][turn].append(time.perf_counter() - begin)
    return {
        str(size): {turn: statistics.median(seconds) for turn, seconds in of_size.items()}
        for size, of_size in taken.items()
    }


class _Rank:
    """A rank in the midst of others, which do what it does.

    Args:
        parameters: Of the model.
        shapes: Of one block's.
        size: Number of ranks.

    Attributes:
        size: Number of ranks.
        rank: Its number.
    """

    def __init__(self, parameters: list[_Parameter], shapes: list[tuple[int, ...]], size: int) -> None:
        self.size = size
        self.rank = size // 3
        self._parameters = parameters
        self._layout = by_elements([math.prod(shape) for shape in shapes], size)
        self._memory = torch.empty(self._layout.sizes[0], device="meta")
        self._row = torch.empty(1, _RANDOM_BYTES, dtype=torch.uint8, device="meta")
        self._count = torch.empty((), device="meta")
        self._notes: dict[str, Any] = {
            "optimizer": {"parameters": {each.name: ["label", "float32", each.shape] for each in parameters}}
        }
        self._kinds = [_held(self._layout, rank) for rank in range(size)]
        speakers = {kind: self._kinds.index(kind) for kind in set(self._kinds)}
        self._lists = [pickle.dumps({})] * size
        for rank in speakers.values():
            self._lists[rank] = pickle.dumps(_specs(self._parts(rank)))
        self._digests = self._told()

    def plan(self, before: Agreed | None) -> tuple[Agreed, Share]:
        """Find what this rank writes."""
        group: Any = self
        return agree(group, self._parts(self.rank), self._notes, _FILE_BYTES, before)

    def all_reduce(self, own: Tensor) -> None:
        """Leave the sum of bytes as it is: the ranks have nothing in common."""

    def all_gather(self, own: Tensor) -> Tensor:
        """Return the digests that all ranks tell."""
        self._digests[self.rank] = own
        return self._digests.view(-1)

    def all_gather_object(self, own: Any) -> list[Any]:
        """Return the lists of tensors that all ranks tell."""
        return [own if rank == self.rank else pickle.loads(data) for rank, data in enumerate(self._lists)]

    def _told(self) -> Tensor:
        """Return [ranks, bytes] digests: the same tensors within a kind, the same notes, other parts."""
        own = torch.frombuffer(bytearray(digests_of(self._parts(self.rank), self._notes)), dtype=torch.uint8)
        told = own.repeat(self.size, 1)
        kinds = {kind: number for number, kind in enumerate(set(self._kinds) - {self._kinds[self.rank]})}
        for rank, kind in enumerate(self._kinds):
            if kind in kinds:
                told[rank, :16] = kinds[kind]
            told[rank, 32:] = torch.randint(256, (len(own) - 32,))
        return told

    def _parts(self, rank: int) -> Parts:
        made: Parts = {"model": [], "optimizer": []}
        for each in self._parameters:
            first, last = self._layout.part(each.place, rank)
            holders = self._layout.holders(each.place)
            wholes = Copies(len(holders), holders.index(rank)) if rank in holders else ALONE
            size = (last - first,)
            holding = Holding(each.name, each.shape, each.shape, (first, last), size, wholes=wholes)
            memory = self._memory[: last - first]
            made["model"].append(holding.part(memory))
            if first < last:
                made["optimizer"] += [holding.part(memory, key) for key in _STATE]
                made["optimizer"].append(holding.part_of_all(self._count, "step"))
        row = Piece(Box((rank, 0), (1, _RANDOM_BYTES)), self._row)
        return {**made, "random": [Part("random.torch", (self.size, _RANDOM_BYTES), torch.uint8, [row])]}


def _held(layout: Layout, rank: int) -> tuple[bool, ...]:
    """Say of which parameters of a block a rank has elements."""
    return tuple(rank in layout.holders(index) for index in range(len(layout.numels)))


def _specs(parts: Parts) -> dict[str, list[TensorSpec]]:
    return {kind: [TensorSpec(part.name, part.dtype, part.shape) for part in own] for kind, own in parts.items()}
