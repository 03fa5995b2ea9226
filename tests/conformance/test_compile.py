"""Collectives in compiled code: each breaks the graph, at any number of shapes."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import axonmpi as ax
from axonmpi import ReduceOp

pytestmark = pytest.mark.ranks(1, 2)


def all_reduced(tensor: Tensor, op: ReduceOp) -> Tensor:
    ax.all_reduce(tensor, op)
    return tensor * 2


def broadcast(tensor: Tensor) -> Tensor:
    ax.broadcast(tensor)
    return tensor * 3


def reduced_beside(tensor: Tensor) -> Tensor:
    work = ax.all_reduce(tensor, async_op=True)
    rows = tensor.shape[0]
    work.wait()
    return tensor * rows


def sent_around(tensor: Tensor) -> Tensor:
    work = ax.isend(tensor * 1, (ax.get_rank() + 1) % ax.get_world_size())
    ax.recv(received := torch.empty_like(tensor), (ax.get_rank() - 1) % ax.get_world_size())
    work.wait()
    return received * 2


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"all_reduce {op.name}": partial(all_reduced, op=op) for op in (ReduceOp.SUM, ReduceOp.AVERAGE)},
    "asynchronous": reduced_beside,
    "broadcast": broadcast,
    "all_gather": lambda tensor: ax.all_gather(tensor) + 1,
    "reduce_scatter": lambda tensor: ax.reduce_scatter_sum(torch.cat([tensor] * ax.get_world_size())) + 1,
    "all_to_all": lambda tensor: torch.cat(ax.all_to_all([tensor] * ax.get_world_size())) + 1,
    "messages": sent_around,
}


CASES = [*((function, None) for function in FUNCTIONS), ("all_reduce SUM", True)]


@pytest.mark.parametrize(("function", "dynamic"), CASES)
def test_every_shape_gives_what_it_gives_without(world, function, dynamic) -> None:
    if world.default_group.backend.name == "mock" and world.size > 1:
        pytest.skip("torch compiles in one thread of a process at a time")
    usual = FUNCTIONS[function]
    compiled = torch.compile(usual, backend="eager", dynamic=dynamic)
    for shape in ((4,), (7,), (3, 5)):
        own = torch.full(shape, world.rank + 1.0)
        assert torch.equal(compiled(own.clone()), usual(own.clone())), shape
