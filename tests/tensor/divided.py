"""Whole layers in plain torch with values of their own, what each rank has of their data, and what was sent.

Nothing here draws from torch's default generator, which mock ranks have in common.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor, nn

import axonmpi as ax

SIGNIFICANT = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""How far results of the order of 1 may be apart."""


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give a module that was made on the meta device values; of the order of 1 for outputs of linear layers."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            width = parameter.shape[-1] if parameter.dim() > 1 else 1
            parameter.copy_(randn(*parameter.shape, seed=100 * seed + index) / width**0.5)
    return module


def whole_linear(inputs: int, outputs: int, *, bias: bool = True, dtype=torch.float64, seed: int = 0) -> nn.Linear:
    linear = filled(nn.Linear(inputs, outputs, bias, device="meta", dtype=dtype), seed)
    assert isinstance(linear, nn.Linear)
    return linear


def part(tensor: Tensor, world: ax.World, dim: int) -> Tensor:
    """This rank's slice."""
    return tensor.detach().chunk(world.size, dim)[world.rank].clone()


def assert_close(found: Tensor | None, expected: Tensor | None, what: str = "") -> None:
    assert found is not None, what
    assert expected is not None, what
    assert (what, found.dtype, found.shape) == (what, expected.dtype, expected.shape)
    limit = SIGNIFICANT[found.dtype]
    np.testing.assert_allclose(
        found.detach().double().numpy(), expected.detach().double().numpy(), rtol=limit, atol=limit, err_msg=what
    )


class Sent:
    """The operations of a mock rank since this was made, by name."""

    def __init__(self, world: ax.World) -> None:
        self._log = world.default_group.backend.log
        self._before = len(self._log)

    def take(self) -> dict[str, int]:
        entries = list(self._log)[self._before :]
        self._before = len(self._log)
        return dict(Counter(entry.operation for entry in entries))
