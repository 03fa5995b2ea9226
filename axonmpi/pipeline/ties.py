"""Parameters that several stages share, such as an embedding that is also the output layer.

Each rank has a copy. All copies begin with the same values, and their gradients are summed after backward, so that
equal optimizers keep them equal. A rank with several of the stages has one copy for all of them. If a wrapper such
as FSDP has sharded each stage's parameters, it has a shard for each stage: shards are copies, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..across_ranks.sharded_parameters import slice_of
from ..backends import Backend, all_gather_object
from ..groups.process_group import ProcessGroup

Tie = tuple[tuple[int, str], ...]
"""The stages that share one parameter, each with the parameter's name in it."""


def shared_parameters(modules: Sequence[nn.Module | None]) -> list[Tie]:
    """Find the parameters that are the same object in several stages; local."""
    names: dict[int, dict[int, str]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in () if module is None else module.named_parameters():
            names.setdefault(id(parameter), {}).setdefault(stage, name)
    return [tuple(found.items()) for found in names.values() if len(found) > 1]


class TiedParameter:
    """A parameter of this rank with other copies; made collectively by the ranks with copies.

    Args:
        copies: This rank's copies; more than one if they are shards.
        backend: Of the ranks with copies; None for one rank.
        first: The rank in it whose values all copies get.

    Attributes:
        elsewhere: Ids of this rank's copies that do not count in a norm; one copy on the first rank counts.
    """

    def __init__(self, copies: Sequence[nn.Parameter], backend: Backend | None, first: int) -> None:
        self._copies = copies
        self._backend = backend
        self._first = first
        self._is_summed = True
        self._before: Tensor | None = None
        counts_here = backend is None or backend.rank == first
        self.elsewhere = {id(copy) for copy in copies[1 if counts_here else 0 :]}
        self.spread()

    @torch.no_grad()
    def spread(self) -> None:
        """Copy the first copy's values to all copies; collective over their ranks."""
        if self._backend is not None:
            self._backend.broadcast(self._copies[0].data, self._first)
        for copy in self._copies[1:]:
            copy.copy_(self._copies[0])

    def begin(self) -> None:
        """Set the gradient aside if it is already a sum of all copies, from an earlier step; local."""
        self._before = None
        if self._is_summed and self._copies[0].grad is not None:
            self._before = self._copies[0].grad.clone()
            for copy in self._copies:
                _gradient_of(copy).zero_()

    def sum(self) -> None:
        """Sum the gradients of all copies and add the gradient set aside; collective over their ranks."""
        total, *others = [_gradient_of(copy) for copy in self._copies]
        for other in others:
            total += other
        if self._backend is not None:
            self._backend.all_reduce(total.as_subclass(Tensor))
        if self._before is not None:
            total += self._before
        for other in others:
            other.copy_(total)
        self._is_summed, self._before = True, None

    def leave(self) -> None:
        """Leave the gradients unsummed; local.

        Raises:
            ValueError: A sum was set aside, to which nothing can be added.
        """
        if self._before is not None and self._before.any():
            raise ValueError(
                "no_sync(): a tied parameter has the summed gradient of an earlier step; call zero_grad() first"
            )
        self._is_summed, self._before = False, None


def tie_parameters(
    ties: Sequence[Tie],
    placement: Sequence[int],
    modules: Mapping[int, nn.Module],
    group: ProcessGroup,
    backend: Backend,
) -> list[TiedParameter]:
    """Give all copies of tied parameters the same values; collective.

    Args:
        ties: The same on all ranks.
        placement: The rank of each stage.
        modules: This rank's stages.
        group: Of the pipeline.
        backend: Of the pipeline's own messages.

    Returns:
        The tied parameters of this rank.

    Raises:
        ValueError: Stages have different shards of a parameter; on all ranks.
    """
    made = []
    ordered = sorted(tuple(sorted(tie)) for tie in ties)
    own = [_copies([(stage, name) for stage, name in tie if stage in modules], modules) for tie in ordered]
    _check_parts(ordered, own, backend)
    for tie, copies in zip(ordered, own, strict=True):
        ranks = sorted({placement[stage] for stage, _ in tie})
        private = group.private(ranks) if len(ranks) > 1 else None
        if len(copies) > 1 or (copies and private is not None):
            made.append(TiedParameter(copies, private, ranks.index(placement[tie[0][0]])))
    return made


def _copies(names: Sequence[tuple[int, str]], modules: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    """Return this rank's copies of a parameter: one object, unless they are shards."""
    copies = [dict(modules[stage].named_parameters(remove_duplicate=False))[name] for stage, name in names]
    if any(slice_of(copy) is not None for copy in copies):
        return copies
    for (stage, name), copy in zip(names, copies, strict=True):
        owner, _, own_name = name.rpartition(".")
        if copy is not copies[0]:
            setattr(modules[stage].get_submodule(owner), own_name, copies[0])
    return copies[:1]


def _check_parts(ties: Sequence[Tie], own: Sequence[Sequence[nn.Parameter]], backend: Backend) -> None:
    """Raise on all ranks if the copies of a parameter are shards of different elements; collective."""
    of_all = all_gather_object(backend, [{slice_of(copy) for copy in copies} for copies in own])
    for tie, *parts in zip(ties, *of_all, strict=True):
        if len(set().union(*parts)) > 1:
            names = " and ".join(f"{name!r} of stage {stage}" for stage, name in tie)
            raise ValueError(
                f"ties: {names} are divided among their ranks in different ways, so that parts of them do not "
                "belong together; wrap all of these stages, with units= that make each of these modules a unit"
            )


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient, zeros if there is none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
