"""The step of training that each rank is at, compared at the end of each backward.

    rank 0   forward 3 ── backward 3 ─┐
    rank 1   forward 3    forward 4 ── backward 4 ─┐     its gradients would be averaged with those of step 3

At the end of each backward ranks reduce flags to their maxima, which also tell whether all ranks are at one step.
A step is a forward in training whose gradients will be reduced: without `no_grad`, `eval` and `no_sync`. A rank has
left one out if it has begun more forwards than others and some of them had no backward: more forwards may have one
backward in common, and the result of a forward need not be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..backends import at_step
from ..errors import CollectiveMismatchError
from ..groups.process_group import ProcessGroup
from ..utils.text import lines_of_ranks, ranks_by_text

STEP_FLAGS = 4
"""How many flags there are."""
_MOST = 127
"""Flags are bytes: numbers that differ by a multiple of 128 look the same."""


class Steps:
    """Counts the steps of a model on this rank."""

    def __init__(self) -> None:
        self._starts = 0
        self.restart()

    def restart(self) -> None:
        """Count from 1 again, as after training on numbers of batches that differ; local, on all ranks."""
        self._starts += 1
        self._reduced = 0
        self._in_backward = False
        self._begun = 0
        self._waiting = 0  # forwards without a backward so far

    @property
    def number(self) -> int:
        """The step that this rank is at, from 1; 0 before the first."""
        return self._reduced + self._in_backward + self._waiting

    def begin(self) -> Callable[..., None]:
        """Count a forward; return what is to be called when its backward begins, or if there will be none; local.

        `torch.autograd.grad` makes no step: its gradients are this rank's alone.
        """
        self._begun += 1
        self._waiting += 1
        at_step(self)
        is_open, start = True, self._starts

        def end(*, in_backward: bool) -> None:
            nonlocal is_open
            if is_open and start == self._starts:
                self._waiting -= 1
                self._begun -= not in_backward
                self._in_backward |= in_backward
            is_open = False

        return end

    def reduce(self) -> list[int]:
        """Count a backward whose gradients are reduced; return flags for `check`; local."""
        self._reduced += 1
        self._in_backward = False
        own, begun = self.number % (_MOST + 1), self._begun % (_MOST + 1)
        return [own, _MOST - own, begun, _MOST - begun]

    def check(self, flags: Sequence[int], groups: Iterable[ProcessGroup]) -> None:
        """Raise unless all ranks are at the same step; collective if they are not.

        Args:
            flags: The maxima over the ranks of what `reduce` returned, zeros of ranks that have no step to make.
            groups: Whose ranks these are: each rank is in one of each, and together they connect all.

        Raises:
            CollectiveMismatchError: Says which rank is at which step.
        """
        at_step(None)
        if _MOST in (flags[0] + flags[1], flags[2] + flags[3]):
            return
        texts: dict[int, str] = {}
        for group in groups:
            texts = texts or {int(group.members[group.rank]): f"step {self.number}"}
            texts = dict(entry for told in group.all_gather_object(texts) for entry in told.items())
        self.restart()
        raise CollectiveMismatchError(
            "the ranks are at different steps of this model, and the average of their gradients is of no use:\n  "
            + lines_of_ranks(ranks_by_text(texts).items())
            + "\nA rank that is ahead has left out a backward, as by `continue` after a loss that is nan, or has "
            "made a forward of its own. Let all ranks leave a batch out, or none, by a flag that they all_reduce. "
            "A forward of one rank belongs under torch.no_grad(), in eval() or in no_sync()."
        )
