"""Multi-layer perceptrons (MLPs) with their hidden features sharded over ranks.

    x ── up, a column layer ── activation ── down, a row layer ── sum over ranks          ParallelMLP

    x ── gate and up, one column layer ── activation(gate) · up ── down ── sum            ParallelGatedMLP

Each hidden feature is computed alone, so each rank computes its own from the input to the sum, with no message in
between: one all-reduce in forward, and one in backward for the gradient of the input. With sequence
parallelism these are an all-gather and a reduce-scatter.

Source: Shoeybi et al. 2019 (arXiv:1909.08053); gated: Shazeer 2020 (arXiv:2002.05202).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...groups.process_group import ProcessGroup
from ...groups.world import group_of_this_rank
from ...utils.arguments import check_flags, integer
from ..shards import Shard, check_divides
from .dropout import ShardedDropout
from .linear import ColumnParallelLinear, RowParallelLinear

Activation = str | Callable[[Tensor], Tensor]
"""A name, or a function that treats each feature alone."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class ParallelMLP(nn.Module):
    """Two linear layers with an activation between, hidden features sharded over the ranks; made collectively.

    Under the same seed its initial values are those of `torch.nn.Linear(hidden, intermediate, bias)` and
    `torch.nn.Linear(intermediate, hidden, bias)`, made in this order.

    Args:
        hidden: Features of the input and the output.
        intermediate: Features between, a multiple of the number of ranks.
        group: The ranks; None means all.
        activation: `"gelu"`, `"gelu_tanh"` (as in GPT-2), `"relu"`, `"silu"`, or a function that treats each
            feature alone.
        bias: Whether the layers have biases.
        dropout: The probability that an element of the output becomes zero while training. The mask is the same at
            any width, with and without sequence parallelism.
        sequence_parallel: Each rank gets and returns its slice of the sequence.
        device: Of the parameters.
        dtype: Of the parameters.

    Attributes:
        up: [hidden -> intermediate] the column layer.
        down: [intermediate -> hidden] the row layer.
        dropout: Of the output; its `generator` may be set.

    Raises:
        ValueError: `intermediate` does not divide by the ranks, `activation` is unknown, or `dropout` is not from
            0 to 1.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        group: ProcessGroup | None = None,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = group_of_this_rank(group, "group")
        options = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        self.activation = _find_activation(activation)
        self.dropout = ShardedDropout(dropout, group, 1, replicated=not sequence_parallel)
        self.up, self.down = _layers(hidden, [intermediate], bias, group, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Compute; collective, and so is backward.

        Args:
            x: [B, T, D] the same on all ranks, or with sequence parallelism [B, T / ranks, D].

        Returns:
            A new tensor of the same shape.
        """
        output: Tensor = self.dropout(self.down(self.activation(self.up(x))))
        return output


class ParallelGatedMLP(nn.Module):
    """An MLP with gated hidden features, as in Llama, sharded over the ranks; made collectively.

    Under the same seed its initial values are those of `torch.nn.Linear(hidden, 2 * intermediate, bias)`, the gate
    and the gated features in one layer, and `torch.nn.Linear(intermediate, hidden, bias)`, made in this order.

    Args:
        hidden: Features of the input and the output.
        intermediate: Features between, a multiple of the number of ranks.
        group: The ranks; None means all.
        activation: Of the gate; as for `ParallelMLP`.
        bias: Whether the layers have biases.
        sequence_parallel: Each rank gets and returns its slice of the sequence.
        device: Of the parameters.
        dtype: Of the parameters.

    Attributes:
        gate_up: [hidden -> 2 * intermediate] the column layer, of which each rank has a slice of either half.
        down: [intermediate -> hidden] the row layer.

    Raises:
        ValueError: `intermediate` does not divide by the ranks, or `activation` is unknown.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        group: ProcessGroup | None = None,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = group_of_this_rank(group, "group")
        options = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        self.activation = _find_activation(activation)
        self.gate_up, self.down = _layers(hidden, [intermediate, intermediate], bias, group, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Compute; collective, and so is backward.

        Args:
            x: [B, T, D] the same on all ranks, or with sequence parallelism [B, T / ranks, D].

        Returns:
            A new tensor of the same shape.
        """
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        output: Tensor = self.down(self.activation(gate) * up)
        return output


def _find_activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    if not isinstance(activation, str):
        if isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None:
            raise ValueError(
                f"activation: expected one without parameters, got {activation}, whose gradients would be those of "
                "this rank's features only"
            )
        return activation
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"activation: expected one of {', '.join(map(repr, _ACTIVATIONS))} or a function, got {activation!r}"
        )
    return _ACTIVATIONS[activation]


def _layers(
    hidden: int, parts: list[int], bias: bool, group: ProcessGroup, **options: Any
) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """Make the layers to and from the hidden features; the first may compute several parts of this size."""
    check_flags(bias=bias, sequence_parallel=options["sequence_parallel"])
    integer("hidden", hidden, minimum=1)
    check_divides("intermediate", integer("intermediate", parts[0], minimum=1), group.size)
    shard = Shard.packed(0, parts, group.size)
    first = ColumnParallelLinear(hidden, shard.size, bias, group, shard=shard, **options)
    return first, RowParallelLinear(parts[0], hidden, bias, group, **options)
