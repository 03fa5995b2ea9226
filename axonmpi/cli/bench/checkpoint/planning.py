"""The time that one of thousands of ranks needs to plan a save: a rank among simulated ones.

The model is fully sharded over all ranks. The time of messages is not measured; the time to unpack them is.
"""

from __future__ import annotations

import math
import pickle
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from ....checkpoint.files.tensor_file import TensorSpec
from ....checkpoint.global_plan import GlobalPlan, plan_writes
from ....checkpoint.global_specs import digests_of
from ....checkpoint.shards.parameter_placement import Placement
from ....checkpoint.shards.subarrays import Subarray
from ....checkpoint.shards.tensor_shard import Piece, Replicas, TensorShard
from ....checkpoint.writing.local_plan import LocalPlan
from ....fsdp.layout import Layout, by_elements
from .models import build_model

FEW, MANY = 8, 4096
_STATE = ("exp_avg", "exp_avg_sq")
_RANDOM_BYTES = 5056
_FILE_BYTES = 50 * 10**9
_TURNS = 5

Shards = dict[str, list[TensorShard]]


def measure(mebibytes: int, blocks: int) -> dict[str, dict[str, float]]:
    """Measure five times as many plans as `blocks`; local.

    Returns:
        For few and for many ranks the medians of the seconds of the first plan, and of another one after it.
    """
    with torch.device("meta"):
        model = build_model(mebibytes)
    ranks = {str(size): _Rank(model, size) for size in (FEW, MANY)}
    seconds: dict[str, dict[str, list[float]]] = {size: {"first": [], "again": []} for size in ranks}
    for _ in range(blocks * _TURNS):
        for size, rank in ranks.items():
            before = None
            for taken in seconds[size].values():
                begin = time.perf_counter()
                before, _share = rank.plan(before)
                taken.append(time.perf_counter() - begin)
    return {
        size: {turn: statistics.median(taken) for turn, taken in of_size.items()}
        for size, of_size in seconds.items()
    }


class _Rank:
    """A rank among simulated ones, and the group by which it hears from them.

    Args:
        model: The model, not sharded.
        size: Number of ranks.

    Attributes:
        size: Number of ranks.
        rank: Its number.
    """

    def __init__(self, model: nn.Sequential, size: int) -> None:
        self.size = size
        self.rank = size // 3
        shapes = {name: tuple(parameter.shape) for name, parameter in model[0].named_parameters()}
        # The name and shape of each parameter, and its index in the flat one of its block.
        self._parameters = [
            (f"{block}.{name}", shape, index)
            for block in range(len(model))
            for index, (name, shape) in enumerate(shapes.items())
        ]
        self._layout = by_elements([math.prod(shape) for shape in shapes.values()], size)
        self._memory = torch.empty(self._layout.sizes[0], device="meta")
        self._row = torch.empty(1, _RANDOM_BYTES, dtype=torch.uint8, device="meta")
        self._count = torch.empty((), device="meta")
        self._notes: dict[str, Any] = {
            "optimizer": {"parameters": {name: ["label", "float32", shape] for name, shape, _ in self._parameters}}
        }
        # Ranks of one kind have elements of the same parameters; the first of each kind sends their specs.
        self._kinds = [_held(self._layout, rank) for rank in range(size)]
        self._lists = [pickle.dumps({})] * size
        for kind in set(self._kinds):
            first = self._kinds.index(kind)
            self._lists[first] = pickle.dumps(_specs(self._parts(first)))
        self._digests = self._all_digests()

    def plan(self, before: GlobalPlan | None) -> tuple[GlobalPlan, LocalPlan]:
        """Agree on the files, and plan this rank's writes."""
        group: Any = self
        return plan_writes(group, self._parts(self.rank), self._notes, _FILE_BYTES, before)

    def all_reduce(self, own: Tensor) -> None:
        """Leave the sum of bytes unchanged, since no two ranks have equal parts."""

    def all_gather(self, own: Tensor) -> Tensor:
        """Return the digests of all ranks."""
        self._digests[self.rank] = own
        return self._digests.view(-1)

    def all_gather_object(self, own: Any) -> list[Any]:
        """Return the specs of all ranks."""
        return [own if rank == self.rank else pickle.loads(data) for rank, data in enumerate(self._lists)]

    def _all_digests(self) -> Tensor:
        """Return [ranks, bytes] digests: the same tensors within a kind, the same notes, other shards."""
        own = torch.frombuffer(bytearray(digests_of(self._parts(self.rank), self._notes)), dtype=torch.uint8)
        digests = own.repeat(self.size, 1)
        kinds = {kind: number for number, kind in enumerate(set(self._kinds) - {self._kinds[self.rank]})}
        for rank, kind in enumerate(self._kinds):
            if kind in kinds:
                digests[rank, :16] = kinds[kind]
            digests[rank, 32:] = torch.randint(256, (len(own) - 32,))
        return digests

    def _parts(self, rank: int) -> Shards:
        made: Shards = {"model": [], "optimizer": []}
        for name, shape, index in self._parameters:
            first, last = self._layout.part(index, rank)
            holders = self._layout.holders(index)
            state_replicas = Replicas.among(holders, rank)
            size = (last - first,)
            placement = Placement(name, shape, shape, (first, last), size, state_replicas=state_replicas)
            memory = self._memory[: last - first]
            made["model"].append(placement.shard(memory))
            if first < last:
                made["optimizer"] += [placement.shard(memory, key) for key in _STATE]
                made["optimizer"].append(placement.unsharded_state(self._count, "step"))
        row = Piece(Subarray((rank, 0), (1, _RANDOM_BYTES)), self._row)
        return {**made, "random": [TensorShard("random.torch", (self.size, _RANDOM_BYTES), torch.uint8, [row])]}


def _held(layout: Layout, rank: int) -> tuple[bool, ...]:
    """Return for each parameter of a block True if a rank has elements of it."""
    return tuple(rank in layout.holders(index) for index in range(len(layout.numels)))


def _specs(shards: Shards) -> dict[str, list[TensorSpec]]:
    return {
        kind: [TensorSpec(shard.name, shard.dtype, shard.shape) for shard in own] for kind, own in shards.items()
    }
