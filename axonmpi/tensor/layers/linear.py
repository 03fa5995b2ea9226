"""Linear layers with a weight that is sharded over the ranks of a group.

    full input ─ enter ─ ColumnParallelLinear ── own features ── RowParallelLinear ─ leave ─ full output
                          rows of the weight                     columns of the weight

Such a pair has one all-reduce in forward (leave) and one in backward (enter), which overlaps with the gradients of
weights. With sequence parallelism input and output are slices of the sequence: forward has one all-gather and one
reduce-scatter, backward two all-gathers and one reduce-scatter.

Sources: Shoeybi et al. 2019 (Megatron-LM); Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...groups.process_group import ProcessGroup
from ...utils.arguments import check_flags, integer
from ..overlapped_linear import column_linear, entered_linear
from ..regions import check_sequence, cut, join, sum_parts
from ..shards import Shard, check_divides
from .sharded_layer import ShardedLayer, group_third

_Layer = TypeVar("_Layer", bound="_ParallelLinear")


class _ParallelLinear(ShardedLayer):
    """A linear layer whose weight is cut along either dimension."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        process_group: ProcessGroup,
        shard: Shard,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        integer("in_features", in_features, minimum=1)
        integer("out_features", out_features, minimum=1)
        shapes = {"weight": (out_features, in_features), "bias": (out_features,) if bias else None}
        cut = ("weight", "bias") if shard.dim == 0 else ("weight",)
        super().__init__(shapes, dict.fromkeys(cut, shard), process_group, device, dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls: type[_Layer], linear: nn.Linear, process_group: ProcessGroup | None = None, **options: Any
    ) -> _Layer:
        """Return a layer with this rank's shard of a linear layer that all ranks have; local.

        Args:
            linear: The full layer; it is not changed. The new layer trains the same parameters.
            process_group: The ranks; None means all.
            **options: As for the class, by name; sizes, `bias`, `device` and `dtype` are the linear layer's.

        Raises:
            TypeError: `linear` is none, or an option is unknown.
            ValueError: The sizes cannot be divided.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        build: Any = cls
        layer: _Layer = build(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            process_group,
            device="meta",
            dtype=linear.weight.dtype,
            **options,
        )
        layer._take(linear)
        return layer

    def _whole_layer(self) -> nn.Module:
        return nn.Linear(
            self.in_features,
            self.out_features,
            self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )

    def full_weight(self) -> Tensor:
        """Return the full weight, [out_features, in_features], a new tensor; collective."""
        return self._full("weight")

    def full_bias(self) -> Tensor | None:
        """Return the full bias, [out_features], a new tensor, or None if there is none; collective."""
        return None if self.bias is None else self._full("bias")

    def extra_repr(self) -> str:
        """Describe the layer in `repr()`."""
        parts = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{parts}, ranks={self.process_group.size}"

    def _check_features(self, input: Tensor, expected: int, meaning: str) -> None:
        if not input.dim() or input.shape[-1] != expected:
            raise ValueError(
                f"input: expected [..., {expected}], {meaning}, got shape {list(input.shape)} on rank "
                f"{self.process_group.rank}"
            )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer with sharded outputs: y = x Aᵀ + b with the rows of A divided among the ranks.

    Construction is collective. First values are those of `torch.nn.Linear` under rank 0's seed, cut. Forward is
    local, or one all-gather with sequence parallelism. Backward sums the input's gradient over the ranks, while it
    computes the weight's. Layers that share an input get it from `axonmpi.tensor.enter`, which sums once for all.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the full output.
        bias: Whether to add a bias; or the group, which all layers take third.
        process_group: The ranks; None means all.
        gather_output: Return the full output on all ranks; one more all-gather.
        sequence_parallel: The input is this rank's slice of the sequence; the output is of the full sequence.
        sequence_dim: Dimension of the sequence in the input.
        shard: The rows of the weight (dim 0) on each rank; None means equal slices.
        input_is_entered: The input is the result of `axonmpi.tensor.enter`, or a function of it.
        device: Of the parameters; "meta" leaves them without values and sends nothing.
        dtype: Of the parameters.

    Attributes:
        shards: The shards of "weight" and "bias".

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `out_features` cannot be divided, or `shard` does not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool | ProcessGroup = True,
        process_group: ProcessGroup | None = None,
        gather_output: bool = False,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        shard: Shard | None = None,
        input_is_entered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        has_bias, group = group_third("bias", bias, process_group, True)
        check_flags(
            bias=has_bias,
            gather_output=gather_output,
            sequence_parallel=sequence_parallel,
            input_is_entered=input_is_entered,
        )
        shard = _chosen_shard(shard, 0, out_features, "out_features", group, copies=not gather_output)
        super().__init__(in_features, out_features, has_bias, group, shard, device, dtype)
        self.gather_output = gather_output
        self.input_is_entered = input_is_entered
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = integer("sequence_dim", sequence_dim)

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's outputs; collective with `gather_output` or sequence parallelism.

        Args:
            input: [..., in_features] the same on all ranks, or this rank's slice of the sequence.

        Returns:
            [..., out_features / W], or [..., out_features] with `gather_output`.

        Raises:
            ValueError: `input` has another number of features.
        """
        self.mark_parts()
        self._check_features(input, self.in_features, "the whole input")
        group = self.process_group
        if self.input_is_entered:
            output = entered_linear(input, self.weight, self.bias)
        else:
            dim = self._dim_of_sequence(input.shape) if self.sequence_parallel else None
            output = column_linear(input, self.weight, self.bias, group, dim)
        if not self.gather_output or group.size == 1:
            return output
        return join(output, group, self.shards["weight"].along(-1))


class RowParallelLinear(_ParallelLinear):
    """A linear layer with sharded inputs: y = Σ x Aᵀ + b with the columns of A divided among the ranks.

    Construction is collective. First values are those of `torch.nn.Linear` under rank 0's seed, cut. Forward sums
    over the ranks, backward is local; with sequence parallelism they are one reduce-scatter and one all-gather.

    Args:
        in_features: Size of the last dimension of the full input.
        out_features: Size of the last dimension of the output.
        bias: Whether to add a bias, once, after the sum; or the group, which all layers take third.
        process_group: The ranks; None means all.
        input_is_parallel: The input is this rank's features. Otherwise it is the full input, the same on all ranks,
            and backward gathers its gradient by one all-gather.
        sequence_parallel: Return this rank's slice of the sequence.
        sequence_dim: Dimension of the sequence in the input.
        shard: The columns of the weight (dim 1) on each rank; None means equal slices.
        device: Of the parameters; "meta" leaves them without values and sends nothing.
        dtype: Of the parameters.

    Attributes:
        shards: The shard of "weight"; "bias" is the same on all ranks, and its gradient is complete on each.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `in_features` cannot be divided, or `shard` does not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool | ProcessGroup = True,
        process_group: ProcessGroup | None = None,
        input_is_parallel: bool = True,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        shard: Shard | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        has_bias, group = group_third("bias", bias, process_group, True)
        check_flags(bias=has_bias, input_is_parallel=input_is_parallel, sequence_parallel=sequence_parallel)
        shard = _chosen_shard(shard, 1, in_features, "in_features", group, copies=False)
        super().__init__(in_features, out_features, has_bias, group, shard, device, dtype)
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = integer("sequence_dim", sequence_dim)

    def forward(self, input: Tensor) -> Tensor:
        """Compute the outputs; collective.

        Args:
            input: [..., in_features / W] this rank's features, or [..., in_features] for the full input.

        Returns:
            [..., out_features], the same on all ranks, or this rank's slice of the sequence.

        Raises:
            ValueError: `input` has another number of features, or the sequence cannot be divided.
        """
        self.mark_parts()
        group, shard = self.process_group, self.shards["weight"]
        if self.input_is_parallel:
            self._check_features(input, shard.local, f"this rank's share of {self.in_features} features")
        else:
            self._check_features(input, self.in_features, "the whole input")
        dim = None
        if self.sequence_parallel:
            dim = check_sequence(input.shape, group, self._dim_of_sequence(input.shape))
        if group.size == 1:
            return F.linear(input, self.weight, self.bias)
        if not self.input_is_parallel:
            input = cut(input, group, shard.along(-1))
        return sum_parts(F.linear(input, self.weight), self.bias, group, dim, in_place=True)


def _chosen_shard(
    shard: object, dim: int, features: int, argument: str, group: ProcessGroup, *, copies: bool
) -> Shard:
    """Return the checked shard of the weight, by default an even one; `copies` are allowed or not."""
    if shard is None:
        integer(argument, features, minimum=1)
        check_divides(argument, features, group.size, ", or say with shard= how it is divided")
        return Shard.even(dim, features, group.size)
    if not isinstance(shard, Shard):
        raise TypeError(f"shard: expected an axonmpi.tensor.Shard, got {type(shard).__name__}")
    if shard.dim != dim:
        raise ValueError(f"shard: expected one along dim {dim} of the weight, got one along dim {shard.dim}")
    if shard.copies > 1 and not copies:
        raise ValueError(
            f"shard: expected each row on one rank, got one with {shard.copies} copies, which is possible for "
            "divided outputs only"
        )
    return shard
