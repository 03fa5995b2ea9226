"""Large linear layers, whose gradients are reduced in their own memory and not in a bucket."""

from __future__ import annotations

import pytest
import torch
from helpers.models import built, check_averaged, gradients_of, joined_loss, large, own_loss, wrapped
from torch import Tensor, nn


class TwiceUsed(nn.Module):
    """One large weight that is used twice in a forward, once on three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 364)
        self.large = nn.Linear(364, 364)
        self.last = nn.Linear(364, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.large(torch.tanh(self.first(x)))
        return self.last(self.large(torch.tanh(hidden).unsqueeze(1)).squeeze(1))


class OfAnotherDtype(nn.Module):
    """A large layer in float64 or complex64 between layers in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(5, 260)
        self.large = nn.Linear(260, 260, dtype=dtype)
        self.last = nn.Linear(260, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.large(self.first(x).to(self.large.weight.dtype))
        return self.last((hidden.abs() if hidden.is_complex() else hidden).float())


class WithAttention(nn.Module):
    """torch's attention, which reads the weights of its layers and does not call them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 212)
        self.mix = nn.MultiheadAttention(212, 4, batch_first=True)
        self.last = nn.Linear(212, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).unsqueeze(1)
        return self.last(self.mix(hidden, hidden, hidden)[0]).squeeze(1)


def frozen() -> nn.Module:
    model = large()
    model[2].weight.requires_grad_(False)
    return model


def strided() -> nn.Module:
    model = large()
    model[2].weight = nn.Parameter(model[2].weight.detach().t())
    return model


def tied() -> nn.Module:
    model = large()
    model.insert(3, nn.Linear(364, 364, bias=False))
    model[3].weight = model[2].weight
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "make",
    [
        *(TwiceUsed, WithAttention, frozen, strided, tied),
        *(pytest.param(lambda d=d: OfAnotherDtype(d), id=str(d)) for d in (torch.float64, torch.complex64)),
    ],
)
def test_each_kind_of_large_layer(world, make):
    model = wrapped(world, built(make))
    for step in range(2):
        model.zero_grad()
        own_loss(model, world, step).backward()
        check_averaged(world, model, lambda alone, step=step: joined_loss(alone, step))


@pytest.mark.ranks(2)
def test_gradients_that_one_rank_keeps_stay_as_they_are(world):
    model = wrapped(world, built(large))
    own_loss(model, world).backward()
    gradient = model.module[2].weight.grad
    row = gradient[7]
    before = gradients_of(model.module)["2.weight"]
    if world.rank == 0:
        del gradient
    model.zero_grad()
    own_loss(model, world, 1).backward()
    assert torch.equal(row, before[7])
    if world.rank == 1:
        assert torch.equal(gradient, before)
