"""The order between the caller's stream and a group's, over the double: values are spoilt where a wait is missing.

`python tests/jobs/mutants/nccl.py` breaks that order in the library, a place at a time: one of these has to fail. A
use of memory without order fails them, too.
"""

import pytest
import torch

import axonmpi as ax
from axonmpi import ReduceOp
from axonmpi.utils.device import device_at

pytestmark = [pytest.mark.over_double, pytest.mark.ranks(2)]


def test_what_is_computed_before_and_after_an_operation(world) -> None:
    group = world.default_group
    tensor = torch.full((50,), 1.0) * (world.rank + 1)
    works = [group.all_reduce(tensor, async_op=True), group.all_reduce(tensor, async_op=True)]
    beside = torch.arange(50.0) * 2
    works[0].wait()
    works[1].wait()
    assert (tensor + beside).tolist() == [6 + 2 * number for number in range(50)]


def test_values_that_are_converted_on_the_way(world) -> None:
    group = world.default_group
    short, matrix = torch.full((5,), 3, dtype=torch.int16), torch.ones(4, 2)
    works = [group.all_reduce(short, async_op=True), group.all_reduce(matrix[:, 0], async_op=True)]
    for work in works:
        work.wait()
    assert short.tolist() == [6] * 5
    assert matrix.tolist() == [[2, 1]] * 4
    product = torch.full((2,), 1j)
    group.all_reduce(product, ReduceOp.PRODUCT)
    assert product.tolist() == [-1, -1]
    assert group.all_gather(torch.full((2, 1), world.rank), 1).tolist() == [[0, 1]] * 2
    assert group.reduce_scatter(torch.ones(2, 2), dim=1).tolist() == [[2]] * 2


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "all_to_all", "reduce_scatter", "isend"])
def test_tensors_that_nobody_keeps(world, operation: str) -> None:
    """Theirs and the results' memory could be used for something else before the group's stream comes to them."""
    group = world.default_group
    kept = torch.ones(4)
    if operation == "isend":
        group.isend(torch.full((4,), world.rank + 5.0), 1 - world.rank)
        group.irecv(kept, 1 - world.rank).wait()
        assert kept.tolist() == [6.0 - world.rank] * 4
        return
    for _ in range(2):
        own = torch.ones(4)
        getattr(group, operation)([own] * 2 if operation == "all_to_all" else own, async_op=True)
        del own
        kept = kept + 1
    group.all_reduce(kept)
    assert kept.tolist() == [6.0] * 4


def test_parts_that_nobody_keeps(world) -> None:
    group = world.default_group
    output = torch.empty(3)
    group.reduce_scatter_into(output, [torch.ones(2), torch.ones(4)], [3, 3], async_op=True)
    group.all_gather_into(torch.empty(6), torch.ones(3), [3, 3], async_op=True)
    whole = torch.empty(6)
    last = group.all_gather_into(whole, torch.full((3,), float(world.rank)), [3, 3], async_op=True)
    last.wait()
    assert whole.tolist() == [0, 0, 0, 1, 1, 1]
    assert output.tolist() == [2, 2, 2]


def test_a_result_that_another_stream_waits_for(world) -> None:
    device = device_at(torch.device("cpu"))
    side = device.new_stream()
    work = world.default_group.all_gather(torch.ones(3), async_op=True)
    with device.within(side):
        value = work.result()
        total = value.sum()
        del value, work
    torch.zeros(6)  # where nothing keeps the result, this may get its memory
    device.wait(device.current_stream(), device.record(side))
    device.keep(total, device.current_stream())
    assert total.item() == 6


@pytest.mark.parametrize("connected", [False, True])
def test_messages_of_what_another_stream_computes(world, connected: bool) -> None:
    group, other = world.default_group, 1 - world.rank
    if connected:
        group.backend.connect_pairs([(0, 1), (1, 0)])
    device = device_at(torch.device("cpu"))
    side = device.new_stream()
    received = torch.zeros(4)
    receiving = group.irecv(received, other)
    with device.within(side):
        sending = group.isend(torch.full((4,), 1.0) + world.rank, other)
    receiving.wait()
    assert received.tolist() == [1.0 + other] * 4
    sending.wait()


def test_a_blocking_operation_after_one_that_nobody_has_waited_for(world) -> None:
    tensor = torch.ones(3)
    work = world.default_group.all_reduce(tensor, async_op=True)
    world.default_group.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 3
    work.wait()


def test_a_group_made_while_an_operation_is_under_way(world) -> None:
    tensor = torch.ones(3)
    work = world.default_group.all_reduce(tensor, async_op=True)
    group = world.new_group([1, 0])
    work.wait()
    group.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 3


def test_calls_that_differ_are_an_error_rather_than_a_hang(world) -> None:
    world.default_group.all_reduce(torch.ones(3 + world.rank))
    with pytest.raises(ax.NcclError, match="made different calls"):
        world.default_group.all_reduce(torch.ones(3))
    world.default_group.backend._device.faults.clear()
