"""Units, the modules whose parameters are gathered together, and full parameters that users gather by hand.

    Unit              shows a module this rank's shards, or full parameters while it computes
    LentBuffer        memory in which units are gathered one after the other
    FullParameters    copies of all full parameters on every rank, for users:

        gather      sharded parameters show the copies
        forward     computes with the shards, after changes of the copies were taken over
        step        parameters show the shards while an optimizer steps, and then the copies again
        reshard     parameters show the shards

The parameters are the same objects all the time: an optimizer has them, whenever it was built.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..across_ranks.comparison import raised_on_all
from ..types import Work
from ..utils.torch_internals import plain_tensors, set_version
from .flat_parameter import BufferKind, FlatParameter, ShardedParameter


class LentBuffer:
    """Memory that is lent to one unit after the other.

    Args:
        memory: [bytes] uint8, shared by the ranks of a node.

    Attributes:
        users: Number of units that it is lent to.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._holder: weakref.ref[Unit] | None = None
        self.users = 0

    @property
    def holder(self) -> Unit | None:
        """The unit whose parameters it holds, if any."""
        return None if self._holder is None else self._holder()

    @holder.setter
    def holder(self, unit: Unit) -> None:
        self._holder = weakref.ref(unit)


class Unit:
    """A module whose parameters are gathered together.

    Args:
        name: Its name in the model.
        module: The module.
        flats: Its parameters.
        lent: Memory for parameters without a buffer of their own; None if there are none.

    Attributes:
        parameters: Its parameters, one by one.
        is_resident: True if nothing of it is ever gathered.
        active: Number of forwards of the module that are running; parameters are full meanwhile.
        shown: True if parameters are full because backward recomputes something.
        first_event: Number of the begin of its first forward without a backward so far; infinite if there is none.
        pending: Gathers under way.
    """

    def __init__(
        self, name: str, module: nn.Module, flats: Sequence[FlatParameter], lent: LentBuffer | None
    ) -> None:
        self.name = name
        self._module = weakref.ref(module)  # has hooks that lead here
        self.flats = list(flats)
        self.parameters = [parameter for flat in flats for parameter in flat.parameters]
        self.is_resident = all(flat.is_resident for flat in flats)
        self.lent = lent
        self.active = 0
        self.shown = False
        self.first_event: float = math.inf
        self.pending: list[Work | None] = []
        if lent is not None:
            lent.users += 1
            self._version_in_buffer = lent.users

    @property
    def module(self) -> nn.Module | None:
        """The module, None once it was dropped."""
        return self._module()

    @property
    def is_valid(self) -> bool:
        """True if the buffers hold its parameters."""
        return all(flat.is_valid for flat in self.flats) and (self.lent is None or self.lent.holder is self)

    @property
    def shows_full(self) -> bool:
        """True if modules have the full parameters."""
        return self.shown or self.active > 0

    def show_sharded(self) -> None:
        """Let the modules have this rank's shards of the parameters; local."""
        self.shown = False
        for parameter in self.parameters:
            _set_attributes(parameter, parameter.sharded)

    def show_full(self) -> None:
        """Let the modules have the full parameters; local."""
        with plain_tensors():
            for parameter in self.parameters:
                full, sharded = parameter.full, parameter.sharded
                if full.requires_grad is not sharded.requires_grad:
                    full.requires_grad_(sharded.requires_grad)
                _set_attributes(parameter, full)

    def take_changes(self) -> None:
        """Copy values into the shards that were put into other memory; local.

        Raises:
            ValueError: A parameter was replaced, changed in shape or dtype, or given a hook.
        """
        for parameter in self.parameters:
            for owner, attribute in parameter.owners:
                parameter.take_change(dict.get(owner._parameters, attribute))

    def begin_gather(self) -> None:
        """Begin to fill the buffers, unless they are valid or being filled; collective."""
        if self.is_valid or self.pending:
            return
        if self.lent is not None:
            self._take_buffer(self.lent)
        stale = [flat for flat in self.flats if flat.kind is BufferKind.LENT or not flat.is_valid]
        self.pending = [flat.gather() for flat in stale]

    def _take_buffer(self, lent: LentBuffer) -> None:
        holder = lent.holder
        if holder is not None and holder is not self:
            if holder.active:
                raise ValueError(
                    f"units {holder.name!r} and {self.name!r} are needed at the same time, the second within "
                    "the forward of the first, though it is no submodule of it; put both into one unit with "
                    "units=..."
                )
            holder.finish_gather()
            if holder.shown:
                holder.show_sharded()
        lent.holder = self
        # Autograd refuses a backward that has saved another unit's parameters, which lay here.
        set_version(lent.memory, 0)

    def finish_gather(self) -> None:
        """Wait until the buffers are filled; local."""
        pending, self.pending = self.pending, []
        for work in pending:
            if work is not None:
                work.wait(self.flats[0].group.backend.timeout)
        if self.lent is not None and self.lent.holder is self:
            set_version(self.lent.memory, self._version_in_buffer)

    def gather(self) -> None:
        """Fill the buffers, unless they are valid; collective."""
        self.begin_gather()
        self.finish_gather()

    def changes(self) -> int:
        """Return the number of changes of the shards by this rank so far; local."""
        return sum(int(flat.shard._version) for flat in self.flats if not flat.is_resident)


def _set_attributes(parameter: ShardedParameter, shown: nn.Parameter) -> None:
    """Set a parameter's attributes; by `__setattr__` in modules such as recurrent ones, which also keep lists."""
    for module, attribute in parameter.owners:
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[attribute] = shown
        else:
            setattr(module, attribute, shown)


class FullParameters:
    """Copies of the full parameters, which sharded parameters show to users.

    Args:
        flats: The parameters of a model; there is one at least.
        writeback: Take changes of the copies over, each rank those of its shard.

    Attributes:
        shown: True while the copies are shown.
    """

    def __init__(self, flats: Sequence[FlatParameter], *, writeback: bool) -> None:
        self._parameters = [parameter for flat in flats for parameter in flat.parameters]
        self._group = flats[0].group
        self.writeback = writeback
        self.shown = False

    @torch.no_grad()
    def show(self) -> None:
        """Show full parameters; collective."""
        self._group.barrier()  # all changes of the shards are made
        for parameter in self._parameters:
            full = parameter.flat.full_tensor(parameter)
            assert full is not None
            parameter.show(full.to(parameter.flat.device))  # modules compute with it
        self.shown = True

    def hide(self) -> None:
        """Show this rank's shards again; local."""
        self.shown = False
        for parameter in self._parameters:
            parameter.show(None)

    @torch.no_grad()
    def take_changes(self) -> None:
        """Copy changes of the copies into the shards, if the copies are shown; collective.

        Raises:
            ValueError: There are changes, which are to be dropped; on all ranks.
        """
        if not self.shown:
            return
        changed = ((parameter, new) for parameter in self._parameters if (new := parameter.changed()) is not None)
        if self.writeback:
            self._group.barrier()  # all ranks have read the shards
            for parameter, new in changed:
                parameter.own.copy_(new)
            return
        with raised_on_all(self._group.backend):  # one rank alone may see it in its shard
            for parameter, _ in changed:
                raise ValueError(
                    f"parameter {parameter.name!r} was changed within full_parameters(writeback=False), which "
                    "drops changes: leave the block first, use writeback=True, or compute under torch.no_grad()"
                )
