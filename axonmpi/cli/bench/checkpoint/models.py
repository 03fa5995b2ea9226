"""One model and its AdamW state on all ranks: sharded by this package and by torch, as large as is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....fsdp import FullyShardedDataParallel
from ....groups.world import World

_NUMBERS = 3 * 4
"""Bytes of a parameter element and of AdamW's two numbers for it."""
_SMALL_MIBIBYTES = 100
ROWS = 32


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


def width_for(mebibytes: int) -> int:
    """Return the features of a model."""
    return 512 if mebibytes >= _SMALL_MIBIBYTES else 64


def blocks_for(mebibytes: int) -> int:
    """Return how many blocks have so many MiB of parameters and state together."""
    width = width_for(mebibytes)
    of_block = (8 * width * width + 7 * width) * _NUMBERS
    return max(1, round(mebibytes * 2**20 / of_block))


def build_model(mebibytes: int) -> nn.Sequential:
    """Build the model, whole."""
    return nn.Sequential(*(Block(width_for(mebibytes)) for _ in range(blocks_for(mebibytes))))


def batch_for(mebibytes: int) -> Tensor:
    """Return [rows, width] samples."""
    return torch.ones(ROWS, width_for(mebibytes))


def ours(mebibytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model sharded over all ranks, and its optimizer after a step; collective."""
    model = FullyShardedDataParallel(build_model(mebibytes), units=Block)
    return model, _after_a_step(model, mebibytes)


def torchs(mebibytes: int, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same with torch's `fully_shard`; collective."""
    # These take a second to import, which the other benchmarks need not spend.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world.size,))
    model = build_model(mebibytes)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, _after_a_step(model, mebibytes)


def _after_a_step(model: nn.Module, mebibytes: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(batch_for(mebibytes)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def flat_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return torch's sharded tensors by one name each, as files of safetensors have them; local."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state: dict[str, Any] = dict(model.state_dict())
    for parameter, values in optimizer.state.items():
        state |= {f"{names[id(parameter)]}.{key}": value for key, value in values.items() if value.dim()}
    return state
