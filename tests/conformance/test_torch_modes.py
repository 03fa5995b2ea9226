"""Collectives under torch's modes: no_grad, inference_mode, other defaults; subclasses of Tensor."""

from functools import partial

import pytest
import torch
from helpers.collective_checks import CollectiveChecks, complete
from helpers.compare import refused

import axonmpi as ax

pytestmark = pytest.mark.ranks(2)


def run_everything(group, label: str = "") -> None:
    for asynchronous in (False, True):
        checks = CollectiveChecks(group, asynchronous=asynchronous, label=label)
        for shape in ((3, 2), (40, 30)):
            checks.every_operation(torch.float32, shape)
            checks.every_operation(torch.bfloat16, shape, "transposed")
        checks.finish()


def all_results(group, tensor) -> list[torch.Tensor]:
    """Return the results of each operation that makes tensors."""
    single = [group.all_gather(tensor), group.reduce_scatter(tensor), group.scatter(tensor)]
    return [*single, *group.all_to_all([tensor] * group.size), *(group.gather(tensor) or [])]


def test_inference_mode(world) -> None:
    """What the group makes for itself in inference mode must be usable outside of it, and the reverse."""
    group = world.new_group(range(world.size))
    for number in range(2):
        with torch.inference_mode():
            for count in (5, 1000 + number, 300_000 + number):
                tensor = torch.ones(count)
                complete(group.all_reduce(tensor, async_op=count % 2 == number))
                assert tensor[-1].item() == group.size
                group.broadcast(tensor, group.size - 1)
                assert group.all_gather(tensor[:2]).tolist() == [group.size] * (2 * group.size)
                assert group.reduce_scatter(tensor).sum() <= group.size**2 * count
                assert group.all_gather_object(number) == [number] * group.size
            inner = world.new_group(range(world.size))
        run_everything(group, "after inference mode")
        run_everything(inner, "in a group made in inference mode")


def test_a_tensor_of_inference_mode_outside_of_it(group) -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    calls = (partial(group.all_reduce, tensor), partial(group.broadcast, tensor))
    refused(ValueError, *((call, r"made in torch\.inference_mode.*clone") for call in calls))
    assert group.all_gather(tensor).tolist() == [1] * (3 * group.size)
    group.all_reduce(ones := tensor.clone())
    assert ones.tolist() == [group.size] * 3
    refused(ValueError, (calls[0], r"made in torch\.inference_mode"))


def test_another_default_device(world) -> None:
    with torch.device("meta"):
        group = world.new_group(range(world.size))
        for count, asynchronous in ((3, True), (1000, False)):
            tensor = torch.ones(count, device="cpu")
            assert {result.device.type for result in all_results(group, tensor)} == {"cpu"}
            complete(group.all_reduce(tensor, async_op=asynchronous))
            assert tensor.tolist() == [group.size] * count
            gathered = group.all_gather_object(group.rank)
            assert (group.broadcast_object("here"), gathered) == ("here", list(range(group.size)))
            ax.sync_gradients([tensor, tensor.double()], group)
            ax.sync_gradients([], group)
    run_everything(group, "after torch.device")


def test_another_default_dtype(world) -> None:
    before = torch.get_default_dtype()
    world.barrier()
    torch.set_default_dtype(torch.float64)
    try:
        run_everything(world.default_group)
        ax.sync_gradients([], world.default_group)
        world.barrier()
    finally:
        torch.set_default_dtype(before)


def test_parameters_under_no_grad_and_results_as_constants(group) -> None:
    parameter = torch.nn.Parameter(torch.full((3,), float(group.rank)))
    with torch.no_grad():
        group.all_reduce(parameter)
        group.broadcast(parameter)
    assert parameter.tolist() == [sum(range(group.size))] * 3
    assert (isinstance(parameter, torch.nn.Parameter), parameter.is_leaf) == (True, True)
    assert not any(result.requires_grad for result in all_results(group, parameter))


class Named(torch.Tensor):
    """A subclass that does nothing."""


def test_subclasses_of_tensor_and_autocast(group) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for count in (3, 3, 1000):
            group.all_reduce(tensor := torch.full((count,), 1.0 + 2**-20).as_subclass(Named))
            assert (tensor.dtype, tensor.tolist()) == (torch.float32, [(1.0 + 2**-20) * group.size] * count)
            assert group.all_gather(tensor).tolist() == tensor.tolist() * group.size
