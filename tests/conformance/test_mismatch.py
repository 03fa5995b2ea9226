"""Ranks that make different calls: all of them learn who called what, and can go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from helpers.collective_checks import CollectiveChecks

import axonmpi as ax
from axonmpi import CollectiveMismatchError, ProcessGroup, ReduceOp

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.compares_calls]

Call = Callable[[ProcessGroup], object]


@dataclass(frozen=True)
class Difference:
    """Two calls that do not match, and how each is named in the error."""

    common: Call
    """Made by all ranks but the last."""
    other: Call
    names: tuple[str, str]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


DIFFERENCES = {
    "operation": Difference(
        lambda g: g.all_reduce(ones(3)),
        lambda g: g.broadcast(ones(3)),
        ("all_reduce(float32 [3], SUM)", "broadcast(float32 [3], root=0)"),
    ),
    "operation without tensor": Difference(
        lambda g: g.barrier(), lambda g: g.all_to_all([ones(1)] * g.size), ("barrier()", "all_to_all()")
    ),
    "dtype": Difference(
        lambda g: g.all_reduce(ones(3)),
        lambda g: g.all_reduce(ones(3, dtype=torch.float64)),
        ("all_reduce(float32 [3], SUM)", "all_reduce(float64 [3], SUM)"),
    ),
    "dtype of the same size": Difference(
        lambda g: g.all_gather(ones(3)),
        lambda g: g.all_gather(ones(3, dtype=torch.int32)),
        ("all_gather(float32 [*], dim=0)", "all_gather(int32 [*], dim=0)"),
    ),
    "shape": Difference(
        lambda g: g.all_reduce(ones(3)),
        lambda g: g.all_reduce(ones(4)),
        ("all_reduce(float32 [3], SUM)", "all_reduce(float32 [4], SUM)"),
    ),
    "shape of as many elements": Difference(
        lambda g: g.broadcast(ones(2, 3)),
        lambda g: g.broadcast(ones(6)),
        ("broadcast(float32 [2, 3], root=0)", "broadcast(float32 [6], root=0)"),
    ),
    "large shape": Difference(
        lambda g: g.all_reduce(ones(1000)),
        lambda g: g.all_reduce(ones(1001)),
        ("all_reduce(float32 [1000], SUM)", "all_reduce(float32 [1001], SUM)"),
    ),
    "small and large": Difference(
        lambda g: g.all_reduce(ones(1)),
        lambda g: g.all_reduce(ones(100_000)),
        ("all_reduce(float32 [1], SUM)", "all_reduce(float32 [100000], SUM)"),
    ),
    "size beside the gathered dimension": Difference(
        lambda g: g.all_gather(ones(2, 3)),
        lambda g: g.all_gather(ones(2, 4)),
        ("all_gather(float32 [*, 3], dim=0)", "all_gather(float32 [*, 4], dim=0)"),
    ),
    "gathered dimension": Difference(
        lambda g: g.all_gather(ones(2, 2), 0),
        lambda g: g.all_gather(ones(2, 2), 1),
        ("all_gather(float32 [*, 2], dim=0)", "all_gather(float32 [2, *], dim=1)"),
    ),
    "reduction": Difference(
        lambda g: g.all_reduce(ones(3)),
        lambda g: g.all_reduce(ones(3), ReduceOp.MAX),
        ("all_reduce(float32 [3], SUM)", "all_reduce(float32 [3], MAX)"),
    ),
    "root of a broadcast": Difference(
        lambda g: g.broadcast(ones(3), 0),
        lambda g: g.broadcast(ones(3), 1),
        ("broadcast(float32 [3], root=0)", "broadcast(float32 [3], root=1)"),
    ),
    "root of a reduction": Difference(
        lambda g: g.reduce(ones(3), 0),
        lambda g: g.reduce(ones(3), 1),
        ("reduce(float32 [3], SUM, root=0)", "reduce(float32 [3], SUM, root=1)"),
    ),
    "root of a gather": Difference(
        lambda g: g.gather(ones(3), 0),
        lambda g: g.gather(ones(3), 1),
        ("gather(float32 [*], root=0)", "gather(float32 [*], root=1)"),
    ),
    "root of a scatter": Difference(
        lambda g: g.scatter(ones(8), 0), lambda g: g.scatter(ones(8), 1), ("scatter(root=0)", "scatter(root=1)")
    ),
    "dimension of a reduce_scatter": Difference(
        lambda g: g.reduce_scatter(ones(4, 4), dim=0),
        lambda g: g.reduce_scatter(ones(4, 4), dim=-1),
        ("reduce_scatter(float32 [4, 4], SUM, dim=0)", "reduce_scatter(float32 [4, 4], SUM, dim=1)"),
    ),
    "ranks of a new group": Difference(
        lambda g: g.backend.split([0, 1]),
        lambda g: g.backend.split([1, 0]),
        ("split(ranks=[0, 1])", "split(ranks=[1, 0])"),
    ),
    "number of ranks of a new group": Difference(
        lambda g: g.backend.split([0, 1]),
        lambda g: g.backend.split([0]),
        ("split(ranks=[0, 1])", "split(ranks=[0])"),
    ),
    "number of gradients": Difference(
        lambda g: ax.sync_gradients([ones(3), ones(4)], g),
        lambda g: ax.sync_gradients([ones(3)], g),
        (
            "all_reduce(float32 [7], AVERAGE, made of 2 tensors: float32 [3], float32 [4])",
            "all_reduce(float32 [3], AVERAGE, made of 1 tensor: float32 [3])",
        ),
    ),
    "gradients of as many elements": Difference(
        lambda g: ax.sync_gradients([ones(3), ones(4)], g),
        lambda g: ax.sync_gradients([ones(4), ones(3)], g),
        ("made of 2 tensors: float32 [3], float32 [4])", "made of 2 tensors: float32 [4], float32 [3])"),
    ),
    "no gradients": Difference(
        lambda g: ax.sync_gradients([ones(0)], g),
        lambda g: ax.sync_gradients([], g),
        ("made of 1 tensor: float32 [0])", "made of no tensors)"),
    ),
    "gradients of another dtype at the end": Difference(
        lambda g: ax.sync_gradients([ones(3), ones(4, dtype=torch.float64)], g),
        lambda g: ax.sync_gradients([ones(3)], g),
        ("made of 2 tensors: float32 [3], float64 [4])", "made of 1 tensor: float32 [3])"),
    ),
    "a list of gradients and a tensor": Difference(
        lambda g: ax.sync_gradients([ones(3)], g),
        lambda g: ax.sync_gradient(ones(3), g),
        ("all_reduce(float32 [3], AVERAGE, made of 1 tensor: float32 [3])", "all_reduce(float32 [3], AVERAGE)"),
    ),
}


def test_all_ranks_raise_and_name_the_ranks(group) -> None:
    is_last = group.rank == group.size - 1
    first = "rank 0: " if group.size == 2 else "ranks 0, 1, 2: "
    for what, difference in DIFFERENCES.items():
        for _ in range(2):  # the second time, what could be remembered about the call is
            with pytest.raises(
                CollectiveMismatchError, match="made different calls, so no data was moved"
            ) as caught:
                (difference.other if is_last else difference.common)(group)
            lines = [line.strip().partition(" at test_")[0] for line in str(caught.value).splitlines()]
            for start, name in zip((first, f"rank {group.size - 1}: "), difference.names, strict=True):
                assert any(line.startswith(start) and line.endswith(name) for line in lines), (what, start, lines)
            assert lines[-1] == "All ranks of a group have to make the same calls in the same order."
        group.barrier()
    assert_usable(group)


def assert_usable(group: ProcessGroup) -> None:
    checks = CollectiveChecks(group)
    checks.every_operation(torch.float32, (3, 2))
    checks.finish()


def test_every_rank_of_the_group_is_named(world) -> None:
    group = world.new_group(list(reversed(range(world.size))))
    with pytest.raises(CollectiveMismatchError) as caught:
        group.all_reduce(ones(group.rank + 1))
    for rank in range(group.size):
        assert f"rank {rank}: all_reduce(float32 [{rank + 1}], SUM)" in str(caught.value)
    assert_usable(group)


def test_nothing_is_written(group) -> None:
    for count in (3, 1000):
        tensor = ones(count + group.rank)
        for operation in (group.all_reduce, group.broadcast, ax.sync_gradient):
            with pytest.raises(CollectiveMismatchError):
                operation(tensor)
        gradients = [tensor, ones(2)] if group.rank else [ones(2), tensor]
        with pytest.raises(CollectiveMismatchError):
            ax.sync_gradients(gradients)
        assert tensor.tolist() == [1] * (count + group.rank)


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXONMPI_DEBUG", "1")


def reduces(*, async_op: bool) -> None:
    work = ax.all_reduce(ones(3), async_op=async_op)
    if work is not None:
        work.wait()


def broadcasts() -> None:
    ax.broadcast(ones(3))


@pytest.mark.usefixtures("debug")
def test_places_of_the_calls_are_named_where_that_is_asked_for(group) -> None:
    """Also where another thread runs what was called."""
    for async_op in (False, True):
        with pytest.raises(CollectiveMismatchError) as caught:
            broadcasts() if group.rank == 0 else reduces(async_op=async_op)
        text = str(caught.value)
        first = reduces.__code__.co_firstlineno
        assert f"broadcast(float32 [3], root=0) at test_mismatch.py:{first + 7} in broadcasts" in text
        assert f"all_reduce(float32 [3], SUM) at test_mismatch.py:{first + 1} in reduces" in text
    assert_usable(group)


@pytest.mark.ranks(2)
def test_a_repeated_small_all_reduce_notices_too(group) -> None:
    """The short way of an all-reduce that was made before compares the calls as well."""
    tensor = ones(3)
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
        ax.sync_gradients([ones(size) for size in sizes], group)
    lines = [line for line in str(caught.value).splitlines() if "made of 52 tensors" in line]
    assert len(lines) == 2
    assert lines[0].split(": ", 1)[1] != lines[1].split(": ", 1)[1]
    assert_usable(group)
