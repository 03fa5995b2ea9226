"""Parameters that several stages have in common, such as an embedding that is also the output layer (layer 5).

Each rank has a copy. They begin with the same values, and their gradients are summed after backward, so that
optimizers that do the same keep them the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..backends.base import Backend
from ..group import ProcessGroup

__all__ = ["Tie", "Ties", "shared_parameters"]

Place = tuple[int, str]
"""A stage and the name of a parameter in it."""
Tie = tuple[Place, ...]
"""The places of one parameter."""


def shared_parameters(modules: Sequence[nn.Module | None]) -> list[Tie]:
    """Find the parameters that are the same object in several stages; local."""
    places: dict[int, dict[int, str]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in () if module is None else module.named_parameters():
            places.setdefault(id(parameter), {}).setdefault(stage, name)
    return [tuple(found.items()) for found in places.values() if len(found) > 1]


@dataclass
class _Shared:
    """A parameter of this rank that others have as well.

    Attributes:
        parameter: The copy.
        backend: Of the ranks that have it.
        complete: Whether its gradient is the sum over all of them.
    """

    parameter: nn.Parameter
    backend: Backend
    complete: bool = True


class Ties:
    """The ties of a pipeline, as one rank sees them; made collectively over its group.

    Args:
        ties: The same on all ranks.
        placement: The rank of each stage.
        modules: This rank's stages.
        group: Of the pipeline.

    Attributes:
        elsewhere: Parameters of this rank that count on another rank, whose stage comes first.
    """

    def __init__(
        self, ties: Sequence[Tie], placement: Sequence[int], modules: Mapping[int, nn.Module], group: ProcessGroup
    ) -> None:
        self._shared: list[_Shared] = []
        self.elsewhere: set[int] = set()
        for tie in sorted(ties):
            own = [place for place in tie if placement[place[0]] == group.rank]
            parameter = _unite(own, modules)
            ranks = sorted({placement[stage] for stage, _ in tie})
            if len(ranks) == 1:
                continue
            backend = group.private(ranks)
            if backend is None or parameter is None:
                continue
            first = ranks.index(placement[min(tie)[0]])
            with torch.no_grad():
                backend.broadcast(parameter.data, first)
            self._shared.append(_Shared(parameter, backend))
            if backend.rank != first:
                self.elsewhere.add(id(parameter))

    def begin(self) -> list[Tensor | None]:
        """Set aside the gradients that are sums already; return them; local."""
        kept: list[Tensor | None] = []
        for shared in self._shared:
            gradient = shared.parameter.grad if shared.complete else None
            kept.append(None if gradient is None else gradient.clone())
            if gradient is not None:
                gradient.zero_()
        return kept

    def sum(self, kept: Sequence[Tensor | None]) -> None:
        """Sum the gradients over the ranks, and add what was set aside; collective over the ranks of each tie."""
        for shared, before in zip(self._shared, kept, strict=True):
            if shared.parameter.grad is None:
                shared.parameter.grad = torch.zeros_like(shared.parameter)
            shared.backend.all_reduce(shared.parameter.grad)
            shared.complete = True
            if before is not None:
                shared.parameter.grad += before

    def leave(self, kept: Sequence[Tensor | None]) -> None:
        """Leave the gradients unsummed; local.

        Raises:
            ValueError: There are sums among them, to which nothing can be added.
        """
        for shared, before in zip(self._shared, kept, strict=True):
            if before is not None and before.any():
                raise ValueError(
                    "no_sync(): a tied parameter has the summed gradient of an earlier step; call zero_grad() first"
                )
            shared.complete = False


def _unite(places: Sequence[Place], modules: Mapping[int, nn.Module]) -> nn.Parameter | None:
    """Make the copies of a parameter on this rank one object; return it."""
    first: nn.Parameter | None = None
    for stage, name in places:
        owner_name, _, own_name = name.rpartition(".")
        owner = modules[stage].get_submodule(owner_name)
        if first is None:
            first = getattr(owner, own_name)
        else:
            setattr(owner, own_name, first)
    return first
