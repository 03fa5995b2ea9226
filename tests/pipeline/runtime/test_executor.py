"""How a pipeline behaves: memory that is given back, times of what has run, what an observer hears."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from itertools import pairwise

import pytest
import torch
from helpers.pipelines import assert_step_like_one_process, batches, block, built
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi import Pipeline, PipelineSchedule
from axonmpi.backends import Backend
from axonmpi.pipeline import Action, ActionKind, Schedule, make_schedule, pop, simulate, stash
from axonmpi.pipeline.runtime.mailboxes import cells_needed
from axonmpi.pipeline.schedule.trace import last_step, read_trace
from axonmpi.pipeline.schedule.transfers import with_transfers

Tags = dict[int, list[int]]
"""The tags of messages, by the rank at the other end, in order."""
HALVES = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
KINDS = [(kind, chunks) for kind in PipelineSchedule for chunks in (1, 2)]


class Watched(nn.Linear):
    """A layer that knows how many of its activations and of their gradients are somewhere in memory.

    Of a micro-batch there are two until the first half of backward, `given` and what is returned, and two from
    there to the second one: `given` and the gradient of the layer's output. The most are there when a forward ends,
    or the gradient of an output has been made.
    """

    def __init__(self, seen: list[int], storages: list[weakref.ref]) -> None:
        super().__init__(8, 8)
        self.seen, self.storages = seen, storages

    def forward(self, x: Tensor) -> Tensor:
        given = x.exp()
        output = super().forward(given)
        output.register_hook(self.watch)
        output = output.tanh()
        self.watch(given)
        self.watch(output)
        return output

    def watch(self, tensor: Tensor) -> None:
        self.storages.append(weakref.ref(tensor.untyped_storage()))
        self.seen.append(alive(self.storages))


def alive(storages: list[weakref.ref]) -> int:
    return sum(storage() is not None for storage in storages)


@pytest.mark.ranks(4)
def test_activations_are_kept_as_long_as_the_simulator_says(world) -> None:
    inputs = torch.ones(32, 8)
    for schedule, chunks in KINDS:
        seen, storages = [], []  # of all stages of this rank
        stages = [Watched(seen, storages) for _ in range(4 * chunks)]
        pipeline = Pipeline.from_modules(stages, schedule=schedule, num_microbatches=8, loss_fn=F.mse_loss)
        pipeline.train_step(inputs, inputs)  # its messages may be under way for longer
        seen.clear()
        pipeline.train_step(inputs, inputs)
        expected = simulate(make_schedule(schedule, 4, 8, chunks)).peak_activations[world.rank]
        assert max(seen) == 2 * expected, (schedule, chunks)
        assert alive(storages) == 0, (schedule, chunks)


def test_memory_in_common_does_not_grow_with_micro_batches() -> None:
    """But where a schedule says so: each line has as many cells as micro-batches are on their way, and few more."""
    for schedule, chunks in KINDS[2:]:
        few, many = (make_schedule(schedule, 4, count, chunks) for count in (16, 48))
        for rank in range(4):
            cells = cells_needed(few.actions[rank], trains=True)
            assert cells == cells_needed(many.actions[rank], trains=True)
            assert max(cells.values()) <= 4 * chunks + 2


@pytest.mark.ranks(1)
def test_an_output_of_another_form_than_before_is_refused(world) -> None:
    class Moody(nn.Identity):
        calls = 0

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
    """Over more steps than mailboxes have cells."""

    def mixed(count: int) -> Schedule:
        def halves(action: Action) -> tuple[ActionKind, ...]:
            divided = action.kind is ActionKind.BACKWARD and (action.stage + action.micro_batch) % 2 == 0
            return HALVES if divided else (action.kind,)

        lists = [
            [Action(kind, a.stage, a.micro_batch) for a in actions if a.kind.is_compute for kind in halves(a)]
            for actions in make_schedule(PipelineSchedule.ONE_F_ONE_B, 2, count).actions
        ]
        return with_transfers(Schedule("mixed", (0, 1), count, lists))

    pipeline = Pipeline.from_modules(built(block, 2), schedule=mixed, num_microbatches=5, loss_fn=F.mse_loss)
    for batch in batches(5):
        assert_step_like_one_process(pipeline, built(block, 2), batch)


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_trace_shows_what_has_run(world, schedule, shared_tmp_path) -> None:
    pipeline = Pipeline.from_modules(
        built(block, world.size), schedule=schedule, num_microbatches=5, loss_fn=F.mse_loss
    )
    pipeline.record_times()
    for inputs, targets in batches(2):
        pipeline.train_step(inputs, targets)
    began = time.monotonic()
    pipeline.write_trace(shared_tmp_path / "trace.json")
    timeline = read_trace(shared_tmp_path / "trace.json")
    planned = make_schedule(PipelineSchedule(schedule), world.size, 5)
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
    heard, open_now = [], []

    class Listener:
        def enter(self, operation: str, nbytes: int) -> None:
            open_now.append(operation)
            heard.append((operation, nbytes))

        def leave(self, operation: str) -> None:
            assert open_now.pop() == operation

    group = world.new_group(range(2))
    pipeline = Pipeline.from_modules(built(block, 2), group, num_microbatches=2, loss_fn=F.mse_loss)
    inputs = torch.ones(4, 8)
    pipeline.train_step(inputs, inputs)
    group.private().observer = Listener()
    pipeline.train_step(inputs, inputs)
    calls = Counter(operation for operation, _ in heard)
    sent, messages = ("send", {"send"}) if len(group.backend.node_ranks) > 1 else ("isend", {"isend", "irecv"})
    assert set(calls) == {"all_gather", "wait"} | messages
    assert calls["all_gather"] == 1  # what they are about to do; nothing is learnt once more
    assert sum(nbytes for operation, nbytes in heard if operation == sent) == inputs.nbytes  # there or back
    assert not open_now


class Skips(nn.Module):
    """A stage that stashes a tensor for the stage after next, and pops that of the stage before last."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.leaves, self.takes = str(stage) if stage + 2 < stages else "", str(stage - 2) if stage > 1 else ""

    def forward(self, x: Tensor) -> Tensor:
        if self.leaves:
            stash(self.leaves, x.sin())
        return self.linear(x) + (pop(self.takes) if self.takes else 0)


def spied(backend: Backend, monkeypatch) -> tuple[Tags, Tags]:
    """Note the tags of what a backend sends and of the receives that it posts from now on."""
    sent, posted = {}, {}
    isend, irecv = backend.isend, backend.irecv

    def send(tensor: Tensor, dst: int, tag: int = 0) -> ax.Work:
        sent.setdefault(dst, []).append(tag)
        return isend(tensor, dst, tag)

    def receive(tensor: Tensor, src: int, tag: int = 0) -> ax.Work:
        posted.setdefault(src, []).append(tag)
        return irecv(tensor, src, tag)

    monkeypatch.setattr(backend, "isend", send)
    monkeypatch.setattr(backend, "irecv", receive)
    return sent, posted


@pytest.mark.ranks(2, 4)
def test_receives_are_posted_in_the_order_of_sends(world, monkeypatch) -> None:
    """Messages between two GPUs have no tags. In the first step, which learns the forms, and in later ones."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "1")
    for schedule, chunks in KINDS:
        group = world.new_group(range(world.size))
        count = world.size * chunks
        stages = [Skips(stage, count) for stage in range(count)]
        skips = {str(stage): (stage, stage + 2) for stage in range(count - 2)}
        pipeline = Pipeline.from_modules(
            stages, group, schedule=schedule, num_microbatches=5, loss_fn=F.mse_loss, skips=skips
        )
        sent, posted = spied(group.private(), monkeypatch)
        for inputs, targets in batches(2):
            pipeline.train_step(inputs, targets)
            of_all = ax.all_gather_object((sent, posted))
            for source, (sends, _) in enumerate(of_all):
                for target, tags in sends.items():
                    assert len(set(tags)) > 1
                    assert of_all[target][1][source] == tags, (schedule, chunks, source, target)
            assert sum(map(len, sent.values()))
            sent.clear()
            posted.clear()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ranks_per_node", ["", "1"], ids=["one_node", "apart"])
def test_an_input_that_a_stage_hands_on_may_be_overwritten_after_the_step(
    world, ranks_per_node, monkeypatch
) -> None:
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    group = world.new_group(range(2))
    pipeline = Pipeline.from_modules([nn.Identity(), nn.Linear(8, 8)], group, num_microbatches=3)
    buffer = torch.empty(11, 8)
    for inputs, _ in batches(4):
        output = pipeline(buffer.copy_(inputs))
        if output is not None:
            torch.testing.assert_close(output, pipeline.stages["1"](inputs))
