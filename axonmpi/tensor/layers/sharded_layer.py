"""The base of layers with sharded parameters: initial values, and full parameters.

A layer has the same initial values as torch's own layer under the same seed. So rank 0 makes that layer, each rank
gets its shard, and the generators of all ranks get the state of rank 0's:

    rank 0   torch.nn.Linear(...) ── state of the generator ── shards ──┐
    others                        ◀── state ───────────────── shard ◀──┘
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...across_ranks.sharded_parameters import axes_of, mark_sharded
from ...backends import wrap_dim
from ...groups.process_group import ProcessGroup
from ...groups.world import group_of_this_rank
from ...utils.device import device_at
from ...wrapping.optimizer_hooks import mark_gradient, watch_optimizers
from ...wrapping.shard_tensors import mark_state
from ..shards import Shard, gather_shards, scatter_shards

T = TypeVar("T")


def group_third(
    name: str, third: T | ProcessGroup, given: ProcessGroup | None, default: T
) -> tuple[T, ProcessGroup]:
    """Return a layer's third argument and its group, which may be passed third, too; local.

    Args:
        name: The third argument's name, for the message.
        third: The third argument.
        given: The argument `process_group`; None means the default group.
        default: The value of the third argument if a group was passed in its position.

    Raises:
        TypeError: There are two groups, or `given` is no group.
        ValueError: This rank is not in the group.
    """
    if not isinstance(third, ProcessGroup):
        return third, group_of_this_rank(given)
    if given is not None:
        raise TypeError(f"{name}: expected one group, got two, {third!r} as {name} and {given!r} as process_group")
    return default, group_of_this_rank(third)


class ShardedLayer(nn.Module, ABC):
    """A layer with parameters that are sharded over the ranks of a group; a `Sharded`.

    Args:
        shapes: The shape of each full parameter; None for a parameter that the layer has not.
        shards: By parameter name; parameters without one are the same on all ranks.
        process_group: The ranks.
        device: Of the parameters.
        dtype: Of the parameters.

    Attributes:
        process_group: The ranks.
        shards: By parameter name.
        sequence_dim: Dimension of the sequence in activations; set by layers that can shard it.

    Raises:
        ValueError: A shard is not for this size or this number of ranks.
    """

    sequence_dim: int

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...] | None],
        shards: Mapping[str, Shard],
        process_group: ProcessGroup,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.process_group = process_group
        self.shards: Mapping[str, Shard] = {
            name: shard for name, shard in shards.items() if shapes[name] is not None
        }
        for name, shape in shapes.items():
            parameter = None
            if shape is not None:
                local = list(shape)
                if name in self.shards:
                    shard = _checked(self.shards[name], shape, self.process_group.size)
                    local[shard.dim] = shard.local
                parameter = nn.Parameter(torch.empty(local, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.mark_parts()
        mark_state(self)

    def mark_parts(self) -> None:
        """Mark the sharded parameters, unless they are marked; local."""
        for name, shard in self.shards.items():
            parameter = self._parameters[name]
            if parameter is not None and not axes_of(parameter) and isinstance(parameter, nn.Parameter):
                mark_sharded(parameter, self.process_group, shard.copies, of_layer=True)
                watch_optimizers()
                if parameter.requires_grad and axes_of(parameter):
                    parameter.register_post_accumulate_grad_hook(mark_gradient)

    def _dim_of_sequence(self, shape: Sequence[int]) -> int:
        """Return the dimension of the sequence, from 0; the last dimension has the features."""
        dim = wrap_dim(self.sequence_dim, len(shape))
        if dim == len(shape) - 1:
            raise ValueError(
                f"sequence_dim: expected another dimension than the last, the features, got {self.sequence_dim} "
                f"for shape {list(shape)} on rank {self.process_group.rank}"
            )
        return dim

    @abstractmethod
    def _whole_layer(self) -> nn.Module:
        """Make torch's own layer, whose parameters have the same names."""

    def reset_parameters(self) -> None:
        """Draw the values of torch's own layer under rank 0's seed; collective.

        All ranks' default generators get the state of rank 0's. Only rank 0 allocates the full parameters, for a
        moment. Nothing happens on the meta device.
        """
        device = next(self.parameters()).device
        if device.type == "meta":
            return
        group = self.process_group
        group.barrier()  # mock ranks have one generator: no other rank may draw from it while rank 0 does
        full = dict(self._whole_layer().named_parameters()) if group.rank == 0 else {}
        control, generator = group.backend.control, device_at(device)
        state = generator.random_state().to(control.place)
        control.broadcast(state)
        generator.set_random_state(state.cpu())
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if name in self.shards:
                    part = scatter_shards(full.get(name), self.shards[name], group)
                    self._check_shape(name, part)
                    parameter.copy_(part)
                else:
                    parameter.copy_(full.get(name, parameter))
                    group.broadcast(parameter)

    def _check_shape(self, name: str, part: Tensor) -> None:
        """Raise unless a shard from rank 0 has the shape of this rank's parameter."""
        shape = self.get_parameter(name).shape
        if part.shape != shape:
            raise ValueError(
                f"expected a {type(self).__name__} of the same sizes on all ranks, got a {name} of shape "
                f"{list(shape)} on rank {self.process_group.rank}, and one of {list(part.shape)} on rank 0"
            )

    def _take(self, layer: nn.Module) -> None:
        """Copy this rank's shards of a full layer, and their `requires_grad`."""
        self.to_empty(device=next(layer.parameters()).device)
        self.train(layer.training)
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                full, shard = layer.get_parameter(name), self.shards.get(name)
                parameter.copy_(full if shard is None else shard.cut(full, self.process_group.rank))
                parameter.requires_grad_(full.requires_grad)
        self.mark_parts()

    def _full(self, name: str) -> Tensor:
        """Return a full parameter, a new tensor; collective if it is sharded."""
        parameter, shard = self.get_parameter(name).detach(), self.shards.get(name)
        return parameter.clone() if shard is None else gather_shards(parameter, shard, self.process_group)


def _checked(shard: Shard, shape: tuple[int, ...], group_size: int) -> Shard:
    if not 0 <= shard.dim < len(shape) or shard.size != shape[shard.dim]:
        raise ValueError(
            f"shard: expected one for a parameter of shape {list(shape)}, got one of size {shard.size} along dim "
            f"{shard.dim}"
        )
    if shard.group_size != group_size:
        raise ValueError(f"shard: expected one for {group_size} ranks, got one for {shard.group_size}")
    return shard
