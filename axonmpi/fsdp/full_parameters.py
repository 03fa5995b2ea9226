"""Whole parameters for the user: a copy on every rank.

    gather      parts show whole parameters, copies of this rank's own
    forward     computes with the shards, as always, once they have what was changed in the copies
    step        parts show the shards while an optimizer steps, and are whole again after it
    reshard     parts show the shards

The parameters are the same objects all the time: an optimizer has them, whenever it was built.
"""

from __future__ import annotations

import torch

from ..collectives.agreement import raised_on_all
from .runtime import Run

__all__ = ["GatheredByHand"]


class GatheredByHand:
    """Shows every rank a copy of all parameters, whole, until `end`; collective.

    Args:
        run: Runs the model.
        writeback: Whether changes of the copies are taken over, by each rank those of its part.

    Attributes:
        shown: Whether the parameters are whole now.

    Raises:
        ValueError: Parameters are gathered already, or a forward is going on.
    """

    def __init__(self, run: Run, *, writeback: bool = True) -> None:
        if run.by_hand is not None or run.depth:
            raise ValueError(
                "parameters are gathered already: within full_parameters(), after "
                "gather_parameters(), or in a forward"
            )
        self._run = run
        self._flats = [flat for unit in run.units for flat in unit.flats]
        self._writeback = writeback
        self.shown = False
        run.barrier()  # nobody computes any more
        run.take_changes()
        self.show()
        run.by_hand = self

    @torch.no_grad()
    def show(self) -> None:
        """Show whole parameters; collective."""
        self._run.barrier()  # all changes of the shards are made
        for flat in self._flats:
            flat.show([flat.whole(index) for index in range(len(flat.members))])
        self.shown = True

    @torch.no_grad()
    def write(self) -> None:
        """Take over what was changed in whole parameters, if they are shown; collective.

        Raises:
            ValueError: There are changes, which are to be dropped; on all ranks.
        """
        if not self.shown:
            return
        if not self._writeback:
            self._check_unchanged()
            return
        self._run.barrier()  # nobody reads the shards any more
        for flat in self._flats:
            for _, own, new in flat.changed():
                own.copy_(new)

    def _check_unchanged(self) -> None:
        """Raise on all ranks if there are changes, which one rank alone may see in its part; collective."""
        with raised_on_all(self._run.group.backend):
            for flat in self._flats:
                for index, *_ in flat.changed():
                    raise ValueError(
                        f"parameter {flat.members[index].name!r} was changed within "
                        "full_parameters(writeback=False), which drops changes: leave the block first, use "
                        "writeback=True, or compute under torch.no_grad()"
                    )

    def hide(self) -> None:
        """Show the parts, with this rank's part of what the whole parameters have become; collective."""
        self._run.take_changes()
        self._show_shards()

    def end(self) -> None:
        """Show the parts for good; collective."""
        try:
            if self._writeback:
                self._run.take_changes()
            else:
                self._run.barrier()  # nobody copies from the shards any more
        finally:
            self._show_shards()
            self._run.by_hand = None

    def _show_shards(self) -> None:
        self.shown = False
        for flat in self._flats:
            flat.show(None)
