"""Ranks that make different calls: all of them learn who called what, and can go on."""

import math
import re
from functools import partial

import pytest
import torch
from helpers.collective_checks import check_usable, complete

import axonmpi as ax
from axonmpi import CollectiveMismatchError, ProcessGroup, ReduceOp

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.compares_calls]
INT, WIDE = torch.int32, torch.float64
LARGE = 600_001
"""Elements: more than all ranks reduce by themselves."""
CALLS = {
    "all_reduce(float32 [1], SUM)": lambda g, ones: g.all_reduce(ones(1)),
    "all_reduce(float32 [3], SUM)": lambda g, ones: g.all_reduce(ones(3)),
    "all_reduce(float32 [4], SUM)": lambda g, ones: g.all_reduce(ones(4)),
    "all_reduce(float32 [1, 3], SUM)": lambda g, ones: g.all_reduce(ones(1, 3)),
    "all_reduce(float32 [3], MAX)": lambda g, ones: g.all_reduce(ones(3), ReduceOp.MAX),
    "all_reduce(float32 [3], AVERAGE)": lambda g, ones: ax.sync_gradient(ones(3), g),
    "all_reduce(float64 [3], SUM)": lambda g, ones: g.all_reduce(ones(3, dtype=WIDE)),
    "all_reduce(int32 [3], SUM)": lambda g, ones: g.all_reduce(ones(3, dtype=INT)),
    "all_reduce(float32 [1000], SUM)": lambda g, ones: g.all_reduce(ones(1000)),
    "all_reduce(float32 [1001], SUM)": lambda g, ones: g.all_reduce(ones(1001)),
    f"all_reduce(float32 [{LARGE}], SUM)": lambda g, ones: g.all_reduce(ones(LARGE)),
    f"all_reduce(float32 [{LARGE}], AVERAGE)": lambda g, ones: g.all_reduce(ones(LARGE), ReduceOp.AVERAGE),
    f"all_reduce(int32 [{LARGE}], SUM)": lambda g, ones: g.all_reduce(ones(LARGE, dtype=INT)),
    f"all_reduce(float32 [{LARGE + 2}], SUM)": lambda g, ones: g.all_reduce(ones(LARGE + 2), async_op=True).wait(),
    "reduce(float32 [3], SUM, root=0)": lambda g, ones: g.reduce(ones(3), 0),
    "reduce(float32 [3], SUM, root=1)": lambda g, ones: g.reduce(ones(3), 1),
    f"reduce(float32 [{LARGE}], SUM, root=0)": lambda g, ones: g.reduce(ones(LARGE), 0),
    f"reduce(float32 [{LARGE}], SUM, root=1)": lambda g, ones: g.reduce(ones(LARGE), 1),
    "broadcast(float32 [3], root=0)": lambda g, ones: g.broadcast(ones(3), 0),
    "broadcast(float32 [3], root=1)": lambda g, ones: g.broadcast(ones(3), 1),
    "broadcast(float32 [2, 3], root=0)": lambda g, ones: g.broadcast(ones(2, 3)),
    "broadcast(float32 [6], root=0)": lambda g, ones: g.broadcast(ones(6)),
    f"broadcast(float32 [{LARGE}], root=0)": lambda g, ones: g.broadcast(ones(LARGE)),
    f"broadcast(float32 [{LARGE}], root=1)": lambda g, ones: g.broadcast(ones(LARGE), 1),
    "all_gather(float32 [*], dim=0)": lambda g, ones: g.all_gather(ones(LARGE)),
    "all_gather(int32 [*], dim=0)": lambda g, ones: g.all_gather(ones(3, dtype=INT)),
    "all_gather(float32 [*, 3], dim=0)": lambda g, ones: g.all_gather(ones(2, 3)),
    "all_gather(float32 [*, 4], dim=0)": lambda g, ones: g.all_gather(ones(2, 4)),
    "all_gather(float32 [3, *], dim=1)": lambda g, ones: g.all_gather(ones(3, 3), 1),
    "gather(float32 [*], root=0)": lambda g, ones: g.gather(ones(3), 0),
    "gather(float32 [*], root=1)": lambda g, ones: g.gather(ones(3), 1),
    "scatter(root=0)": lambda g, ones: g.scatter(ones(8), 0),
    "scatter(root=1)": lambda g, ones: g.scatter(ones(8), 1),
    "reduce_scatter(float32 [4, 4], SUM, dim=0)": lambda g, ones: g.reduce_scatter(ones(4, 4)),
    "reduce_scatter(float32 [4, 4], SUM, dim=1)": lambda g, ones: g.reduce_scatter(ones(4, 4), dim=-1),
    f"reduce_scatter(float32 [{LARGE}], SUM, dim=0)": lambda g, ones: g.reduce_scatter(ones(LARGE)),
    f"reduce_scatter(float32 [{LARGE}], MAX, dim=0)": lambda g, ones: g.reduce_scatter(ones(LARGE), ReduceOp.MAX),
    "all_to_all()": lambda g, ones: g.all_to_all([ones(1)] * g.size),
    "scan(float32 [3], SUM)": lambda g, ones: g.scan(ones(3)),
    "exscan(float32 [3], SUM)": lambda g, ones: g.scan(ones(3), exclusive=True),
    f"scan(float32 [{LARGE}], MAX)": lambda g, ones: g.scan(ones(LARGE), ReduceOp.MAX),
    "barrier()": lambda g, ones: g.barrier(),
    "split(ranks=[0, 1])": lambda g, ones: g.backend.split([0, 1]),
    "split(ranks=[1, 0])": lambda g, ones: g.backend.split([1, 0]),
    "split(ranks=[0])": lambda g, ones: g.backend.split([0]),
    "made of no tensors)": lambda g, ones: ax.sync_gradients([], g),
    "made of 1 tensor: float32 [0])": lambda g, ones: ax.sync_gradients([ones(0)], g),
    "AVERAGE, made of 1 tensor: float32 [3])": lambda g, ones: ax.sync_gradients([ones(3)], g),
    "made of 2 tensors: float32 [3], float32 [4])": lambda g, ones: ax.sync_gradients([ones(3), ones(4)], g),
    "made of 2 tensors: float32 [4], float32 [3])": lambda g, ones: ax.sync_gradients([ones(4), ones(3)], g),
    "made of 2 tensors: float32 [3], float64 [4])": lambda g, ones: ax.sync_gradients(
        [ones(3), ones(4, dtype=WIDE)], g
    ),
}
"""Calls by how errors name them; each differs from its neighbours in one thing, as far as possible."""


class Memory:
    """Makes tensors of ones, in ordinary memory, in symmetric memory, or in another kind on every second rank."""

    def __init__(self, group: ProcessGroup, way: str) -> None:
        self._bytes = group.symmetric_empty((8 * LARGE,), torch.uint8)
        if way == "ordinary" or (way == "one of each" and group.rank % 2):
            self._bytes = torch.empty(8 * LARGE, dtype=torch.uint8)

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._bytes[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape).fill_(1)


@pytest.mark.parametrize(
    ("way", "before", "step"),
    [("ordinary", False, 1), ("ordinary", True, 11), ("symmetric", False, 5), ("one of each", True, 19)],
)
def test_all_ranks_raise_and_name_the_ranks(group, way, before, step) -> None:
    """Each call against another one, each made before or not."""
    ones = Memory(group, way).ones
    is_last = group.rank == group.size - 1
    first = "rank 0: " if group.size == 2 else "ranks 0, 1, 2: "
    names = list(CALLS)
    for common, other in zip(names, names[step:] + names[:step], strict=True):
        with pytest.raises(CollectiveMismatchError, match="made different calls, so no data was moved") as caught:
            CALLS[other if is_last else common](group, ones)
        lines = [line.strip().partition(" at test_")[0] for line in str(caught.value).splitlines()]
        for start, name in ((first, common), (f"rank {group.size - 1}: ", other)):
            assert any(line.startswith(start) and line.endswith(name) for line in lines), (common, other, lines)
        assert lines[-1] == "All ranks of a group have to make the same calls in the same order."
        if before:  # plans, scratch memory and fingerprints are remembered from now on
            CALLS[common](group, ones)
    check_usable(group)


def test_every_rank_of_the_group_is_named(world) -> None:
    group = world.new_group(list(reversed(range(world.size))))
    for _ in range(2):
        with pytest.raises(CollectiveMismatchError) as caught:
            group.all_reduce(torch.ones(group.rank + 1))
        for rank in range(group.size):
            assert f"rank {rank}: all_reduce(float32 [{rank + 1}], SUM)" in str(caught.value)
    check_usable(group)


@pytest.mark.parametrize("way", ["ordinary", "symmetric", "one of each"])
def test_nothing_is_written(group, way) -> None:
    """Neither in the own memory nor in that of the others."""
    ones = Memory(group, way).ones
    last = group.rank == group.size - 1
    for count in (3, 1000, LARGE):
        group.all_reduce(ones(count))
        tensor = ones(count).fill_(group.rank)
        for common, other in (
            (partial(group.all_reduce, tensor), partial(group.broadcast, tensor)),
            (partial(group.reduce, tensor, 0), partial(group.reduce, tensor, 1)),
            (partial(group.broadcast, tensor, 1), partial(group.all_reduce, tensor, ReduceOp.MAX)),
            (partial(ax.sync_gradients, [tensor]), partial(ax.sync_gradients, [tensor[:1], tensor[1:]])),
        ):
            with pytest.raises(CollectiveMismatchError):
                (other if last else common)()
            assert bool((tensor == group.rank).all())


def reduces(*, async_op: bool) -> None:
    complete(ax.all_reduce(torch.ones(3), async_op=async_op))


@pytest.mark.ranks(2)
def test_places_of_the_calls_are_named_where_that_is_asked_for(group, monkeypatch) -> None:
    """Also where another thread runs what was called."""
    monkeypatch.setenv("AXONMPI_DEBUG", "1")
    first = reduces.__code__.co_firstlineno
    for async_op in (False, True):
        with pytest.raises(CollectiveMismatchError) as caught:
            ax.broadcast(torch.ones(3)) if group.rank == 0 else reduces(async_op=async_op)
        text = str(caught.value)
        assert re.search(r"broadcast\(float32 \[3\], root=0\) at test_mismatch\.py:\d+ in test_places", text)
        assert f"all_reduce(float32 [3], SUM) at test_mismatch.py:{first + 1} in reduces" in text
    check_usable(group)


@pytest.mark.ranks(2)
def test_a_repeated_small_all_reduce_notices_too(group) -> None:
    """The short way of an all-reduce that was made before compares the calls as well."""
    tensor = torch.ones(3)
    for _ in range(3):
        group.all_reduce(tensor.fill_(1.0))
    with pytest.raises(CollectiveMismatchError, match=r"all_reduce\(float32 \[3\], SUM\)"):
        group.barrier() if group.rank == 0 else group.all_reduce(tensor)
    group.all_reduce(tensor.fill_(1.0))
    assert tensor.tolist() == [group.size] * 3


@pytest.mark.ranks(2)
def test_long_lists_are_told_apart_beyond_what_is_shown(group) -> None:
    sizes = [3] * 50 + ([1, 2] if group.rank else [2, 1])
    with pytest.raises(CollectiveMismatchError) as caught:
        ax.sync_gradients([torch.ones(size) for size in sizes], group)
    lines = str(caught.value).splitlines()
    one, other = (line.split(": ", 1)[1] for line in lines if "made of 52 tensors" in line)
    assert one != other
    check_usable(group)
