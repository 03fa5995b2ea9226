"""The steps of the pipeline benchmark: axonmpi's, torch's, and the computation alone.

All of them compute with the same modules: each rank has the full model, and each variant cuts it into the stages of
its schedule.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import mse_loss

from ...comm import all_gather_object
from ...groups.world import World
from ...pipeline import Action, ActionKind, Costs, Pipeline, PipelineSchedule, Schedule
from ...pipeline.runtime.split_backward import input_gradients
from ...train.config import ModelConfig
from ...train.model import GPT

HEAD_WIDTH = 32

Step = Callable[[], None]


class Task:
    """The model and the batch, the same on all ranks, each of which uses its stages.

    Args:
        world: The ranks.
        options: Of the benchmark: the sizes of the model and of the batch.

    Attributes:
        layers: All blocks of the model.
        input: [B, T, D] the batch.
        target: [B, T, D] the wanted output.
    """

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world = world
        self.samples = options.samples
        self.microbatches = options.microbatches
        config = ModelConfig(
            layers=options.layers * world.size,
            width=options.width,
            heads=options.width // HEAD_WIDTH,
            sequence_length=options.length,
            positions="learned",
        )
        self.layers = GPT(config).blocks
        shape = self.samples * self.microbatches, options.length, options.width
        self.input, self.target = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))

    def stages(self, count: int) -> list[nn.Module]:
        """Cut the model into stages, which share its parameters."""
        share = len(self.layers) // count
        return [_Blocks(self.layers[share * stage : share * (stage + 1)]) for stage in range(count)]

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for parameter in self.layers.parameters():
            parameter.grad = None

    def gradients(self) -> dict[int, Tensor]:
        """Return the gradients that the last step has left on this rank, by the index of the parameter."""
        grads = (parameter.grad for parameter in self.layers.parameters())
        return {index: grad for index, grad in enumerate(grads) if grad is not None}

    def step_of_one_process(self) -> None:
        """Compute the gradients of all parameters."""
        self.clear_gradients()
        (model,) = self.stages(1)
        count = self.microbatches
        for x, y in zip(self.input.chunk(count), self.target.chunk(count), strict=True):
            (mse_loss(model(x), y) / count).backward()


class _Blocks(nn.Module):
    """A row of transformer blocks."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream [B, T, D] after the blocks."""
        for layer in self.layers:
            x = layer(x, None)
        return x


def our_step(task: Task, kind: PipelineSchedule, chunks: int) -> Step:
    """Return a step of `axonmpi.Pipeline`; collective, as is the step."""
    pipeline = Pipeline.from_modules(
        task.stages(task.world.size * chunks),
        schedule=kind,
        num_microbatches=task.microbatches,
        loss_fn=mse_loss,
    )

    def step() -> None:
        task.clear_gradients()
        pipeline.train_step(task.input, task.target)

    return step


def torch_step(task: Task, schedule: Schedule, torch_class: str, group: dist.ProcessGroup) -> Step:
    """Return a step of `torch.distributed.pipelining`; collective, as is the step.

    Args:
        task: The model and the batch.
        schedule: The stages of each rank.
        torch_class: The name of the class of torch's schedule.
        group: Carries the messages; all ranks, in order.
    """
    from torch.distributed import pipelining  # takes a second, which the other benchmarks need not spend

    modules, device, count = task.stages(schedule.num_stages), torch.device("cpu"), schedule.num_stages
    own = schedule.stages_of(task.world.rank)
    stages = [pipelining.PipelineStage(modules[stage], stage, count, device, group=group) for stage in own]
    torch_schedule = getattr(pipelining, torch_class)
    takes_many = "stages" in inspect.signature(torch_schedule).parameters
    runner = torch_schedule(stages if takes_many else stages[0], task.microbatches, loss_fn=mse_loss)
    inputs = (task.input,) if own[0] == 0 else ()
    settings: dict[str, Any] = {"target": task.target} if own[-1] == count - 1 else {}
    if "return_outputs" in inspect.signature(runner.step).parameters:  # not in older ones
        settings["return_outputs"] = False

    def step() -> None:
        task.clear_gradients()
        runner.step(*inputs, **settings)

    return step


class Computation:
    """The computation of a rank in a step, in the order of a schedule, without messages.

    Stages but the first and the last have a constant input and a constant gradient.

    Args:
        task: The model and the batch.
        schedule: The actions of each rank.
    """

    def __init__(self, task: Task, schedule: Schedule) -> None:
        self._task = task
        self._last = schedule.num_stages - 1
        self._stages = task.stages(schedule.num_stages)
        self._actions = [a for a in schedule.actions[task.world.rank] if a.kind.is_compute]
        self._input = task.input[: task.samples]
        self._target = task.target[: task.samples]
        self._gradient = torch.ones_like(self._input)
        self._kept: dict[tuple[int, int], Any] = {}
        self._seconds: list[dict[tuple[ActionKind, int], list[float]]] = []

    def step(self) -> None:
        """Compute, and note the seconds of each action; local."""
        self._task.clear_gradients()
        perform = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward_input,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
        }
        seconds: dict[tuple[ActionKind, int], list[float]] = {}
        for action in self._actions:
            began = time.perf_counter()
            perform[action.kind](action)
            seconds.setdefault((action.kind, action.stage), []).append(time.perf_counter() - began)
        self._seconds.append(seconds)

    def costs(self) -> Costs:
        """Return the seconds of each kind of action; collective.

        They are the median over all steps but the first of the mean in a step.
        """
        own = {
            key: statistics.median(statistics.fmean(seconds[key]) for seconds in self._seconds[1:])
            for key in self._seconds[0]
        }
        of_all = {key: value for costs in all_gather_object(own) for key, value in costs.items()}
        return Costs.by_stage(of_all)

    def _forward(self, action: Action) -> None:
        leaf = self._input.detach().requires_grad_(action.stage > 0)
        output = self._stages[action.stage](leaf)
        gradient = self._gradient
        if action.stage == self._last:
            output = mse_loss(output, self._target)
            gradient = torch.ones_like(output)
        self._kept[action.stage, action.micro_batch] = leaf, get_gradient_edge(output), gradient

    def _backward(self, action: Action) -> None:
        _, edge, gradient = self._kept.pop((action.stage, action.micro_batch))
        torch.autograd.backward((edge,), (gradient,))

    def _backward_input(self, action: Action) -> None:
        leaf, edge, gradient = self._kept[action.stage, action.micro_batch]
        leaves = [leaf] if leaf.requires_grad else []
        self._kept[action.stage, action.micro_batch] = input_gradients([edge], [gradient], leaves)

    def _backward_weight(self, action: Action) -> None:
        self._kept.pop((action.stage, action.micro_batch)).compute()
