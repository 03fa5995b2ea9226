"""Whole parameters for the user: a copy on every rank (layer 5)."""

from __future__ import annotations

import torch
from torch import nn

from .run import Run

__all__ = ["GatheredByHand"]


class GatheredByHand:
    """Shows every rank a copy of all parameters, whole, until `end`; collective.

    Args:
        run: Runs the model.

    Raises:
        ValueError: Parameters are gathered already, or a forward is going on.
    """

    def __init__(self, run: Run) -> None:
        if run.by_hand or run.depth:
            raise ValueError(
                "parameters are gathered already: within full_parameters(), after "
                "gather_parameters(), or in a forward"
            )
        self._run = run
        self._wholes: list[list[list[nn.Parameter]]] = []
        run.barrier()  # all changes of the shards are made
        for unit in run.units:
            wholes = []
            for flat in unit.flats:
                values = [flat.whole(index) for index in range(len(flat.members))]
                wholes.append(
                    [
                        nn.Parameter(v, requires_grad=p.requires_grad)
                        for v, p in zip(values, flat.parts, strict=True)
                    ]
                )
            unit.install(wholes)
            self._wholes.append(wholes)
        run.by_hand = True

    @torch.no_grad()
    def end(self, *, writeback: bool) -> None:
        """Show the parts again, with this rank's part of what the whole parameters have become; collective."""
        run = self._run
        run.by_hand = False
        run.barrier()  # nobody copies from the shards any more
        for unit, wholes in zip(run.units, self._wholes, strict=True):
            for flat, own in zip(unit.flats, wholes, strict=True):
                for index, (part, whole) in enumerate(zip(flat.parts, own, strict=True)):
                    first, last = flat.layout.part(index, flat.group.rank)
                    if writeback and part.numel():
                        part.copy_(whole.reshape(-1)[first:last].view(part.shape))
            unit.install_parts()
        self._wholes = []
