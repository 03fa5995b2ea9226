"""Full parameters for the user: a copy on every rank.

    gather      sharded parameters show full ones, copies of this rank's own
    forward     computes with the shards, as always, once they have what was changed in the copies
    step        parameters show the shards while an optimizer steps, and the copies again after it
    reshard     parameters show the shards

The parameters are the same objects all the time: an optimizer has them, whenever it was built.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives.agreement import raised_on_all
from .flat_parameter import FlatParameter

__all__ = ["FullParameters"]


class FullParameters:
    """Lets sharded parameters show copies of the full ones.

    Args:
        flats: The parameters of a model; there is one at least.
        writeback: Whether changes of the copies are taken over, by each rank those of its part.

    Attributes:
        writeback: The same.
        shown: Whether the copies are shown now.
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
            whole = parameter.flat.whole(parameter)
            assert whole is not None
            parameter.show(whole.to(parameter.flat.place))  # modules compute with it
        self.shown = True

    def hide(self) -> None:
        """Show this rank's parts again; local."""
        self.shown = False
        for parameter in self._parameters:
            parameter.show(None)

    @torch.no_grad()
    def take_changes(self) -> None:
        """Take over changes of the copies, if they are shown; collective.

        Raises:
            ValueError: There are changes, which are to be dropped; on all ranks.
        """
        if not self.shown:
            return
        changed = ((parameter, new) for parameter in self._parameters if (new := parameter.changed()) is not None)
        if self.writeback:
            self._group.barrier()  # nobody reads the shards any more
            for parameter, new in changed:
                parameter.own.copy_(new)
            return
        with raised_on_all(self._group.backend):  # one rank alone may see it in its part
            for parameter, _ in changed:
                raise ValueError(
                    f"parameter {parameter.name!r} was changed within full_parameters(writeback=False), which "
                    "drops changes: leave the block first, use writeback=True, or compute under torch.no_grad()"
                )
