"""How a pipeline behaves: memory that is given back, times of what has run, what a rank records."""

import contextlib
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from helpers.compare import assert_close, assert_same_on_all_ranks, refused
from helpers.operation_log import Log, set_log
from helpers.pipelines import assert_step_like_one_process, batches, block, built, computed
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.backends import Backend
from axonmpi.pipeline import ActionKind, Pipeline, PipelineSchedule, Schedule, make_schedule, pop, simulate, stash
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


@pytest.mark.ranks(3)
def test_activations_are_kept_as_long_as_the_simulator_says(world) -> None:
    inputs = torch.ones(18, 8)
    for schedule, chunks in KINDS:
        seen, storages = [], []  # of all stages of this rank
        stages = [Watched(seen, storages) for _ in range(3 * chunks)]
        pipeline = Pipeline.from_modules(stages, schedule=schedule, num_microbatches=6, loss_fn=F.mse_loss)
        pipeline.train_step(inputs, inputs)  # its messages may be under way for longer
        seen.clear()
        pipeline.train_step(inputs, inputs)
        expected = simulate(make_schedule(schedule, 3, 6, chunks)).peak_activations[world.rank]
        assert (max(seen), alive(storages)) == (2 * expected, 0), (schedule, chunks)


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
    moody, widths = nn.Identity(), iter([3, 3, 3, 3, 1, 1])
    moody.register_forward_hook(lambda module, given, output: output[:, : next(widths)])
    forward = partial(Pipeline.from_modules([moody, nn.Identity()], num_microbatches=2), torch.ones(4, 3))
    for _ in range(2):
        forward()
    refused(ValueError, (forward, r"output of stage 0 was float32\[2, 3\].*is float32\[2, 1\] now"))


@pytest.mark.ranks(2)
def test_a_schedule_of_ones_own_may_divide_some_backwards_only(world) -> None:
    """Over more steps than mailboxes have cells."""

    def mixed(count: int) -> Schedule:
        schedule, lists = make_schedule(PipelineSchedule.ONE_F_ONE_B, 2, count), [[], []]
        for rank, made in enumerate(lists):
            for action in computed(schedule, rank):
                divided = action.kind is ActionKind.BACKWARD and (action.stage + action.micro_batch) % 2 == 0
                made += [replace(action, kind=kind) for kind in (HALVES if divided else [action.kind])]
        return with_transfers(Schedule("mixed", (0, 1), count, lists))

    pipeline = Pipeline.from_modules(built(block, 2), schedule=mixed, num_microbatches=5, loss_fn=F.mse_loss)
    for batch in batches(5):
        assert_step_like_one_process(pipeline, built(block, 2), batch)


@pytest.mark.ranks(2)
def test_a_trace_that_rank_0_cannot_write_is_an_error_on_all_ranks(world, tmp_path) -> None:
    pipeline = Pipeline.from_modules(built(block, 2))
    pipeline.record_times()
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        pipeline.write_trace(tmp_path / "missing" / "trace.json")


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_trace_shows_what_has_run(world, schedule, shared_tmp_path) -> None:
    stages = built(block, world.size)
    pipeline = Pipeline.from_modules(stages, schedule=schedule, num_microbatches=5, loss_fn=F.mse_loss)
    pipeline.record_times()
    for batch in batches(2):
        pipeline.train_step(*batch)
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
    chart = pipeline.schedule_chart().splitlines()
    assert len(chart) == world.size
    assert_same_on_all_ranks(world, chart)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ranks_per_node", ["", "1"], ids=["one_node", "apart"])
def test_sending_and_waiting_are_recorded(world, ranks_per_node, monkeypatch) -> None:
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    open_now = []

    class WithWaits(Log):
        @contextlib.contextmanager
        def noted(self, description: bytes, number: int = 0) -> Iterator[None]:
            open_now.append(at := self.enter(description))
            yield
            assert open_now.pop() == at

    group = world.new_group(range(2))
    pipeline = Pipeline.from_modules(built(block, 2), group, num_microbatches=2, loss_fn=F.mse_loss)
    inputs = torch.ones(4, 8, dtype=torch.float64)
    pipeline.train_step(inputs, inputs)
    log = WithWaits()
    set_log(group.private(), log)
    pipeline.train_step(inputs, inputs)
    calls = Counter(operation for operation, _ in log.calls)
    sent, received = ("stage send", "stage recv") if len(group.backend.node_ranks) > 1 else ("isend", "irecv")
    others = {operation for operation in calls if not operation.startswith("wait")}
    # they gather what they are about to do; nothing is learnt once more
    assert (others, calls["all_gather"], open_now) == ({"all_gather", sent, received}, 1, [])
    assert sum(nbytes for operation, nbytes in log.calls if operation == sent) == inputs.nbytes  # there or back


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
    sent, posted = defaultdict(list), defaultdict(list)

    def noted(call, tags: Tags, tensor: Tensor, peer: int, tag: int = 0) -> ax.Work:
        tags[peer].append(tag)
        return call(tensor, peer, tag)

    for name, tags in {"isend": sent, "irecv": posted}.items():
        monkeypatch.setattr(backend, name, partial(noted, getattr(backend, name), tags))
    return sent, posted


@pytest.mark.ranks(2, 3)
def test_receives_are_posted_in_the_order_of_sends(world, monkeypatch) -> None:
    """Messages between two GPUs have no tags. In the first step, which learns the forms, and in later ones."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "1")
    for schedule, chunks in KINDS:
        group, count = world.new_group(range(world.size)), world.size * chunks
        stages = [Skips(stage, count).double() for stage in range(count)]
        settings = {"schedule": schedule, "skips": {str(n): (n, n + 2) for n in range(count - 2)}}
        pipeline = Pipeline.from_modules(stages, group, num_microbatches=5, loss_fn=F.mse_loss, **settings)
        sent, posted = spied(group.private(), monkeypatch)
        for batch in batches(2):
            pipeline.train_step(*batch)
            of_all = ax.all_gather_object((sent, posted))
            for source, (sends, _) in enumerate(of_all):
                for target, tags in sends.items():
                    assert len(set(tags)) > 1
                    assert of_all[target][1][source] == tags, (schedule, chunks, source, target)
            assert any(sent.values())
            for noted in (sent, posted):
                noted.clear()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ranks_per_node", ["", "1"], ids=["one_node", "apart"])
def test_an_input_that_a_stage_hands_on_may_be_overwritten_after_the_step(
    world, ranks_per_node, monkeypatch
) -> None:
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    group, buffer = world.new_group(range(2)), torch.empty(11, 8)
    pipeline = Pipeline.from_modules([nn.Identity(), nn.Linear(8, 8)], group, num_microbatches=3)
    for inputs, _ in batches(4):
        output = pipeline(buffer.copy_(inputs))
        assert_close(output, pipeline.stages["1"](inputs.float()) if pipeline.has_last_stage else None)
