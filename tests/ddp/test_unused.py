"""Parameters without a gradient: named as an error, or found."""

import copy
import re

import pytest
import torch
from helpers.compare import assert_close, assert_same_on_all_ranks, gradients_of, refused
from helpers.models import AUTOMATIC, OVERLAPPED, SYNCHRONOUS, Weights, built, wrapped
from helpers.settings import each_pair
from torch import Tensor, nn

from axonmpi import GradSyncStrategy
from axonmpi.errors import UnusedParameterError


class Branches(nn.Module):
    """Two experts between layers that are always used, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.never = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor, branch: int | None) -> Tensor:
        if branch is None:  # no parameter at all
            return x[:, :2] * 1.0
        return self.last(torch.relu(self.experts[branch](torch.relu(self.first(x)))))


def always_used() -> nn.Module:
    model = Branches()
    model.never.requires_grad_(False)
    return model


def inputs_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()


def reference(module: nn.Module, branches: list[int | None], step: int = 0) -> dict[str, Tensor | None]:
    """Average the gradients of all ranks in one process; what no rank uses has none."""
    model = copy.deepcopy(module)
    for rank, branch in enumerate(branches):
        (model(inputs_of(rank, step), branch).pow(2).mean() / len(branches)).backward()
    return gradients_of(model)


@pytest.mark.ranks(3)
@AUTOMATIC
def test_unused_everywhere_is_an_error_that_names_it(world, strategy):
    model = wrapped(world, built(Branches), sync_strategy=strategy, bucket_cap_mb=1e-4)
    loss = model(inputs_of(world.rank), 0).sum()
    names = ("experts.1.weight", "experts.1.bias", "never.weight", "never.bias")
    start = "^4 parameters got no gradient in this backward: "
    expected = (start, "find_unused_parameters=True", *(rf"{name} \(ranks 0, 1, 2\)" for name in names))
    with pytest.raises(UnusedParameterError) as error:
        loss.backward()
    assert [text for text in expected if not re.search(text, str(error.value))] == []
    assert isinstance(error.value, ValueError)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("strategy", [SYNCHRONOUS, pytest.param(OVERLAPPED, marks=pytest.mark.real_ranks)])
def test_unused_on_one_rank_is_an_error_on_every_rank(world, strategy):
    model = wrapped(world, built(always_used), sync_strategy=strategy, bucket_cap_mb=1e-4)
    model.module.experts[1].requires_grad_(False)
    last = world.size - 1

    def step(branch: int | None, number: int) -> None:
        model.zero_grad()
        model(inputs_of(world.rank, number), branch).pow(2).mean().backward()

    step(0, 0)
    for number in (1, 2):  # it stays usable, also after several of these
        with pytest.raises(UnusedParameterError, match=rf"^6 parameters .*first.weight \(rank {last}\)"):
            step(None if world.rank == last else 0, number)
    model.module.experts[1].requires_grad_(True)
    refused(UnusedParameterError, (lambda: step(int(world.rank == 1), 3), r"experts.0.weight \(rank 1\)"))
    model.module.experts[1].requires_grad_(False)
    step(0, 4)
    assert_close(gradients_of(model.module), reference(model.module, [0] * world.size, 4))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("count", "message"),
    [
        (30, r"^29 parameters got no gradient .*: weights.1 \(ranks 0, 1\), .*weights.10 \(.* and 19 more\. "),
        (2, r"^1 parameter got no gradient .*: weights.1 \(ranks 0, 1\)\. "),
    ],
)
def test_how_many_are_unused(world, count, message):
    model = wrapped(world, Weights(lambda weights, x: x * weights[0], [torch.ones(1) for _ in range(count)]))
    refused(UnusedParameterError, (lambda: model(torch.ones(1)).sum().backward(), message))


@pytest.mark.ranks(3)
@each_pair(strategy=list(GradSyncStrategy), as_view=[True, False], cap=[1e-4, 25])
def test_found_unused_equal_the_average_over_all_ranks(world, strategy, as_view, cap):
    model = wrapped(
        world,
        built(Branches),
        sync_strategy=strategy,
        find_unused_parameters=True,
        gradient_as_bucket_view=as_view,
        bucket_cap_mb=cap,
    )
    plans = [
        [0] * world.size,
        [rank % 2 for rank in range(world.size)],
        [None] * (world.size - 1) + [1],  # only the last rank uses parameters
        [1] + [None] * (world.size - 1),
        [None] * world.size,
    ]
    for step, plan in enumerate(plans):
        model.zero_grad()
        model(inputs_of(world.rank, step), branch=plan[world.rank]).pow(2).mean().backward()
        model.sync_gradients()
        gradients = gradients_of(model.module)
        assert_close(gradients, {**reference(model.module, plan, step), "never.weight": None})
        assert_same_on_all_ranks(world, gradients)


@pytest.mark.ranks(2)
@AUTOMATIC
def test_gradients_of_zero_stay_for_what_is_not_used(world, strategy):
    model = wrapped(world, built(Branches), sync_strategy=strategy, find_unused_parameters=True)
    model(inputs_of(world.rank), 1).sum().backward()
    model.zero_grad(set_to_none=False)
    model(inputs_of(world.rank), 0).sum().backward()
    used, unused = (expert.weight.grad for expert in model.module.experts)
    assert (bool(used.any()), unused.any(), model.module.never.weight.grad) == (True, False, None)


@pytest.mark.ranks(2)
def test_accumulation_over_different_branches(world):
    model = wrapped(world, built(always_used))
    alone = copy.deepcopy(model.module)
    with model.no_sync():
        model(inputs_of(world.rank, 0), world.rank).sum().backward()
    model(inputs_of(world.rank, 1), 1 - world.rank).sum().backward()
    for step, rank, branch in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)):
        (alone(inputs_of(rank, step), branch).sum() / world.size).backward()
    assert_close(gradients_of(model.module), gradients_of(alone))
