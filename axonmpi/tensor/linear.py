"""Linear layers whose weight is cut over the ranks of a group (layer 5).

                  whole input              whole output
                       │                        ▲
                     enter                    leave            one all-reduce forward (leave), one backward (enter)
                       ▼                        │
    weight rows  │ ColumnParallelLinear ─ ... ─ RowParallelLinear │  weight columns
                     each rank some features

Source: Shoeybi et al. 2019, "Megatron-LM".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import autograd
from ..group import ProcessGroup, default_group
from .regions import enter, leave, shared
from .shards import Shard

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _ParallelLinear(nn.Module):
    weight: nn.Parameter
    bias: nn.Parameter | None
    shards: Mapping[str, Shard]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        process_group: ProcessGroup | None,
        shard: Shard,
        sequence: tuple[bool, int],
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.process_group = default_group() if process_group is None else process_group
        self.sequence_parallel, self.sequence_dim = sequence
        self.shards = {"weight": shard, **({"bias": shard} if bias and shard.dim == 0 else {})}
        shape = [shard.local, in_features] if shard.dim == 0 else [out_features, shard.local]
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        )

    def reset_parameters(self) -> None:
        """Draw new values as `torch.nn.Linear` does, on rank 0; collective."""
        group = self.process_group
        group.barrier()
        whole: dict[str, Tensor] = {}
        if group.rank == 0:
            linear = nn.Linear(
                self.in_features,
                self.out_features,
                self.bias is not None,
                device=self.weight.device,
                dtype=self.weight.dtype,
            )
            whole = {name: value.detach() for name, value in linear.named_parameters()}
        state = torch.get_rng_state()
        group.broadcast(state)
        torch.set_rng_state(state)
        for name, parameter in self.named_parameters(recurse=False):
            shard = self.shards.get(name)
            if shard is None:
                if group.rank == 0:
                    parameter.data.copy_(whole[name])
                group.broadcast(parameter.data)
                continue
            cuts = None
            if group.rank == 0:
                cuts = torch.stack([shard.cut(whole[name], rank) for rank in range(group.size)])
            parameter.data.copy_(group.scatter(cuts)[0])

    def _take(self, linear: nn.Linear) -> None:
        rank = self.process_group.rank
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                value = getattr(linear, name)
                shard = self.shards.get(name)
                parameter.copy_(value if shard is None else shard.cut(value, rank))
                parameter.requires_grad_(value.requires_grad)

    def _full(self, name: str) -> Tensor:
        parameter = getattr(self, name).detach()
        shard = self.shards.get(name)
        if shard is None:
            return parameter.clone()
        return shard.join(self.process_group.all_gather(parameter[None]).unbind(0))

    def full_weight(self) -> Tensor:
        """Return the whole weight, [out_features, in_features]; collective."""
        return self._full("weight")

    def full_bias(self) -> Tensor | None:
        """Return the whole bias, [out_features]; collective; None where there is none."""
        return None if self.bias is None else self._full("bias")


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of whose outputs each rank computes some; its weight is cut along dim 0."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        process_group: ProcessGroup | None = None,
        gather_output: bool = False,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        shard: Shard | None = None,
        input_is_entered: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = default_group() if process_group is None else process_group
        shard = Shard.even(0, out_features, group.size) if shard is None else shard
        super().__init__(
            in_features, out_features, bias, group, shard, (sequence_parallel, sequence_dim), device, dtype
        )
        self.gather_output = gather_output
        self.input_is_entered = input_is_entered
        if self.weight.device.type != "meta":
            self.reset_parameters()

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, process_group: ProcessGroup | None = None, **options: Any
    ) -> ColumnParallelLinear:
        """Cut a layer; local."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            process_group,
            device="meta",
            dtype=linear.weight.dtype,
            **options,
        )
        layer.to_empty(device=linear.weight.device)
        layer._take(linear)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's outputs, [..., local]."""
        group = self.process_group
        if not self.input_is_entered:
            input = enter(
                input, group, sequence_parallel=self.sequence_parallel, sequence_dim=self.sequence_dim
            )
        output = F.linear(input, self.weight, self.bias)
        if not self.gather_output or group.size == 1:
            return output
        gathered = autograd.gather(output, group, dim=-1)
        return self.shards["weight"].__class__(
            output.dim() - 1,
            self.out_features,
            self.shards["weight"].ranges,
            self.shards["weight"].local,
            self.shards["weight"].copies,
        ).join(gathered.tensor_split(group.size, -1))


class RowParallelLinear(_ParallelLinear):
    """A linear layer of whose inputs each rank has some; its weight is cut along dim 1, the results are summed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        process_group: ProcessGroup | None = None,
        input_is_parallel: bool = True,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        shard: Shard | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = default_group() if process_group is None else process_group
        shard = Shard.even(1, in_features, group.size) if shard is None else shard
        super().__init__(
            in_features, out_features, bias, group, shard, (sequence_parallel, sequence_dim), device, dtype
        )
        self.input_is_parallel = input_is_parallel
        if self.weight.device.type != "meta":
            self.reset_parameters()

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, process_group: ProcessGroup | None = None, **options: Any
    ) -> RowParallelLinear:
        """Cut a layer; local."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            process_group,
            device="meta",
            dtype=linear.weight.dtype,
            **options,
        )
        layer.to_empty(device=linear.weight.device)
        layer._take(linear)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs, [..., out_features], of this rank's slice of the sequence with sequence parallelism."""
        if not self.input_is_parallel:
            input = autograd.scatter(input, self.process_group, dim=-1)
        partial = F.linear(input, self.weight)
        output = leave(
            partial,
            self.process_group,
            sequence_parallel=self.sequence_parallel,
            sequence_dim=self.sequence_dim,
        )
        if self.bias is None:
            return output
        bias = shared([self.bias], self.process_group)[0] if self.sequence_parallel else self.bias
        return output + bias
