"""The order in which gradients are reduced and handed out, and the steps of one flat parameter's gradient."""

from types import SimpleNamespace

import pytest
import torch
from helpers.compare import assert_close, assert_equal, refused
from helpers.models import built, fail, new_group
from torch import nn

import axonmpi as ax
from axonmpi import ReduceOp, ShardingStrategy
from axonmpi.fsdp.gradient_queue import FlatGradient, GradientQueue

# ---- the queue ----------------------------------------------------------------------------------------------


class NotedGradient:
    """A gradient of two parameters, its name and its name in capitals, that writes down what is done with it."""

    def __init__(self, name: str, events: list[object], nbytes: int = 4) -> None:
        self.name, self.events, self.full_bytes = name, events, nbytes
        self.flat = SimpleNamespace(parameters=[name, name.upper()])
        self.unit = SimpleNamespace(first_event=0)
        self.holds = [name]
        self.arrived, self.defined = {name}, set()
        self.launched = self.is_complete = False

    def held(self) -> list[str]:
        return self.holds

    def launch(self, *, async_op: bool) -> None:
        self.launched = True
        self.defined.update(self.holds)
        self.holds = []
        self.events.append(f"launch {self.name}{' beside' if async_op else ''}")

    def wait(self) -> None:
        pass

    def let_go(self) -> None:
        self.events.append(f"let go {self.name}")

    def finish(self, used: list[bool]) -> None:
        self.launched = False
        self.defined.clear()
        self.events.append((f"finish {self.name}", used))

    def discard(self) -> None:
        self.events.append(f"discard {self.name}")


def queue_of(world: ax.World, names: str = "abc", most_bytes: int | None = None, overlaps: bool = False):
    """Return a queue of noted gradients, one a letter, and the list of events."""
    events: list[object] = []
    shard = world.default_group
    memory = SimpleNamespace(overlaps=overlaps)
    groups = SimpleNamespace(memory=memory, shard=shard, both=[shard] if world.size > 1 else [])
    return GradientQueue([NotedGradient(name, events) for name in names], groups, most_bytes), events


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("overlaps", [False, True])
def test_complete_gradients_are_launched_in_order(world, overlaps):
    queue, events = queue_of(world, overlaps=overlaps)
    a, b, c = queue.gradients
    beside = " beside" if overlaps and world.size > 1 else ""
    for gradient, launched in ((b, ""), (a, "ab"), (c, "abc"), (c, "abc")):
        gradient.is_complete = True
        queue.launch_complete()
        assert events == [f"launch {name}{beside}" for name in launched]


@pytest.mark.ranks(1)
def test_gathered_units_are_launched_after_their_backward(world):
    queue, events = queue_of(world, most_bytes=100)
    for gradient, begins in zip(queue.gradients, (5, 3, 1), strict=True):
        gradient.unit.first_event = begins
        gradient.is_complete = True
    queue.launch_complete()
    assert events == []
    for event, launched in ((5, ""), (4, "a"), (1, "ab")):
        queue.launch_after(event)
        assert events == [f"launch {name}" for name in launched]


@pytest.mark.ranks(1)
def test_the_oldest_reductions_are_waited_for_before_too_much_is_under_way(world):
    queue, events = queue_of(world, "abcd", most_bytes=8)
    queue.gradients[3].full_bytes = 12  # too large for any company, and never waits for itself to be launched
    queue.launch_after(-1)
    assert events == [
        *("launch a", "launch b", "let go a", "launch c"),
        *("let go b", "let go c", "let go d", "launch d"),
    ]
    queue.gradients[3].full_bytes = 4
    for forget in (queue.reduce_rest, queue.discard):
        forget()
        events.clear()
        for number, gradient in enumerate(queue.gradients):
            gradient.launched = number > 1
        queue.launch_after(-1)
        assert events == ["launch a", "launch b"]


@pytest.mark.ranks(1)
def test_gradients_that_accumulate_have_arrived_anew_later(world):
    queue, events = queue_of(world)
    assert not queue.accumulates
    for forget in (queue.reduce_rest, queue.discard):
        queue.keep()
        assert (queue.accumulates, [gradient.arrived for gradient in queue.gradients]) == (True, [set()] * 3)
        events.clear()
        forget()
        assert not queue.accumulates
    assert events == ["discard a", "discard b", "discard c"]


@pytest.mark.ranks(2)
def test_the_rest_is_reduced_before_averages_are_handed_out(world):
    """A parameter is used if any rank has a gradient, now or when the reduction began."""
    queue, events = queue_of(world)
    a, b, c = queue.gradients
    a.is_complete = True
    queue.launch_complete()
    a.holds, b.holds, c.holds = [], ["B"] if world.rank == 1 else ["b"], []
    queue.reduce_rest()
    used = {"a": [True, False], "b": [True, True], "c": [False, False]}
    assert events == ["launch a", "launch b", "launch c", *((f"finish {name}", own) for name, own in used.items())]


@pytest.mark.ranks(2)
def test_gradients_that_come_after_their_reduction_are_reduced_by_themselves(world):
    """On all ranks, though one alone has such a gradient."""
    queue, events = queue_of(world, "a")
    (gradient,) = queue.gradients
    gradient.is_complete = True
    queue.launch_complete()
    gradient.holds = ["A"] if world.rank == 1 else []
    gradient.finish = lambda used: events.append(used) or setattr(gradient, "launched", False)
    queue.reduce_rest()
    assert events == ["launch a", [True, True], "launch a", [True, True]]


@pytest.mark.ranks(2)
def test_what_any_rank_holds_is_reduced_by_hand(world):
    queue, events = queue_of(world, "ab")
    for gradient in queue.gradients:
        gradient.holds = []
    queue.reduce_held()
    assert events == []
    queue.gradients[1].holds = ["b"] * world.rank
    queue.reduce_held()
    assert events == ["launch a", "launch b", ("finish a", [False, False]), ("finish b", [True, False])]


@pytest.mark.ranks(1)
def test_all_is_dropped_if_a_hook_of_a_user_raises(world):
    queue, events = queue_of(world, "ab")
    queue.gradients[0].finish = fail
    refused(ArithmeticError, (queue.reduce_rest, "in the middle"))
    assert events == ["launch a", "launch b", "discard a", "discard b"]


# ---- the gradient of one flat parameter ---------------------------------------------------------------------


@pytest.fixture
def gradient_of(world, monkeypatch):
    """Return what shards a layer over ranks, each on a node of its own, and gives its flat gradient."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "1")

    def make(**options) -> FlatGradient:
        model = ax.FSDP(built(lambda: nn.Linear(3, 2)), group, **options)
        kept.append(model)
        (gradient,) = model.runtime.queue.gradients
        return gradient

    kept: list[ax.FSDP] = []
    with new_group(world) as group:
        yield make


def bring(gradient: FlatGradient, value: float, *numbers: int) -> None:
    """Let gradients arrive, as autograd leaves them, of some of the parameters."""
    for number in numbers:
        parameter = gradient.flat.parameters[number]
        parameter.full.grad = torch.full_like(parameter.full, value)
        gradient.arrived.add(parameter)


def shards(gradient: FlatGradient) -> list[torch.Tensor | None]:
    return [parameter.sharded.grad for parameter in gradient.flat.parameters]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.not_over_double("looks at the mock's log of operations")
def test_one_reduction_leaves_the_average_in_the_shard(world, gradient_of, async_op):
    gradient = gradient_of(shard_by="parameters")
    weight, bias = gradient.flat.parameters
    assert not gradient.is_complete
    bring(gradient, 1.0 + world.rank, 0)
    assert (gradient.is_complete, gradient.held()) == (False, [weight])
    bias.sharded.requires_grad_(False)
    assert gradient.is_complete
    log = gradient.flat.group.backend.log
    before = len(log)
    gradient.launch(async_op=async_op)
    assert (gradient.launched, gradient.defined, gradient.held()) == (True, {weight}, [])
    for wait in (gradient.wait, gradient.let_go):
        wait()
    assert [call.op for call in log[before:]] == [ReduceOp.AVERAGE]
    gradient.finish([True, False])
    assert (gradient.launched, gradient.arrived, gradient.defined) == (False, set(), set())
    assert bias.sharded.grad is None
    if weight.sharded.numel():
        assert torch.equal(weight.sharded.grad, torch.full((2, 3), 1.5))
        assert weight.sharded.grad.data_ptr() == gradient.shard.data_ptr()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_averages_are_added_and_hooks_called(world, gradient_of, strategy):
    gradient = gradient_of(sharding_strategy=strategy)
    called = []
    for parameter in gradient.flat.parameters:
        parameter.sharded.register_post_accumulate_grad_hook(lambda shown: called.append(shown.grad.clone()))
    for value in (1.0, 2.0):
        bring(gradient, value + world.rank, 0, 1)
        gradient.launch(async_op=False)
        assert not called
        gradient.finish([True, True])
        own = [grad for grad in shards(gradient) if grad is not None]
        assert_equal(called, own)
        called.clear()
    assert_close(own, [torch.full_like(grad, 1.5 + 2.5) for grad in own])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("reduce_dtype", "on_the_wire"),
    [(None, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float64, torch.float64)],
)
@pytest.mark.not_over_double("looks at the mock's log of operations")
def test_the_dtype_of_a_reduction(world, gradient_of, reduce_dtype, on_the_wire):
    """Gradients travel as computed where the sum is wider all the same; the shard has the parameter's dtype."""
    gradient = gradient_of(mixed_precision=ax.MixedPrecision(torch.bfloat16, reduce_dtype))
    assert gradient.full_bytes == sum(gradient.flat.sizes) * on_the_wire.itemsize
    bring(gradient, 1.0, 0, 1)
    log = gradient.flat.group.backend.log
    before = len(log)
    gradient.launch(async_op=False)
    gradient.finish([True, True])
    assert [call.dtype for call in log[before:]] == [on_the_wire]
    own = [grad for grad in shards(gradient) if grad is not None]
    assert_close(own, [torch.ones_like(grad) for grad in own])
    assert {grad.dtype for grad in own} == {torch.float32}


@pytest.mark.ranks(2)
def test_gradients_that_are_dropped_are_in_no_average(gradient_of):
    gradient = gradient_of()
    bring(gradient, 7.0, 0, 1)
    gradient.discard()
    assert (gradient.held(), gradient.arrived, gradient.launched) == ([], set(), False)
    bring(gradient, 1.0, 1)
    gradient.launch(async_op=False)
    bring(gradient, 7.0, 0)
    gradient.discard()
    bring(gradient, 2.0, 0)
    gradient.launch(async_op=False)
    gradient.finish([True, False])
    weight, bias = shards(gradient)
    assert bias is None
    assert weight is None or torch.equal(weight, torch.full_like(weight, 2.0))
