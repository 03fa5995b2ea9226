"""The benchmark of pipelines: figures hang together, sizes are checked, wrong gradients are noticed."""

from argparse import Namespace
from functools import partial

import pytest
import torch
from helpers.compare import refused

from axonmpi.cli.bench.pipeline import CASES, check_gradients, measure, table
from axonmpi.cli.bench.pipeline_steps import Computation, Task, our_step
from axonmpi.pipeline import PipelineSchedule, make_schedule, simulate

SIZES = {"layers": 2, "width": 32, "length": 4, "samples": 1, "microbatches": 4}
TINY = Namespace(**SIZES)


@pytest.mark.ranks(2)
def test_sizes_that_do_not_fit_are_named(world):
    complaints = {
        ("layers", 3): "layers: expected a multiple of 2, got 3",
        ("width", 48): "width: expected a multiple of 32, got 48",
        ("microbatches", 3): "microbatches: expected a multiple of ranks = 2, got 3",
    }
    for (name, value), complaint in complaints.items():
        refused(ValueError, (partial(measure, world, Namespace(**{**SIZES, name: value})), complaint))


# ---- figures ----------------------------------------------------------------------------------------------------


def figures(axonmpi: float, torch: float) -> dict:
    """Figures of one schedule, made up."""
    return {
        "compute": 80.0,
        "ideal": 100.0,
        "axonmpi": axonmpi,
        "torch on gloo": torch,
        "torch on axonmpi": 130.0,
        "bubble": 0.2,
        "peak_activations": [2, 1],
        "costs": {},
    }


def made_up(**schedules: dict) -> dict:
    sizes = {"layers": 2, "width": 64, "length": 16, "samples": 3, "microbatches": 8}
    return {"ranks": 2, "cores": 4, "threads": 2, "parameters": 1_500_000, **sizes, "schedules": schedules}


def test_table_shows_times_and_ratios():
    text = table([made_up(gpipe=figures(125.0, 150.0), **{"1f1b": figures(105.0, 120.0)})])
    without_1f1b = table([made_up(gpipe=figures(125.0, 150.0))]).splitlines()[-1]
    assert without_1f1b.replace("|", " ").split()[7:10] == ["1.25", "1.20", "nan"]
    head, _, machine, _, *rows = text.splitlines()
    assert head == "2 transformer blocks a rank, 8 micro-batches of [3, 16, 64]; ms a step, medians"
    assert machine == "2 ranks, 4 cores, threads of a rank: 2, 1.5 M parameters"
    assert [" ".join(row.replace("|", " ").split()) for row in rows] == [
        "gpipe 80.0 20.0% 100.0 125.0 150.0 130.0 1.25 1.20 0.96 2 1",
        "1f1b 80.0 20.0% 100.0 105.0 120.0 130.0 1.05 1.14 1.14 2 1",
    ]


# ---- measuring --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_wrong_gradients_of_one_rank_are_raised_on_all(world):
    task = Task(world, TINY)
    step = our_step(task, PipelineSchedule.ONE_F_ONE_B, 1)

    def spoil(change) -> None:
        step()
        if world.rank == 1:
            change([parameter for parameter in task.layers.parameters() if parameter.grad is not None][-1])

    def forget(parameter) -> None:
        parameter.grad = None

    for change in (lambda p: p.grad.add_(1e-3), lambda p: p.grad.fill_(torch.nan), forget):
        with pytest.raises(RuntimeError, match=r"spoiled on 2 ranks: gradients are not those of one process"):
            check_gradients(task, {"right": step, "spoiled": lambda change=change: spoil(change)})


@pytest.mark.ranks(2)
def test_costs_of_each_action_are_known_on_all_ranks(world):
    task = Task(world, TINY)
    for case in CASES.values():
        schedule = make_schedule(case.kind, world.size, TINY.microbatches, case.chunks)
        computation = Computation(task, schedule)
        for _ in range(2):
            computation.step()
        costs = computation.costs()
        assert all(len(times) == schedule.num_stages for times in (costs.forward, costs.backward_weight))
        kinds = (costs.forward, costs.backward_input, costs.backward_weight, costs.backward)
        splits = schedule.splits_backward
        assert [min(times) > 0 for times in kinds] == [True, splits, splits, not splits]
        assert len(task.gradients()) == len(list(task.layers.parameters())) // 2
        assert simulate(schedule, costs).makespan > TINY.microbatches * sum(costs.forward[:1])
