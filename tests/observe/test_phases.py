"""What the page of a rank says that it is about, while it trains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.launch.board import own_page
from axonmpi.launch.page import Header, Phase

WRAPPERS = [ax.DistributedDataParallel, ax.FSDP]


class Seen(torch.autograd.Function):
    """Hands its input on, and keeps the phases of forward and backward."""

    phases: list[Phase]

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        Seen.phases.append(Phase(own_page().words[Header.PHASE]))
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        Seen.phases.append(Phase(own_page().words[Header.PHASE]))
        return gradient


class Model(nn.Module):
    """Two layers with a look at the phase between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Seen.apply(self.first(x)))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_forward_and_backward_are_told(world: ax.World, wrap: type[nn.Module]) -> None:
    Seen.phases = []
    model = wrap(Model())
    loss = model(torch.ones(2, 4)).sum()
    Seen.phases.append(Phase(own_page().words[Header.PHASE]))
    loss.backward()
    Seen.phases.append(Phase(own_page().words[Header.PHASE]))
    assert Seen.phases == [Phase.FORWARD, Phase.OTHER, Phase.BACKWARD, Phase.OTHER]
