"""The model of the benchmark and its AdamW state, sharded over all ranks by axonmpi and by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....fsdp import FullyShardedDataParallel
from ..harness.torch_groups import default_group, torch_fsdp

_BYTES = 3 * 4
"""Of an element of a parameter and of AdamW's two numbers for it."""
_SMALL_MEBIBYTES = 100
_ROWS = 32


class Block(nn.Module):
    """A normalised perceptron beside the stream.

    Args:
        width: Features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, width] for as many."""
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


def _width(mebibytes: int) -> int:
    return 512 if mebibytes >= _SMALL_MEBIBYTES else 64


def build_model(mebibytes: int) -> nn.Sequential:
    """Return as many blocks as have this many MiB of parameters and state together, not sharded."""
    width = _width(mebibytes)
    bytes_of_block = (8 * width * width + 7 * width) * _BYTES
    count = max(1, round(mebibytes * 2**20 / bytes_of_block))
    return nn.Sequential(*(Block(width) for _ in range(count)))


def batch_for(mebibytes: int) -> Tensor:
    """Return [rows, width] samples."""
    return torch.ones(_ROWS, _width(mebibytes))


def sharded_by_axonmpi(mebibytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model sharded over all ranks, and its optimizer after a step; collective."""
    model = FullyShardedDataParallel(build_model(mebibytes), units=Block)
    return model, _after_a_step(model, mebibytes)


def sharded_by_torch(mebibytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same with torch's `fully_shard`; collective."""
    model = torch_fsdp(build_model(mebibytes), default_group())
    return model, _after_a_step(model, mebibytes)


def _after_a_step(model: nn.Module, mebibytes: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(batch_for(mebibytes)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def flat_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return torch's sharded tensors by one name each, as files of safetensors have them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state: dict[str, Any] = dict(model.state_dict())
    for parameter, values in optimizer.state.items():
        state |= {f"{names[id(parameter)]}.{key}": value for key, value in values.items() if value.dim()}
    return state
