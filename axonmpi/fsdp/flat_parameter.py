"""Flat parameter: some of a unit's parameters, end to end, and this rank's shard of them.

    buffer   [P]  | weight ............... | bias | pad |     the unit computes with it; one a node
    shard    [S]       | this rank's |                        this rank updates it
    full          | weight ............... | bias |           parameters in forward: views of the buffer
    sharded            | weight |                             parameters of optimizers: views of the shard

If all ranks are on one node and compute in the dtype of the parameters, the shard lies in the buffer: it is the
only copy on the node, and is never gathered. Otherwise the buffer is filled from the shards of all ranks before a
unit computes. The buffer is on the device that computes, and so is the shard unless it is offloaded.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..across_ranks.sharded_parameters import mark_sharded, mark_slice
from ..backends import Sizes
from ..groups.process_group import ProcessGroup
from ..types import Work
from ..utils.torch_internals import hooks_on
from ..wrapping.shard_tensors import ShardOfParameter
from .groups import ShardingGroups
from .layout import Layout
from .offload import Files, OffloadedParameter, PinnedMemory

STALE = "_axonmpi_stale"
"""Attribute of a parameter that an optimizer must not have, as it has the sharded one instead: name and origin."""


class BufferKind(enum.Enum):
    """Owners of the buffer of a flat parameter.

    Attributes:
        RESIDENT: All ranks of the node, whose shards lie in it; nothing is ever gathered.
        KEPT: This flat parameter; filled anew for each forward.
        LENT: One unit after the other, each while it computes.
    """

    RESIDENT = "resident"
    KEPT = "kept"
    LENT = "lent"


@dataclass
class Member:
    """One parameter of the model.

    Attributes:
        name: The first of its names in the model.
        parameter: The parameter as it was at wrapping.
        owners: The modules with the parameter as an attribute, and the attribute's name.
    """

    name: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)


class ShardedParameter:
    """One parameter of the model: full in the buffer, and this rank's shard of it.

    Args:
        member: The parameter as it was at wrapping.
        flat: Its flat parameter.
        index: Its index in the flat parameter.

    Attributes:
        name: Its name in the model.
        shape: Shape of the full parameter.
        numel: Elements of the full parameter.
        offset: Index of its first element in the flat parameter.
        bounds: First and last index (exclusive) of this rank's elements of it; equal if there are none.
        full: [*shape] view of the buffer, with which modules compute; set with the buffer.
        own: This rank's elements, a view of the shard, see `view_in`.
        sharded: The parameter of optimizers; shows `own`, or a copy of the full parameter that the user has
            gathered.
    """

    full: nn.Parameter
    own: Tensor
    sharded: Any

    def __init__(self, member: Member, flat: FlatParameter, index: int) -> None:
        layout, rank = flat.layout, flat.group.rank
        self.name = member.name
        # Hooks of modules and the flat parameter lead here. Weak references back free the memory of a dropped model
        # at once.
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
        setattr(self.full, STALE, (self.name, "is within a forward"))

    def use_shard(self, shard: Tensor, group: ProcessGroup) -> None:
        """Make the sharded parameter a view of [S] elements; local."""
        self.own = self.view_in(shard)
        self.sharded = self._like_original(self.own)
        first, last = self.bounds
        mark_slice(self.sharded, first, last, self.shape)
        mark_sharded(self.sharded, group)
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
        """Return this rank's elements in [S] elements that are laid out as the shard is; local.

        The view has the parameter's shape if it has all elements, and otherwise [elements, 1, ...] or [0, ...]:
        optimizers and users choose parameters by their number of dims.
        """
        first, last = self.bounds
        if first == last:
            return shard[:0].view(0, *self.shape[1:])
        part = shard[self._start : self._start + last - first]
        return part.view(self.shape if last - first == self.numel else (-1, *[1] * (len(self.shape) - 1)))

    def show(self, copy: Tensor | None) -> None:
        """Let the sharded parameter show a copy of the full one, [*shape]; None: this rank's shard; local."""
        self._copy, sharded = copy, self.sharded
        sharded.__class__ = sharded.ordinary
        sharded.data = self._shown
        self._made = _memory_of(sharded)
        if copy is None and self._is_divided:
            sharded.__class__ = ShardOfParameter

    @property
    def _shown(self) -> Tensor:
        return self.own if self._copy is None else self._copy

    def changed(self) -> Tensor | None:
        """Return this rank's elements of the copy if they differ from the shard, and else None; local."""
        if self._copy is None:
            return None
        new = self._own_elements(self._copy).to(self.own.device)
        return None if torch.equal(self.own, new) else new

    def _own_elements(self, full: Tensor) -> Tensor:
        """Return this rank's elements of a full tensor, shaped as `own`."""
        return full.reshape(-1)[slice(*self.bounds)].view(self.own.shape)

    def load(self, full: Tensor) -> None:
        """Copy this rank's elements of a full tensor into the shard; local."""
        self.own.detach().copy_(self._own_elements(full))

    def set_gradient(self, gradient: Tensor) -> None:
        """Set the gradient, shaped as `own`, of the sharded parameter, whatever it shows; local."""
        shown, self.sharded.data = self.sharded.data, self.own
        self.sharded.grad = gradient
        self.sharded.data = shown

    def take_change(self, shown: nn.Parameter | None) -> None:
        """Copy values into the shard that were put into other memory, as converting a module does; local.

        Args:
            shown: The module's attribute of the parameter's name.

        Raises:
            ValueError: The parameter was replaced, changed in shape or dtype, unfrozen, or given a hook.
        """
        sharded: nn.Parameter = self.sharded
        expected = self._shown
        is_unfrozen = sharded.requires_grad and not self.flat.trains
        has_hooks = len(hooks_on(sharded)[0]) > 1  # one is our own
        is_moved = _memory_of(sharded) != self._made
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
            kind = "this rank's part" if expected.numel() < self.numel else "the whole parameter"
            got = "nothing" if shown is None else f"{shown.dtype} {list(shown.shape)}"
            change = "was replaced or changed" if shown is not sharded else "was changed in shape or dtype"
            raise ValueError(
                f"parameter {self.name!r} {change} after wrapping: expected {kind}, {expected.dtype} "
                f"{list(expected.shape)}, got {got}. Change values in place under torch.no_grad(), or change the "
                "model before it is wrapped"
            )
        if sharded.numel():
            with torch.no_grad():
                expected.copy_(sharded)
            sharded.data = expected


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


class FlatParameter:
    """Some parameters of a unit, of one dtype.

    Args:
        members: The parameters as they were at wrapping.
        layout: Offsets and shards.
        groups: The ranks that shard it, and the device that computes.
        compute_dtype: Dtype of the buffer.
        kind: Owner of the buffer.
        offload: Memory of the shard; None: that of the device.
        label: The unit, for messages.

    Attributes:
        group: The ranks that shard it.
        device: The device of the buffer.
        pinned: The pinned memory in which the shard lies; None if it does not.
        dtype: Dtype of the shard.
        sizes: Elements of each rank's shard.
        shard: [S] this rank's shard.
        buffer: [P] the buffer; set by `set_buffer`.
        is_resident: True if nothing is ever gathered.
        in_place: True if the shard lies in the buffer.
        buffer_bytes: Size of the buffer.
        is_valid: True if the buffer holds the parameters' values.
        trains: True if its parameters are trained.
        gathers_ahead: True if it is gathered while another unit computes.
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
        self.device = groups.device
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
        self.shard = torch.empty(0, dtype=self.dtype, device=self.device)
        self.parameters = [ShardedParameter(member, self, index) for index, member in enumerate(members)]
        self.gathers_ahead = groups.gathers_beside_computation or self.pinned is not None

    def set_buffer(self, buffer: Tensor) -> None:
        """Use [P] elements of memory, shared by the ranks of a node, as the buffer; local."""
        self.buffer = buffer
        for parameter in self.parameters:
            parameter.use_buffer(buffer)
        if self.in_place:
            self.set_shard(self._own_slice(buffer))

    def _own_slice(self, buffer: Tensor) -> Tensor:
        return buffer[slice(*self.layout.bounds(self.group.rank))]

    def set_shard(self, shard: Tensor) -> None:
        """Use [S] elements of memory for the shard; local."""
        self.shard = shard
        for parameter in self.parameters:
            parameter.use_shard(shard, self.group)

    def spans(self) -> list[ShardedParameter | int]:
        """Return the parameters in the order of their offsets, and between them elements of padding."""
        spans: list[ShardedParameter | int] = []
        end = 0
        for parameter in sorted(self.parameters, key=lambda parameter: (parameter.offset, parameter.numel)):
            spans += [parameter.offset - end, parameter]
            end = parameter.offset + parameter.numel
        return [span for span in [*spans, self.layout.total - end] if span != 0]

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
            self._own_slice(buffer),
            lambda: gather(buffer, None, self.sizes, async_op=True, label=self.label),
        )

    def load(self, value_of: Callable[[ShardedParameter], Tensor | None]) -> None:
        """Copy rank 0's values of some or all parameters into the shards; collective.

        Args:
            value_of: Called on rank 0 for each parameter; None leaves the parameter as it is.
        """
        values = [value_of(parameter) if self.group.rank == 0 else None for parameter in self.parameters]
        if self.is_resident:
            self.group.barrier()  # all ranks have read the old values
            for parameter, value in zip(self.parameters, values, strict=True):
                if value is not None:
                    parameter.full.detach().copy_(value)
            self.group.barrier()
            return
        has_value: list[bool] = self.group.broadcast_object([value is not None for value in values])
        for parameter, value, is_loaded in zip(self.parameters, values, has_value, strict=True):
            if is_loaded:
                full = torch.empty(parameter.shape, dtype=self.dtype, device=self.device)
                if value is not None:
                    full.copy_(value)
                self.group.broadcast(full)
                parameter.load(full)
        self.is_valid = False

    def full_tensor(
        self, parameter: ShardedParameter, own: Tensor | None = None, *, on_first: bool = False
    ) -> Tensor | None:
        """Return a copy of a full parameter, or of another tensor that is sharded as it is; collective.

        Args:
            parameter: The parameter.
            own: This rank's shard of the other tensor; None: gather the parameter.
            on_first: Only rank 0 gets the copy, the others None.
        """
        if own is None and self.is_resident:  # callers have met, so other ranks' changes are in the buffer
            return None if on_first and self.group.rank else parameter.full.detach().clone()
        shard = (parameter.own if own is None else own).detach().reshape(-1)
        if self.group.size == 1:
            full = shard.clone()
        elif on_first:
            shards = self.group.gather(shard, 0)
            if shards is None:
                return None
            full = torch.cat(shards)
        else:
            full = self.group.all_gather(shard)
        return full.reshape(parameter.shape)
