"""Parameters that several stages have in common, such as an embedding that is also the output layer.

Each rank has a copy. They begin with the same values, and their gradients are summed after backward, so that
optimizers that do the same keep them the same. A rank that has several of the stages has one copy for all of them,
or, where a wrapper has divided each stage's parameters among its ranks, a part of each: those are copies, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..backends import Backend, all_gather_object
from ..collectives.divided_parameters import elements_of
from ..groups.world import ProcessGroup

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
    """A parameter of this rank that is elsewhere as well.

    Attributes:
        copies: This rank's; more than one where they are parts.
        backend: Of the ranks that have it; None if there is no other.
        complete: Whether its gradient is the sum over all copies.
    """

    copies: list[nn.Parameter]
    backend: Backend | None
    complete: bool = True

    def begin(self) -> Tensor | None:
        """Set the gradient aside if it is a sum already; return it; local."""
        gradient = self.copies[0].grad if self.complete else None
        kept = None if gradient is None else gradient.clone()
        if gradient is not None:
            for copy in self.copies:
                _gradient_of(copy).zero_()
        return kept

    def sum(self, before: Tensor | None) -> None:
        """Sum the gradients of all copies and add what was set aside; collective over the ranks that have it."""
        total, *others = [_gradient_of(copy) for copy in self.copies]
        for other in others:
            total += other
        if self.backend is not None:
            self.backend.all_reduce(total)
        if before is not None:
            total += before
        for other in others:
            other.copy_(total)
        self.complete = True


class Ties:
    """The ties of a pipeline, as one rank sees them; made collectively over its group.

    Args:
        ties: The same on all ranks.
        placement: The rank of each stage.
        modules: This rank's stages.
        group: Of the pipeline.

    Attributes:
        elsewhere: Parameters of this rank that count as another one, whose stage comes first.

    Raises:
        ValueError: Stages have different parts of a parameter; on all ranks.
    """

    def __init__(
        self, ties: Sequence[Tie], placement: Sequence[int], modules: Mapping[int, nn.Module], group: ProcessGroup
    ) -> None:
        self._shared: list[_Shared] = []
        self.elsewhere: set[int] = set()
        ordered = sorted(tuple(sorted(tie)) for tie in ties)
        own = [_copies([place for place in tie if placement[place[0]] == group.rank], modules) for tie in ordered]
        _check_parts(ordered, own, group)
        for tie, copies in zip(ordered, own, strict=True):
            ranks = sorted({placement[stage] for stage, _ in tie})
            backend = group.private(ranks) if len(ranks) > 1 else None
            if not copies or (backend is None and len(copies) == 1):
                continue
            first = ranks.index(placement[tie[0][0]])
            _unify(copies, backend, first)
            self._shared.append(_Shared(copies, backend))
            owns = backend is None or backend.rank == first
            self.elsewhere |= {id(copy) for copy in copies[1 if owns else 0 :]}

    def begin(self) -> list[Tensor | None]:
        """Set aside the gradients that are sums already; return them; local."""
        return [shared.begin() for shared in self._shared]

    def sum(self, kept: Sequence[Tensor | None]) -> None:
        """Sum the gradients over the ranks, and add what was set aside; collective over the ranks of each tie."""
        for shared, before in zip(self._shared, kept, strict=True):
            shared.sum(before)

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


def _copies(places: Sequence[Place], modules: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    """Return this rank's copies of a parameter: a single object, if they are whole."""
    found = {stage: dict(modules[stage].named_parameters(remove_duplicate=False)) for stage, _ in places}
    copies = [found[stage][name] for stage, name in places]
    if any(elements_of(copy) is not None for copy in copies):
        return copies
    for (stage, name), copy in zip(places, copies, strict=True):
        owner, _, own_name = name.rpartition(".")
        if copy is not copies[0]:
            setattr(modules[stage].get_submodule(owner), own_name, copies[0])
    return copies[:1]


def _check_parts(ties: Sequence[Tie], own: Sequence[Sequence[nn.Parameter]], group: ProcessGroup) -> None:
    """Raise on all ranks where a tie's places have parts of different elements; collective if there are ties."""
    if not ties or group.size == 1:
        gathered = [[[elements_of(copy) for copy in copies] for copies in own]]
    else:
        backend = group.private()
        assert backend is not None
        gathered = all_gather_object(backend, [[elements_of(copy) for copy in copies] for copies in own])
    for number, tie in enumerate(ties):
        parts = {part for of_rank in gathered for part in of_rank[number]}
        if len(parts) > 1:
            places = " and ".join(f"{name!r} of stage {stage}" for stage, name in tie)
            raise ValueError(
                f"ties: {places} are divided among their ranks in different ways, so that parts of them do not "
                "belong together; wrap all of these stages, with units= that make each of these modules a unit"
            )


@torch.no_grad()
def _unify(copies: Sequence[nn.Parameter], backend: Backend | None, first: int) -> None:
    """Give all copies the values of the first one; collective over the ranks that have it."""
    if backend is not None:
        backend.broadcast(copies[0].data, first)
    for copy in copies[1:]:
        copy.copy_(copies[0])


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient, zeros if there is none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
