"""Groups: the whole world, parts of it, one rank, other orders, overlapping ones used in turn."""

import copy
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.collective_checks import check_usable
from helpers.compare import refused

import axonmpi as ax
from axonmpi import ProcessGroup, World
from axonmpi.backends import all_gather_number, gather_if_different, parts_by_node

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.compares_calls]


@pytest.mark.ranks(1, 2, 3)
def test_numbers_inside_a_group(world: World) -> None:
    ranks = tuple(reversed(range(world.size)))
    group, own = world.new_group(ranks), ranks.index(world.rank)
    assert (group.ranks, group.size, group.rank) == (ranks, world.size, own)
    assert (ax.world_size(group), ax.rank(group), ax.is_main_process(group)) == (world.size, own, own == 0)
    assert (group.all_gather_object(world.rank), group.broadcast_object(world.rank, 0)) == (list(ranks), ranks[0])


def test_what_ranks_differ_in_is_gathered(world: World) -> None:
    backend = world.default_group.backend
    assert all_gather_number(backend, world.rank * 3).tolist() == list(range(0, world.size * 3, 3))
    assert gather_if_different(backend, ["the same", (1, 2.5)]) == [["the same", (1, 2.5)]]
    assert gather_if_different(backend, world.rank == 1) == [rank == 1 for rank in range(world.size)]
    nodes = list(parts_by_node(backend))
    assert (backend.control.node_ranks in nodes, nodes) == (True, sorted(nodes))
    assert sorted(rank for node in nodes for rank in node) == list(range(world.size))


@pytest.mark.ranks(2, 4)
def test_groups_of_groups(world: World) -> None:
    count = world.size // 2 + 1
    half = world.default_group.backend.split(range(count))
    if half is None:
        assert world.rank >= count
        return
    assert (half.split([half.size - 1]) is not None) == (half.rank == half.size - 1)
    check_usable(ProcessGroup(half))


def test_a_copied_module_communicates_in_the_same_group(world: World) -> None:
    module = torch.nn.Linear(1, 1)
    module.process_group = world.new_group(range(world.size))
    copied = copy.deepcopy(module)
    assert (copied.process_group is module.process_group, copied.weight is module.weight) == (True, False)
    check_usable(copied.process_group)


def test_operations_outside_a_group_name_it(world: World) -> None:
    group = world.new_group([0])
    if world.rank == 0:
        assert group.all_gather_object("here") == ["here"]
        return
    assert (group.rank, group.contains(world.rank)) == (-1, False)
    tensor = torch.ones(2)
    operations = (
        *(partial(getattr(group, name), tensor) for name in ("all_reduce", "broadcast", "all_gather", "gather")),
        *(partial(getattr(group, name), tensor) for name in ("reduce_scatter", "scatter", "broadcast_object")),
        *(partial(getattr(group, name), tensor, 0) for name in ("reduce", "send", "recv", "isend", "irecv")),
        partial(group.all_to_all, [tensor]),
        partial(group.all_gather_object, 1),
        group.barrier,
        lambda: group.backend,
        partial(ax.all_reduce_mean, tensor, group),
        partial(ax.sync_gradients, [tensor], group),
    )
    words = rf"rank {world.rank} is not in this group of ranks \[0\]; check"
    refused(ValueError, *((operation, words) for operation in operations))
    assert tensor.tolist() == [1, 1]


def test_a_closed_group_leaves_the_others_alone(world: World) -> None:
    first, second = (world.new_group(range(world.size)) for _ in range(2))
    for _ in range(2):
        first.close()
    check_usable(second)
    closed = "all_reduce: this group cannot be used: it was closed"
    refused(ax.CommunicatorError, (lambda: first.all_reduce(torch.ones(2)), closed))


def as_function(name: str, group: ProcessGroup | None, *arguments: Any, **options: Any) -> Any:
    return getattr(ax, name)(*arguments, group=group, **options)


def as_method(name: str, group: ProcessGroup, *arguments: Any, **options: Any) -> Any:
    found = getattr(group, name)
    return found(*arguments, **options) if callable(found) else found


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.not_over_double("NCCL has no tags")
def test_each_operation_is_a_function_and_a_method(world: World) -> None:
    group = world.new_group(range(world.size))
    for given, call in ((None, as_function), (group, as_function), (group, as_method)):
        check_each_operation(world, given, call)


def as_lists(value: Any) -> Any:
    """Return tensors, and those in a list, as numbers."""
    if isinstance(value, list):
        return [as_lists(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def check_each_operation(world: World, group: ProcessGroup | None, call: Callable[..., Any]) -> None:
    size, rank = world.size, world.rank
    average, root = (size - 1) / 2, size - 1
    for name, arguments, expected in (
        ("all_reduce", [], sum(range(1, size + 1))),
        ("all_reduce", [ax.ReduceOp.PRODUCT], math.factorial(size)),
        ("all_reduce_sum", [], sum(range(1, size + 1))),
        ("all_reduce_mean", [], average + 1),
        ("all_reduce_min", [], 1),
        ("all_reduce_max", [], size),
        ("all_reduce_product", [], math.factorial(size)),
        ("scan", [], sum(range(1, rank + 2))),
        ("sync_gradient", [], average + 1),
        ("broadcast", [], 1),
        ("broadcast_from", [root], size),
        ("reduce", [root, ax.ReduceOp.SUM], sum(range(1, size + 1)) if rank == root else rank + 1),
    ):
        call(name, group, tensor := torch.full((3,), rank + 1.0), *arguments)
        assert tensor.tolist() == [expected] * 3, name
    own, ranks = torch.tensor([[rank]]), torch.arange(float(size))
    tensors = [torch.tensor(10 * rank + other) for other in range(size)]
    for name, arguments, options, expected in (
        ("all_gather", [own], {}, [[other] for other in range(size)]),
        ("all_gather", [own], {"dim": 1}, [list(range(size))]),
        ("reduce_scatter_sum", [ranks], {}, [size * rank]),
        ("reduce_scatter_mean", [ranks.view(1, size)], {"dim": 1}, [[rank]]),
        ("gather_tensor", [own, root], {}, [[[other]] for other in range(size)] if rank == root else None),
        ("scatter_tensor", [ranks if rank == root else None, root], {}, [rank]),
        ("all_to_all", [tensors], {}, [10 * other + rank for other in range(size)]),
        ("broadcast_object", [{"rank": rank}, root], {}, {"rank": root}),
        ("all_gather_object", [rank], {}, list(range(size))),
        ("barrier", [], {}, None),
        ("rank", [], {}, ax.get_rank()),
        ("world_size", [], {}, ax.get_world_size()),
    ):
        assert as_lists(call(name, group, *arguments, **options)) == expected, name
    assert (ax.get_rank(), ax.get_world_size()) == (rank, size)
    gradients = [torch.full((2,), float(rank)), torch.tensor(float(rank), dtype=torch.float64)]
    call("sync_gradients", group, gradients)
    assert [gradient.tolist() for gradient in gradients] == [[average] * 2, average]
    message = torch.zeros(1)
    work = call("isend", group, torch.tensor([float(rank)]), (rank + 1) % size, tag=5)
    call("irecv", group, message, (rank - 1) % size, tag=5).wait()
    work.wait()
    assert message.item() == (rank - 1) % size


@pytest.mark.ranks(1)
def test_every_function_with_a_group_is_there_as_a_method() -> None:
    """With the same arguments, in the same order, less the group; `broadcast` can say from which rank, too."""
    for name in ax.comm.__all__:
        arguments = list(inspect.signature(getattr(ax.comm, name)).parameters)
        if name in ("rank", "world_size", "is_main_process") or "group" not in arguments:
            continue
        own = list(inspect.signature(getattr(ProcessGroup, name)).parameters)[1:]
        expected = ["tensor" if each == "t" else each for each in arguments if "group" not in each]
        assert [each for each in own if (name, each) != ("broadcast", "src")] == expected, name
