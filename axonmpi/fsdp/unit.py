"""A unit: a module whose parameters are gathered together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..utils.torch_internals import set_version
from .flat_parameter import FlatParameter, State
from .guard import guard

__all__ = ["ShowsWholes", "Slot", "Unit", "check_parts"]


class Slot:
    """Memory that units take turns in.

    Args:
        memory: [bytes] uint8 that the ranks of a node have in common.

    Attributes:
        holder: The unit whose parameters it holds, if any.
        users: How many units it is lent to.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.holder: Unit | None = None
        self.users = 0

    def set_version(self, version: int) -> None:
        """Tell autograd whose values these are: what it saved of another unit is not to be used; local."""
        set_version(self.memory, version)


class Runs(Protocol):
    """What runs a model, as its units see it."""

    @property
    def gathers_ahead(self) -> bool:
        """Whether the next unit is gathered while the present one computes."""

    @property
    def timeout(self) -> float | None:
        """Seconds to wait for a collective."""

    @property
    def depth(self) -> int:
        """How many forwards of units are going on, one within the other."""

    @property
    def shows_wholes(self) -> bool:
        """Whether modules compute with the whole parameters that users have gathered: without gradients."""

    def shows_in_backward(self, unit: Unit) -> bool:
        """Make a unit's parameters whole for what is computed once more in backward, if that is now; collective."""


class ShowsWholes(Protocol):
    """What shows whole parameters to the user, as `full_parameters` does."""

    shown: bool

    def write(self) -> None:
        """Take over what the user has changed; collective."""

    def hide(self) -> None:
        """Let parameters be parts for an optimizer's step; collective."""

    def show(self) -> None:
        """Show whole parameters again; collective."""


class Unit:
    """A module whose parameters are gathered together.

    Args:
        name: Its name in the model.
        module: The module.
        flats: Its parameters.
        slot: Where those that have no buffer of their own are gathered.
        run: Runs the model.

    Attributes:
        active: How many forwards of the module are going on; parameters are whole meanwhile.
        shown: Whether parameters are whole because backward computes something once more.
        first_event: When its first forward began that no backward has followed yet; infinite if there is none.
        version: Counts the changes of the shard, as of the last forward.
        pending: The gathering that has begun and not ended.
    """

    def __init__(
        self, name: str, module: nn.Module, flats: Sequence[FlatParameter], slot: Slot | None, run: Runs
    ) -> None:
        self.name = name
        self.module = module
        self.flats = list(flats)
        self.slot = slot
        self.run = run
        self.active = 0
        self.shown = False
        self.first_event: float = math.inf
        self.version = 0
        self.pending: list[Any] = []
        if slot is not None:
            slot.users += 1
            self._turn = slot.users
        self._homes = [
            (owner, attribute, flat, index)
            for flat in flats
            for index, member in enumerate(flat.members)
            for owner, attribute in member.owners
        ]
        for owner, attribute, flat, index in self._homes:
            guard(owner, attribute, self, flat.members[index].name)

    @property
    def is_resident(self) -> bool:
        """Whether nothing of it is ever gathered."""
        return all(flat.state == State.RESIDENT for flat in self.flats)

    @property
    def is_valid(self) -> bool:
        """Whether its parameters can be computed with."""
        return all(flat.is_valid for flat in self.flats) and (self.slot is None or self.slot.holder is self)

    def install_parts(self) -> None:
        """Let the modules show this rank's parts of the parameters; local."""
        self.shown = False
        for owner, attribute, flat, index in self._homes:
            _put(owner, attribute, flat.parts[index])

    def install_fulls(self) -> None:
        """Let the modules show whole parameters; local."""
        for owner, attribute, flat, index in self._homes:
            full, part = flat.fulls[index], flat.parts[index]
            if full.requires_grad is not part.requires_grad:
                full.requires_grad_(part.requires_grad)
            _put(owner, attribute, full)

    def installed(self) -> list[tuple[str, FlatParameter, int, Any]]:
        """Return what the modules show now: name, flat parameter, index and parameter."""
        return [
            (flat.members[index].name, flat, index, dict.get(owner._parameters, attribute))
            for owner, attribute, flat, index in self._homes
        ]

    def has_changed(self) -> bool:
        """Say whether the modules show anything else than the parts as they were made; local."""
        return any(
            dict.get(owner._parameters, attribute) is not flat.parts[index]
            or (flat.parts[index].data_ptr(), flat.parts[index].shape) != flat.made[index]
            or (flat.parts[index].requires_grad and not flat.trains)
            or len(flat.parts[index]._backward_hooks or ()) > 1  # one is our own
            for owner, attribute, flat, index in self._homes
        )

    def begin_gather(self) -> None:
        """Begin to fill the buffers, where that is not done; collective."""
        if self.is_valid or self.pending:
            return
        if self.slot is not None:
            holder = self.slot.holder
            if holder is not None and holder is not self:
                if holder.active:
                    raise ValueError(
                        f"units {holder.name!r} and {self.name!r} are needed at the same time, the second within "
                        "the forward of the first, though it is no submodule of it; put both into one unit with "
                        "units=..."
                    )
                holder.finish_gather()
                if holder.shown:
                    holder.install_parts()
            self.slot.holder = self
            self.slot.set_version(0)
        lent = [flat for flat in self.flats if flat.state == State.LENT]
        stale = lent + [flat for flat in self.flats if flat.state == State.KEPT and not flat.is_valid]
        self.pending = [flat.gather(async_op=self.run.gathers_ahead) for flat in stale]

    def finish_gather(self) -> None:
        """Wait until the buffers are filled; local."""
        pending, self.pending = self.pending, []
        for work in pending:
            if work is not None:
                work.wait(self.run.timeout)
        if self.slot is not None and self.slot.holder is self:
            self.slot.set_version(self._turn)

    def changes(self) -> int:
        """Count the changes of the shards by this rank so far."""
        return sum(int(flat.shard._version) for flat in self.flats if flat.state != State.RESIDENT)


def _put(module: nn.Module, attribute: str, parameter: nn.Parameter) -> None:
    """Set an attribute; modules that do more when it is set (recurrent ones keep lists) do so."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[attribute] = parameter
    else:
        setattr(module, attribute, parameter)


def check_parts(unit: Unit) -> None:
    """Raise if a parameter was replaced, changed in shape or given a hook, take back values put elsewhere; local.

    Raises:
        ValueError: Naming the parameter.
    """
    for name, flat, index, shown in unit.installed():
        part = flat.parts[index]
        view = flat.home(index)
        if part.requires_grad and not flat.trains:
            raise ValueError(
                f"parameter {name!r} was frozen when the model was wrapped, so there is no room for its gradient: "
                "freeze it after wrapping instead"
            )
        if len(part._backward_hooks or ()) > 1:
            raise ValueError(
                f"parameter {name!r} has a hook from register_hook(), which autograd would not call: it computes "
                "the gradient of the whole parameter. Use register_post_accumulate_grad_hook(), which is called "
                "when p.grad is the average"
            )
        if shown is part and part.shape == view.shape and part.dtype == view.dtype:
            if part.data_ptr() != view.data_ptr() and part.numel():
                with torch.no_grad():
                    view.copy_(part)
                part.data = view
            continue
        expected = "this rank's part" if view.numel() < flat.layout.numels[index] else "the whole parameter"
        got = "nothing" if shown is None else f"{shown.dtype} {list(shown.shape)}"
        what = "was replaced or changed" if shown is not part else "was changed in shape or dtype"
        raise ValueError(
            f"parameter {name!r} {what} after wrapping: expected {expected}, {view.dtype} "
            f"{list(view.shape)}, got {got}. Change values in place under torch.no_grad(), or change the model "
            "before it is wrapped"
        )
