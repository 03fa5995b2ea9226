"""Whole layers in plain torch with values of their own, what each rank has of their data, and what was sent.

Nothing here draws from torch's default generator, which mock ranks have in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


# ---- models -----------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Two layers, whole or divided."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def whole_mlp(hidden: int, between: int, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> MLP:
    return MLP(
        whole_linear(hidden, between, bias=bias, dtype=dtype, seed=1),
        whole_linear(between, hidden, bias=bias, dtype=dtype, seed=2),
    )


def divided_mlp(whole: MLP, **options: Any) -> MLP:
    return MLP(
        ax.ColumnParallelLinear.from_linear(whole.up, **options),
        ax.RowParallelLinear.from_linear(whole.down, **options),
    )


def assert_gradients(divided: nn.Module, whole: nn.Module, world: ax.World, dims: dict[str, int]) -> None:
    """Compare the gradients of all parameters; `dims` says along which dimension each is cut."""
    expected = dict(whole.named_parameters())
    for name, parameter in divided.named_parameters():
        gradient = expected[name].grad
        if gradient is not None and name in dims:
            gradient = part(gradient, world, dims[name])
        if gradient is None:
            assert parameter.grad is None, name
        else:
            assert_close(parameter.grad, gradient, name)


OF_MLP = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class Siblings(nn.Module):
    """Three layers that share their input, and what else is done with it."""

    def __init__(self, layers: list[nn.Module], output: nn.Module, enter: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = layers
        self.output = output
        self.enter = enter

    def forward(self, x: Tensor) -> Tensor:
        shared = self.enter(x)
        return self.output(self.first(shared) * torch.tanh(self.second(shared)) + self.third(shared)) + x


OF_SIBLINGS = {f"{name}.{kind}": 0 for name in ("first", "second", "third") for kind in ("weight", "bias")}
OF_SIBLINGS |= {"output.weight": 1}


def siblings(world: ax.World, sequence_parallel: bool) -> tuple[Siblings, Siblings]:
    layers = [whole_linear(6, 8, seed=seed) for seed in (1, 2, 3)]
    whole = Siblings(layers, whole_linear(8, 6, seed=4), lambda x: x)
    divided = [ax.ColumnParallelLinear.from_linear(layer, input_is_entered=True) for layer in layers]
    row = ax.RowParallelLinear.from_linear(whole.output, sequence_parallel=sequence_parallel)
    options = {"sequence_parallel": sequence_parallel}
    return whole, Siblings(divided, row, lambda x: ax.tensor.enter(x, world.default_group, **options))
