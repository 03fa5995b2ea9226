"""A flat parameter: some of a unit's parameters, end to end, and this rank's shard of them.

    buffer   [P]  | weight ............... | bias | pad |     what the unit computes with, once a node
    shard    [S]       | this rank's |                        what this rank updates
    full          | weight ............... | bias |           what forward sees: views of the buffer
    sharded            | weight |                             what the optimizer sees: views of the shard

Where all ranks are on one node and compute in the dtype of the parameters, the shard lies in the buffer: it is
the only copy on the node, and is never gathered. Elsewhere the buffer is filled from the shards of all ranks
when it is needed. The buffer is on the device that computes; the shard, too, unless it is offloaded.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import Sizes
from ..collectives.divided_parameters import divide, mark_part
from ..groups.process_group import ProcessGroup
from ..types import Work
from ..utils.torch_internals import hooks_on
from ..wrapping.shard_tensors import ShardOfParameter
from .groups import ShardingGroups
from .layout import Layout
from .offload import Files, OffloadedParameter, PinnedMemory
from .unit_selection import Member

COMPUTED_WITH = "_axonmpi_computed_with"
"""Attribute of a full parameter: its name. Optimizers must have the sharded one instead."""


class BufferKind(enum.Enum):
    """Where the values of a flat parameter are.

    Attributes:
        RESIDENT: The shard lies in the buffer, which all ranks have in common; nothing is ever gathered.
        KEPT: The buffer is this flat parameter's own, filled anew for each forward.
        LENT: The buffer is lent for a unit's computation, and another unit's after that.
    """

    RESIDENT = "resident"
    KEPT = "kept"
    LENT = "lent"


class ShardedParameter:
    """One parameter of the model: full in the buffer, this rank's part of it in the shard.

    Args:
        member: The parameter as it was when the model was wrapped.
        flat: The flat parameter that it lies in.
        index: Its place among the flat parameter's.

    Attributes:
        name: Its name in the model.
        shape: Shape of the full parameter.
        numel: Elements of the full parameter.
        offset: Where it begins in the flat parameter.
        bounds: Which of its elements this rank has, from and to; equal if none.
        full: [*shape] what modules compute with, a view of the buffer, once there is one.
        own: This rank's part, a view of the shard, see `view_in`.
        sharded: What optimizers have; shows `own`, or a copy of the full parameter that the user has gathered.
    """

    full: nn.Parameter
    own: Tensor
    sharded: Any

    def __init__(self, member: Member, flat: FlatParameter, index: int) -> None:
        layout, rank = flat.layout, flat.group.rank
        self.name = member.name
        # Modules have hooks that lead here, and the flat parameter has this one: both know each other only one way,
        # so that the memory of a dropped model is free at once.
        self._owners = [(weakref.ref(owner), attribute) for owner, attribute in member.owners]
        self._flat = weakref.ref(flat)
        self.shape = member.parameter.shape
        self.numel = layout.numels[index]
        self.offset = layout.offsets[index]
        self.bounds = layout.part(index, rank)
        self._index = index
        self._start = self.offset + self.bounds[0] - layout.bounds(rank)[0]
        self._original = member.parameter
        self._copy: Tensor | None = None

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """The live modules with this parameter as an attribute, and the attribute's name."""
        owners = [(owner(), attribute) for owner, attribute in self._owners]
        return [(owner, attribute) for owner, attribute in owners if owner is not None]

    @property
    def flat(self) -> FlatParameter:
        """The flat parameter around it."""
        flat = self._flat()
        assert flat is not None
        return flat

    @property
    def holders(self) -> range:
        """The ranks of the flat parameter's group that have elements of it."""
        return self.flat.layout.holders(self._index)

    def use_buffer(self, buffer: Tensor) -> None:
        """Make the full parameter a view of [P] elements; local."""
        self.full = self._like_original(buffer[self.offset : self.offset + self.numel].view(self.shape))
        setattr(self.full, COMPUTED_WITH, self.name)

    def use_shard(self, shard: Tensor, group: ProcessGroup) -> None:
        """Make the sharded parameter a view of [S] elements; local."""
        self.own = self.view_in(shard)
        self.sharded = self._like_original(self.own)
        first, last = self.bounds
        mark_part(self.sharded, first, last, self.shape)
        divide(self.sharded, group)
        self._is_divided = group.size > 1
        self.sharded.ordinary, self.sharded.is_split = nn.Parameter, not self.flat.layout.keeps_full
        self.show(None)

    def offload_state(self, files: Files) -> None:
        """Let optimizers keep their state for the parameter in files; local."""
        self.sharded.ordinary, self.sharded.files = OffloadedParameter, files
        self.show(None)

    def _like_original(self, view: Tensor) -> nn.Parameter:
        made = nn.Parameter(view, requires_grad=self._original.requires_grad)
        made.__dict__.update(self._original.__dict__)
        return made

    def view_in(self, shard: Tensor) -> Tensor:
        """Return this rank's part of the parameter in [S] elements that are laid out as the shard is; local.

        It has the shape of the parameter if it is all of it, and else as many dims, which optimizers and those who
        make groups of parameters look at: [elements, 1, ...], or [0, ...].
        """
        first, last = self.bounds
        if first == last:
            return shard[:0].view(0, *self.shape[1:])
        part = shard[self._start : self._start + last - first]
        return part.view(self.shape if last - first == self.numel else (-1, *[1] * (len(self.shape) - 1)))

    def show(self, copy: Tensor | None) -> None:
        """Let the sharded parameter show a copy of the full one, [*shape]; None: this rank's part; local."""
        self._copy, sharded = copy, self.sharded
        sharded.__class__ = sharded.ordinary
        sharded.data = self._shown
        self._made = _home_of(sharded)
        if copy is None and self._is_divided:
            sharded.__class__ = ShardOfParameter

    @property
    def _shown(self) -> Tensor:
        return self.own if self._copy is None else self._copy

    def changed(self) -> Tensor | None:
        """Return the part of the copy that this rank has, if it differs from the parameter; local."""
        if self._copy is None:
            return None
        new = self._copy.reshape(-1)[slice(*self.bounds)].view(self.own.shape).to(self.own.device)
        return None if torch.equal(self.own, new) else new

    def set_gradient(self, gradient: Tensor) -> None:
        """Give the sharded parameter a gradient, shaped as `own`, whatever the parameter shows; local."""
        shown, self.sharded.data = self.sharded.data, self.own
        self.sharded.grad = gradient
        self.sharded.data = shown

    def take_change(self, shown: nn.Parameter | None) -> None:
        """Take over values that were put elsewhere, as converting a module does; local.

        Args:
            shown: What a module has under the parameter's name.

        Raises:
            ValueError: The parameter was replaced, changed in shape or dtype, unfrozen, or given a hook.
        """
        sharded: nn.Parameter = self.sharded
        expected = self._shown
        is_unfrozen = sharded.requires_grad and not self.flat.trains
        has_hooks = len(hooks_on(sharded)[0]) > 1  # one is our own
        is_moved = _home_of(sharded) != self._made
        if shown is sharded and not (is_unfrozen or has_hooks or is_moved):
            return
        if is_unfrozen:
            raise ValueError(
                f"parameter {self.name!r} was frozen when the model was wrapped, so there is no room for its "
                "gradient: freeze it after wrapping instead"
            )
        if has_hooks:
            raise ValueError(
                f"parameter {self.name!r} has a hook from register_hook(), which autograd would not call: it "
                "computes the gradient of the whole parameter. Use register_post_accumulate_grad_hook(), which is "
                "called when p.grad is the average"
            )
        if shown is not sharded or (sharded.shape, sharded.dtype) != (expected.shape, expected.dtype):
            what = "this rank's part" if expected.numel() < self.numel else "the whole parameter"
            got = "nothing" if shown is None else f"{shown.dtype} {list(shown.shape)}"
            how = "was replaced or changed" if shown is not sharded else "was changed in shape or dtype"
            raise ValueError(
                f"parameter {self.name!r} {how} after wrapping: expected {what}, {expected.dtype} "
                f"{list(expected.shape)}, got {got}. Change values in place under torch.no_grad(), or change the "
                "model before it is wrapped"
            )
        if sharded.numel():
            with torch.no_grad():
                expected.copy_(sharded)
            sharded.data = expected


def _home_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


class FlatParameter:
    """Some parameters of a unit, of one dtype.

    Args:
        members: The parameters, as they were when the model was wrapped.
        layout: Where each lies.
        groups: The ranks that share it out, and where they compute.
        compute_dtype: Dtype of the buffer.
        state: Where its values are.
        offload: Where the shard lies instead of memory of the device, if anywhere.
        label: Whose parameters they are, for messages.

    Attributes:
        label: The same.
        group: The ranks that share it out.
        place: The device of the buffer.
        pinned: The memory of the CPU that the shard lies in, if it does.
        dtype: Dtype of the shard.
        sizes: Elements of each rank's shard.
        parameters: The parameters.
        shard: [S] this rank's shard.
        buffer: [P] what the unit computes with, once there is one.
        is_resident: Whether the only copy of a node is computed with, and nothing is ever gathered.
        in_place: Whether the shard lies in the buffer.
        buffer_bytes: Size of the buffer.
        is_valid: Whether the buffer holds the parameters' values.
        trains: Whether its parameters are trained.
        gathers_ahead: Whether it is gathered while another unit computes.
    """

    buffer: Tensor

    def __init__(
        self,
        members: Sequence[Member],
        layout: Layout,
        groups: ShardingGroups,
        compute_dtype: torch.dtype,
        kind: BufferKind,
        offload: Files | PinnedMemory | None = None,
        label: str = "",
    ) -> None:
        self.layout = layout
        self.label = label
        self.group = groups.shard
        self.place = groups.place
        self.pinned = offload if isinstance(offload, PinnedMemory) else None
        self.dtype = members[0].parameter.dtype
        self.compute_dtype = compute_dtype
        self.kind = kind
        self.sizes = Sizes(layout.sizes)
        self.trains = members[0].parameter.requires_grad
        self.is_resident = self.is_valid = kind is BufferKind.RESIDENT
        in_own_buffer = kind is BufferKind.KEPT and self.dtype == compute_dtype and offload is None
        self.in_place = self.is_resident or in_own_buffer
        self.buffer_bytes = layout.total * compute_dtype.itemsize
        self.shard = torch.empty(0, dtype=self.dtype, device=self.place)
        self.parameters = [ShardedParameter(member, self, index) for index, member in enumerate(members)]
        self.gathers_ahead = groups.gathers_beside_computation or self.pinned is not None

    def set_buffer(self, buffer: Tensor) -> None:
        """Use [P] elements of memory that the ranks of a node have in common to compute with; local."""
        self.buffer = buffer
        for parameter in self.parameters:
            parameter.use_buffer(buffer)
        if self.in_place:
            self.set_shard(buffer[slice(*self.layout.bounds(self.group.rank))])

    def set_shard(self, shard: Tensor) -> None:
        """Use [S] elements of memory for the shard; local."""
        self.shard = shard
        for parameter in self.parameters:
            parameter.use_shard(shard, self.group)

    def pieces(self) -> list[ShardedParameter | int]:
        """Return the parameters in the order in which they lie, and between them elements of padding."""
        pieces: list[ShardedParameter | int] = []
        end = 0
        for parameter in sorted(self.parameters, key=lambda parameter: (parameter.offset, parameter.numel)):
            pieces += [parameter.offset - end, parameter]
            end = parameter.offset + parameter.numel
        return [piece for piece in [*pieces, self.layout.total - end] if piece != 0]

    # ---- moving values ------------------------------------------------------------------------------------

    def gather(self) -> Work | None:
        """Fill the buffer from the shards of all ranks; collective. Not for a resident one."""
        buffer, own = self.buffer.data, None if self.in_place else self.shard.detach()
        self.is_valid = True
        gather = self.group.backend.all_gather_into
        if self.pinned is None or own is None:
            return gather(buffer, own, self.sizes, async_op=self.gathers_ahead, label=self.label)
        return self.pinned.upload(
            own,
            buffer[slice(*self.layout.bounds(self.group.rank))],
            lambda: gather(buffer, None, self.sizes, async_op=True, label=self.label),
        )

    def load(self, value_of: Callable[[ShardedParameter], Tensor | None]) -> None:
        """Take the values that rank 0 has for some or all parameters; collective.

        Args:
            value_of: Called on rank 0 for each parameter; None leaves the parameter as it is.
        """
        values = [value_of(parameter) if self.group.rank == 0 else None for parameter in self.parameters]
        if self.is_resident:
            self.group.barrier()  # nobody reads the old values any more
            for parameter, value in zip(self.parameters, values, strict=True):
                if value is not None:
                    parameter.full.detach().copy_(value)
            self.group.barrier()
            return
        given: list[bool] = self.group.broadcast_object([value is not None for value in values])
        for parameter, value, is_given in zip(self.parameters, values, given, strict=True):
            if is_given:
                whole = torch.empty(parameter.shape, dtype=self.dtype, device=self.place)
                if value is not None:
                    whole.copy_(value)
                self.group.broadcast(whole)
                own = parameter.own.detach()
                own.copy_(whole.view(-1)[slice(*parameter.bounds)].view(own.shape))
        self.is_valid = False

    def whole(
        self, parameter: ShardedParameter, own: Tensor | None = None, *, on_first: bool = False
    ) -> Tensor | None:
        """Return a copy of a whole parameter, or of another tensor that is divided as it is; collective.

        Args:
            parameter: Which one.
            own: This rank's part; None: that of the parameter.
            on_first: Only rank 0 gets it, the others None.
        """
        if own is None and self.is_resident:  # other ranks' changes are in the buffer: callers have met before
            return None if on_first and self.group.rank else parameter.full.detach().clone()
        part = (parameter.own if own is None else own).detach().reshape(-1)
        if self.group.size == 1:
            whole = part.clone()
        elif on_first:
            parts = self.group.gather(part, 0)
            if parts is None:
                return None
            whole = torch.cat(parts)
        else:
            whole = self.group.all_gather(part)
        return whole.reshape(parameter.shape)
