"""What `pipeline.rs` checks: stages, schedules, micro-batches and their memory."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import axonmpi as ax
from axonmpi import PipelineMemoryStats, PipelineSchedule


class Counting(nn.Module):
    """Returns its input, and keeps the sizes of the batches it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(x))
        return x


def test_the_default_schedule() -> None:
    for make in (ax.Pipeline, ax.Pipeline.from_modules):
        assert inspect.signature(make).parameters["schedule"].default is PipelineSchedule.ONE_F_ONE_B


def test_a_stage() -> None:
    module = nn.Linear(10, 5)
    stage = ax.PipelineStage(module, 0, 0)
    assert (stage.stage_id, stage.device_rank, stage.module) == (0, 0, module)


def test_three_modules_on_one_rank() -> None:
    pipeline = ax.Pipeline.from_modules(
        [nn.Identity(), nn.Identity(), nn.Identity()],
        ax.ProcessGroup.mock(),
        schedule=PipelineSchedule.GPIPE,
        num_microbatches=2,
    )
    assert (pipeline.num_stages, pipeline.schedule) == (3, PipelineSchedule.GPIPE)
    x = torch.randn(4, 8)
    assert torch.equal(pipeline(x), x)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_forward(group, schedule) -> None:
    chunks = 1 if schedule in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B) else 2
    modules = [nn.Linear(4, 4) for _ in range(chunks * group.size)]
    pipeline = ax.Pipeline.from_modules(modules, group, schedule=schedule, num_microbatches=2)
    for module in modules:
        nn.init.constant_(module.weight, 0.5)
        nn.init.constant_(module.bias, 1.0)
    x = torch.arange(8.0).view(2, 4)
    output = pipeline(x)
    if pipeline.has_last_stage:
        expected = x
        for _ in modules:
            expected = 0.5 * expected.sum(dim=1, keepdim=True).expand(2, 4) + 1.0
        assert torch.equal(output, expected)
    else:
        assert output is None


@pytest.mark.ranks(1, 2)
def test_a_pipeline_of_stages(group) -> None:
    stages = [ax.PipelineStage(nn.Flatten(), stage, stage) for stage in range(group.size)]
    pipeline = ax.Pipeline(stages, group, schedule=PipelineSchedule.GPIPE, num_microbatches=4)
    output = pipeline.forward(torch.arange(16.0).view(4, 2, 2))
    assert output.tolist() == torch.arange(16.0).view(4, 4).tolist() if pipeline.has_last_stage else output is None
    assert not pipeline.eval().training


@pytest.mark.ranks(1, 2)
def test_batches_are_cut_and_joined(group) -> None:
    modules = [Counting() for _ in range(group.size)]
    pipeline = ax.Pipeline.from_modules(modules, group, num_microbatches=2)
    x = torch.arange(16.0).view(4, 4)
    output = pipeline(x)
    assert modules[group.rank].batches == [2, 2]
    assert torch.equal(output, x) if pipeline.has_last_stage else output is None


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (4, 2), (1, 3)])
def test_peaks_of_memory(stages, microbatches) -> None:
    """Both of one rank; the original multiplies GPipe's by the number of ranks."""
    assert PipelineMemoryStats.gpipe_peak_activations(stages, microbatches) == microbatches
    assert PipelineMemoryStats.one_f_one_b_peak_activations(stages, microbatches) == min(stages, microbatches)
