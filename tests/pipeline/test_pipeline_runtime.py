"""How the executor behaves: any timing of the ranks, memory that is given back, times of what has run."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import defaultdict
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from reference import batches, block, built
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi import Pipeline, PipelineSchedule
from axonmpi.pipeline import Action, ActionKind, Schedule, make_schedule, simulate
from axonmpi.pipeline.actions import chain
from axonmpi.pipeline.executor import Executor
from axonmpi.pipeline.schedules import one_f_one_b
from axonmpi.pipeline.trace import last_step, read_trace
from axonmpi.pipeline.transfers import with_transfers

HALVES = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
SCHEDULES = pytest.mark.parametrize("schedule", PipelineSchedule, ids=lambda schedule: schedule.value)


@pytest.mark.ranks(4)
@SCHEDULES
@pytest.mark.parametrize("ranks_per_node", ["", "1"], ids=["one_node", "apart"])
def test_ranks_may_be_late_at_any_time(world, schedule, ranks_per_node, monkeypatch) -> None:
    """Each rank is delayed at random before its actions, or one of them always is: no deadlock, the same result."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    chosen = random.Random(world.rank)
    slow = [None]
    perform = Executor._perform

    def late(self, action):
        if slow[0] is None:
            time.sleep(chosen.choice((0, 0, 0.002)))
        elif slow[0] == self._routes.rank:
            time.sleep(0.002)
        perform(self, action)

    monkeypatch.setattr(Executor, "_perform", late)
    ((inputs, targets),) = batches(1)
    chunks = 2
    model = nn.Sequential(*built(block, chunks * world.size))
    F.mse_loss(model(inputs), targets).backward()
    group = world.new_group(range(world.size))
    pipeline = Pipeline.from_modules(
        built(block, chunks * world.size), group, schedule=schedule, num_microbatches=6, loss_fn=F.mse_loss
    )
    for slow[0] in (None, None, 0, world.size - 1):
        pipeline.zero_grad()
        pipeline.train_step(inputs, targets)
        for number, module in pipeline.stages.items():
            for own, other in zip(module.parameters(), model[int(number)].parameters(), strict=True):
                torch.testing.assert_close(own.grad, other.grad)


class Saved:
    """Counts the bytes that autograd keeps for backward, by thread: mock ranks are threads."""

    bytes_now: ClassVar[dict[int, int]] = defaultdict(int)
    bytes_most: ClassVar[dict[int, int]] = defaultdict(int)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # the graph of an output holds what is kept of it
        self.thread = threading.get_ident()
        self.nbytes = tensor.nbytes
        Saved.bytes_now[self.thread] += self.nbytes
        Saved.bytes_most[self.thread] = max(Saved.bytes_most[self.thread], Saved.bytes_now[self.thread])

    def __del__(self) -> None:
        Saved.bytes_now[self.thread] -= self.nbytes


class Squared(nn.Module):
    """Keeps one tensor for backward: what it has been given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sigmoid()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", [PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B])
def test_autograd_keeps_as_many_bytes_as_the_simulator_says(world, schedule) -> None:
    """At most, in units of what it keeps of a micro-batch; they do not grow with micro-batches."""
    width, samples = 512, 4
    stages = [Squared() for _ in range(4)]
    peaks = []
    for count in (16, 32) if schedule is not PipelineSchedule.GPIPE else (16,):
        inputs = torch.ones(count * samples, width)
        pipeline = Pipeline.from_modules(stages, schedule=schedule, num_microbatches=count, loss_fn=F.mse_loss)
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            one = stages[0](inputs[:samples].clone().requires_grad_())
            own, Saved.bytes_most[threading.get_ident()] = Saved.bytes_now[threading.get_ident()], 0
            del one
            loss_bytes = 2 * samples * width * 4 if pipeline.has_last_stage else 0
            pipeline.train_step(inputs, torch.zeros_like(inputs))
        most = Saved.bytes_most[threading.get_ident()]
        assert Saved.bytes_now[threading.get_ident()] == 0
        expected = simulate(make_schedule(schedule, 4, count)).peak_activations[world.rank]
        assert most == pytest.approx(expected * (own + loss_bytes), rel=0.1)
        peaks.append(most)
    assert len(set(peaks)) == 1


class Watched(nn.Module):
    """A layer that knows how many of its activations and of their gradients are somewhere in memory.

    Of a micro-batch there are two until the first half of backward, `given` and what is returned, and two from
    there to the second one: `given` and the gradient of the layer's output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.storages: list[weakref.ref] = []

    def forward(self, x: Tensor) -> Tensor:
        given = x.exp()
        output = self.linear(given)
        output.register_hook(self.watch)
        output = output.tanh()
        self.watch(given)
        self.watch(output)
        return output

    def watch(self, tensor: Tensor) -> None:
        self.storages.append(weakref.ref(tensor.untyped_storage()))

    @property
    def alive(self) -> int:
        return sum(storage() is not None for storage in self.storages)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("chunks", [1, 2])
@SCHEDULES
def test_activations_are_kept_as_long_as_the_simulator_says(world, schedule, chunks) -> None:
    """Looked at after each action; they do not grow with micro-batches."""

    class Looking(list):
        def append(self, _: object) -> None:
            super().append(sum(module.alive for module in pipeline.stages.values()))

    inputs = torch.ones(32, 8)
    for count in (8, 16):
        stages = [Watched() for _ in range(4 * chunks)]
        pipeline = Pipeline.from_modules(stages, schedule=schedule, num_microbatches=count, loss_fn=F.mse_loss)
        pipeline.train_step(inputs, inputs)  # its messages may be under way for longer
        pipeline._times = alive = Looking()
        pipeline.train_step(inputs, inputs)
        expected = simulate(make_schedule(schedule, 4, count, chunks)).peak_activations[world.rank]
        assert max(alive) == 2 * expected
        assert alive[-1] == 0


@pytest.mark.ranks(2, 4)
def test_memory_in_common_does_not_grow_with_steps_or_micro_batches(world) -> None:
    inputs = torch.ones(64, 1024)
    pipeline = Pipeline.from_modules([Squared() for _ in range(world.size)], num_microbatches=8, loss_fn=F.mse_loss)
    slots = []
    for count in (8, 8, 16, 32, 8):
        pipeline.num_microbatches = count
        for _ in range(2):
            pipeline.train_step(inputs, inputs)
        rings = pipeline._transport._rings
        slots.append({line: ring.slots for line, ring in rings.items()})
        assert all(ring.slot_bytes == 8 * 1024 * 4 for ring in rings.values())
    assert slots[1:] == slots[:-1]
    assert max(slots[0].values()) <= world.size + 2


@pytest.mark.ranks(2)
def test_outputs_stay_as_they_are(world) -> None:
    """Even if a stage returns what it was given, which lies in memory that the next step writes to."""
    pipeline = Pipeline.from_modules([nn.Identity(), nn.Identity()], num_microbatches=3)
    first = torch.arange(12.0).view(6, 2)
    outputs = [pipeline(first + number) for number in range(6)]
    if pipeline.has_last_stage:
        for number, output in enumerate(outputs):
            assert torch.equal(output, first + number)


@pytest.mark.ranks(1)
def test_an_output_of_another_form_than_before_is_refused(world) -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x if self.calls < 5 else x[:, :1]

    pipeline = Pipeline.from_modules([Moody(), nn.Identity()], num_microbatches=2)
    for _ in range(2):
        pipeline(torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"output of stage 0 was float32\[2, 3\].*is float32\[2, 1\] now"):
        pipeline(torch.ones(4, 3))


@pytest.mark.ranks(2)
def test_a_schedule_of_ones_own_may_divide_some_backwards_only(world) -> None:
    """Over more steps than mailboxes have slots."""

    def mixed(count: int) -> Schedule:
        lists = [
            [
                Action(kind, action.stage, action.micro_batch)
                for action in actions
                for kind in (HALVES if divided(action) else (action.kind,))
            ]
            for actions in one_f_one_b(2, count)
        ]
        return Schedule("mixed", (0, 1), count, with_transfers((0, 1), lists, chain(2)))

    def divided(action: Action) -> bool:
        return action.kind is ActionKind.BACKWARD and (action.stage + action.micro_batch) % 2 == 0

    ((inputs, targets),) = batches(1)
    model = nn.Sequential(*built(block, 2))
    F.mse_loss(model(inputs), targets).backward()
    pipeline = Pipeline.from_modules(built(block, 2), schedule=mixed, num_microbatches=5, loss_fn=F.mse_loss)
    for _ in range(5):
        pipeline.zero_grad()
        pipeline.train_step(inputs, targets)
    for number, module in pipeline.stages.items():
        for own, other in zip(module.parameters(), model[int(number)].parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.ranks(2, 4)
@SCHEDULES
def test_a_trace_shows_what_has_run(world, schedule, shared_tmp_path) -> None:
    pipeline = Pipeline.from_modules(
        built(block, world.size), schedule=schedule, num_microbatches=5, loss_fn=F.mse_loss
    )
    pipeline.record_times()
    for inputs, targets in batches(3):
        pipeline.train_step(inputs, targets)
    path = shared_tmp_path / "trace.json"
    began = time.monotonic()
    pipeline.write_trace(path)
    timeline = read_trace(path)
    planned = make_schedule(schedule, world.size, 5)
    step = last_step(timeline, planned)
    assert 0 < step.makespan < timeline.makespan < began
    for own, actions in zip(step.spans, planned.actions, strict=True):
        assert [span.action for span in own] == [action for action in actions if action.kind.is_compute]
        assert all(earlier.end <= later.start for earlier, later in pairwise(own))
    assert 0 <= step.bubble < 1
    chart = pipeline.schedule_chart()
    assert len(chart.splitlines()) == world.size
    assert ax.all_gather_object(chart) == [chart] * world.size


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ranks_per_node", ["", "1"], ids=["one_node", "apart"])
def test_an_observer_hears_of_sending_and_waiting(world, ranks_per_node, monkeypatch) -> None:
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    heard, open_now = defaultdict(int), []

    class Listener:
        def enter(self, operation: str, nbytes: int) -> None:
            open_now.append(operation)
            heard[operation] += nbytes

        def leave(self, operation: str) -> None:
            assert open_now.pop() == operation

    group = world.new_group(range(2))
    pipeline = Pipeline.from_modules([Squared(), Squared()], group, num_microbatches=2, loss_fn=F.mse_loss)
    inputs = torch.ones(4, 8)
    pipeline.train_step(inputs, inputs)
    group.private().observer = Listener()
    pipeline.train_step(inputs, inputs)
    assert {"send", "wait"} <= set(heard)
    assert heard["send"] == inputs.nbytes  # activations forward, or their gradients back
    assert not open_now
