"""Ranks that make different calls, of any sizes, on any kind of memory: all learn of it, and can go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.placements import REAL, limits
from torch import Tensor

from axonmpi import CollectiveMismatchError, ProcessGroup, ReduceOp, World

pytestmark = [REAL, pytest.mark.ranks(2, 4)]
WAYS = ("ordinary", "symmetric", "one of each")


class Caller:
    """Makes any call with tensors of ones in any kind of memory.

    Args:
        world: A new group is made of all of its ranks; collective.
        way: Which memory.
    """

    def __init__(self, world: World, way: str) -> None:
        self.group: ProcessGroup = world.new_group(range(world.size))
        self.large = limits(world.size).direct // 4 + 1
        self._memory = self.group.symmetric_empty((8 * self.large,), torch.uint8)
        if way == "ordinary" or (way == "one of each" and self.group.rank % 2):
            self._memory = torch.empty(8 * self.large, dtype=torch.uint8)

    def ones(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._memory[: count * dtype.itemsize].view(dtype).fill_(1)

    def calls(self) -> dict[str, Callable[[], object]]:
        """All ranks' calls by name; each differs from all others in what ranks have to agree on."""
        group, ones, large = self.group, self.ones, self.large
        average, integer = ReduceOp.AVERAGE, torch.int32
        return {
            "small all_reduce": lambda: group.all_reduce(ones(3)),
            "small all_reduce of another dtype": lambda: group.all_reduce(ones(3, integer)),
            "small all_reduce of another shape": lambda: group.all_reduce(ones(3).view(1, 3)),
            "direct all_reduce": lambda: group.all_reduce(ones(1000)),
            "large all_reduce": lambda: group.all_reduce(ones(large)),
            "large all_reduce of another op": lambda: group.all_reduce(ones(large), average),
            "large all_reduce of another dtype": lambda: group.all_reduce(ones(large, integer)),
            "large all_reduce of another size": lambda: group.all_reduce(ones(large + 1)),
            "large asynchronous all_reduce": lambda: group.all_reduce(ones(large + 2), async_op=True).wait(),
            "small reduce": lambda: group.reduce(ones(3), 0),
            "large reduce": lambda: group.reduce(ones(large), 0),
            "large reduce to another root": lambda: group.reduce(ones(large), 1),
            "small broadcast": lambda: group.broadcast(ones(3)),
            "large broadcast": lambda: group.broadcast(ones(large)),
            "large broadcast from another root": lambda: group.broadcast(ones(large), 1),
            "all_gather": lambda: group.all_gather(ones(large)),
            "all_gather of another dtype": lambda: group.all_gather(ones(3, integer)),
            "reduce_scatter": lambda: group.reduce_scatter(ones(large)),
            "reduce_scatter of another op": lambda: group.reduce_scatter(ones(large), average),
            "barrier": group.barrier,
            "allocation": lambda: group.symmetric_empty((large,), torch.float32),
            "allocation of another size": lambda: group.symmetric_empty((3,), torch.float32),
        }

    def check(self) -> None:
        """Every way through the shared memory works."""
        size, sums = self.group.size, sum(range(1, self.group.size + 1))
        for count in (3, 1000, self.large):
            tensor = self.ones(count).mul_(self.group.rank + 1)
            self.group.all_reduce(tensor)
            assert bool((tensor == sums).all())
            gathered = self.group.all_gather(self.ones(count).mul_(self.group.rank))
            assert torch.equal(gathered, torch.arange(float(size)).repeat_interleave(count))
            self.group.barrier()


@pytest.mark.parametrize("way", WAYS)
def test_different_calls_are_noticed_and_later_ones_work(world, way) -> None:
    """Each call against several others, made before or not, by the last rank or by each rank another one."""
    caller = Caller(world, way)
    calls = caller.calls()
    names = list(calls)
    for before in (False, True):
        for step in (1, 2, 5, 11, 19):
            for number, common in enumerate(names):
                place = world.rank if step == 2 else world.rank == world.size - 1
                with pytest.raises(CollectiveMismatchError, match="made different calls, so no data was moved"):
                    calls[names[(number + step * place) % len(names)]]()
                if before:  # plans, scratch memory and fingerprints are remembered from now on
                    calls[common]()
        caller.check()
    caller.group.close()


def test_data_is_as_it_was(world) -> None:
    """A mismatch is noticed before anything is written, in the own memory and in that of the others."""
    for way in WAYS:
        caller = Caller(world, way)
        last = world.rank == world.size - 1
        for count in (3, 1000, caller.large):
            caller.group.all_reduce(caller.ones(count))
            tensor = caller.ones(count).fill_(world.rank)
            for common, other in (
                (lambda g, t: g.all_reduce(t), lambda g, t: g.broadcast(t)),
                (lambda g, t: g.reduce(t, 0), lambda g, t: g.reduce(t, 1)),
                (lambda g, t: g.broadcast(t, 1), lambda g, t: g.all_reduce(t, ReduceOp.MAX)),
            ):
                with pytest.raises(CollectiveMismatchError):
                    (other if last else common)(caller.group, tensor)
                assert bool((tensor == world.rank).all())
        caller.group.close()
