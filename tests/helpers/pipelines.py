"""Models in stages, training them in one process with plain torch and in pipelines, and schedules to go through.

torch's random numbers belong to the process and mock ranks are its threads, so whatever draws them holds a lock.
"""

import contextlib
import copy
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.pipeline import Action, ActionKind, PipelineSchedule, Schedule, make_schedule, microbatch_seed
from axonmpi.pipeline.schedule.actions import ComputeLists
from axonmpi.pipeline.schedule.transfers import with_transfers
from helpers.compare import assert_close

SAMPLES, WIDTH, LARGEST_NORM = 11, 8, 0.3
TOLERANCE = 1e-8
"""Models and data have the dtype float64, in which differences of rounding stay below this one."""
_drawing = threading.RLock()

Batch = Sequence[Tensor]
"""Inputs and targets."""


def block(width: int = WIDTH, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout))


@functools.lru_cache(maxsize=64)
def _built(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(count)
        return [make().double() for _ in range(count)]


def built(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    """Build modules of dtype float64 with the same initial values everywhere."""
    with _drawing:
        return copy.deepcopy(_built(make, count))


def batches(steps: int, samples: int = SAMPLES) -> list[Batch]:
    """Make batches, the same everywhere."""
    drawn = torch.Generator().manual_seed(5)
    return list(torch.randn(steps, 2, samples, WIDTH, generator=drawn, dtype=torch.float64).unbind())


class Step(NamedTuple):
    """What one process finds in a step; gradients by the numbers of stages and names in them, also of ties."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    norm: Tensor
    output: Tensor
    held_out_loss: Tensor


def trained(
    stages: Sequence[nn.Module],
    steps: Iterable[Sequence[Batch]],
    *,
    loss_fn,
    parts: int = 1,
    seed: int | None = None,
) -> tuple[nn.Sequential, list[Step]]:
    """Train in this process; each step adds up the gradients of its batches and clips them.

    A batch is cut only if there is a seed, to draw each micro-batch's random numbers from a stream of its own.
    """
    model, found, number = nn.Sequential(*stages), [], itertools.count()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in steps:
        optimizer.zero_grad()
        losses = [_gradients(model, batch, loss_fn, parts, seed, next(number)) for batch in step]
        gradients = copy.deepcopy(gradients_of(model))
        with torch.no_grad():
            output = model.eval()(step[0][0])
            held_out_loss = loss_fn(output, step[0][1])
        model.train()
        norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM).float()
        optimizer.step()
        found.append(Step(losses, gradients, norm, output, held_out_loss))
    return model, found


def _gradients(model: nn.Module, batch: Batch, loss_fn, parts: int, seed: int | None, number: int) -> Tensor:
    losses, count = [], 1 if seed is None else min(parts, len(batch[0]))
    with _drawing, torch.random.fork_rng(devices=[]):
        for part, (some, wanted) in enumerate(zip(*(tensor.tensor_split(count) for tensor in batch), strict=True)):
            if seed is not None:
                torch.manual_seed(microbatch_seed(seed, number, part))
            losses.append(loss_fn(model(some), wanted) * (len(some) / len(batch[0])))
            losses[-1].backward()
    return sum(losses).detach()


def assert_trains_like(
    pipeline: ax.Pipeline, model: nn.Sequential, found: Sequence[Step], steps, what="", tolerance: float = TOLERANCE
) -> None:
    """Train in a pipeline, with an evaluation in between; compare with what one process has found."""
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.3)
    for step, expected in zip(steps, found, strict=True):
        optimizer.zero_grad()
        for number, (batch, wanted) in enumerate(zip(step, expected.losses, strict=True), 1):
            with contextlib.nullcontext() if number == len(step) else pipeline.no_sync():
                loss = pipeline.train_step(*batch)
            assert_close(loss, wanted if pipeline.has_last_stage else None, tolerance, f"{what} loss")
        pipeline.eval()
        evaluated = [pipeline(step[0][0]), pipeline.eval_step(*step[0])]
        pipeline.train()
        wanted = [expected.output, expected.held_out_loss] if pipeline.has_last_stage else [None, None]
        assert_close(evaluated, wanted, tolerance, f"{what} evaluation")
        assert_gradients(pipeline, expected.gradients, what, tolerance)
        assert_close(pipeline.clip_grad_norm(LARGEST_NORM), expected.norm, max(tolerance, 1e-6), f"{what} norm")
        optimizer.step()
    for number, module in pipeline.stages.items():
        assert_close(module.state_dict(), model[int(number)].state_dict(), tolerance, f"{what} stage {number}")
    ax.barrier()  # what is drawn next may be drawn for another pipeline


def assert_gradients(
    pipeline: ax.Pipeline, expected: dict[str, Tensor | None], what: object = "", tolerance: float = TOLERANCE
) -> None:
    """Compare the gradients of this rank's stages with those of one process, which has the model in a row."""
    own = {name: parameter.grad for name, parameter in pipeline.stages.named_parameters()}
    assert_close(own, {name: expected[name] for name in own}, tolerance, f"{what} gradient")


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients by all names of their parameters."""
    return {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def assert_step_like_one_process(
    pipeline: ax.Pipeline, stages: Sequence[nn.Module], batch: Batch, loss_fn=F.mse_loss
):
    """Make a step from gradients of zero; compare loss and gradients with those of the stages in one process."""
    model = nn.Sequential(*stages)
    expected = loss_fn(model(batch[0]), batch[1])
    expected.backward()
    pipeline.zero_grad()
    loss = pipeline.train_step(*batch)
    assert_close(loss, expected if pipeline.has_last_stage else None, TOLERANCE, "loss")
    assert_gradients(pipeline, gradients_of(model))


# ---- schedules --------------------------------------------------------------------------------------------------

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = PipelineSchedule
CHUNKS = {GPIPE: (1, 2, 3), ONE_F_ONE_B: (1,), INTERLEAVED: (2, 3), ZERO_BUBBLE: (1, 2)}


def every_schedule(ranks: Iterable[int], micro_batches: Iterable[int]) -> Iterator[tuple[Schedule, int]]:
    """Each kind of schedule for all of these numbers, and its stages on each rank."""
    layouts = [(kind, number) for kind, chunks in CHUNKS.items() for number in chunks]
    for (kind, number), size, count in itertools.product(layouts, ranks, micro_batches):
        yield make_schedule(kind, size, count, number), number


def schedule_of(lists: ComputeLists, placement: tuple[int, ...], num_microbatches: int, edges=()) -> Schedule:
    """A schedule of lists without transfers."""
    return with_transfers(Schedule("made by hand", placement, num_microbatches, lists, edges))


def computed(schedule: Schedule, rank: int) -> list[Action]:
    """What a rank computes, in order."""
    return [action for action in schedule.actions[rank] if action.kind.is_compute]


def last_of_backward(schedule: Schedule) -> ActionKind:
    """The action that ends a backward."""
    return ActionKind.BACKWARD_WEIGHT if schedule.splits_backward else ActionKind.BACKWARD
