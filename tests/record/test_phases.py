"""Phases in the record of a rank that trains."""

import pytest
import torch
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.record import own_record
from axonmpi.record.layout import Header, Phase

phases: list[Phase] = []


def note(*_: object) -> None:
    phases.append(Phase(own_record().words[Header.PHASE]))


class Between(nn.Module):
    """Keeps the phases of forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        note()
        x.register_hook(note)
        return x


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wrap", [ax.DistributedDataParallel, ax.FSDP])
def test_forward_and_backward_are_told(world: ax.World, wrap: type[nn.Module]) -> None:
    phases.clear()
    model = wrap(nn.Sequential(nn.Linear(4, 4), Between(), nn.Linear(4, 1)))
    loss = model(torch.ones(2, 4)).sum()
    note()
    loss.backward()
    note()
    assert phases == [Phase.FORWARD, Phase.OTHER, Phase.BACKWARD, Phase.OTHER]
