"""The number of a training step, compared at the end of backward to find a rank that has left one out.

    rank 0   forward 3 ── backward 3 ─┐
    rank 1   forward 3    forward 4 ── backward 4 ─┐     its gradients would be averaged with those of step 3

At the end of each backward ranks reduce flags to their maxima, some of which compare the ranks' steps. A step is
a forward in training whose gradients will be reduced: without `no_grad`, `eval` and `no_sync`. A rank has left a
backward out if it has begun more forwards than others and some of them had no backward. Several forwards may
share a backward, and the result of a forward need not be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..backends import at_step
from ..errors import CollectiveMismatchError
from ..groups.process_group import ProcessGroup
from ..utils.text import lines_of_ranks, ranks_by_text

STEP_FLAGS = 4
"""Number of flags that `Steps.reduce` returns."""
_MOST = 127
"""Flags are bytes: numbers that differ by a multiple of 128 look the same."""


class Steps:
    """Counter of a model's training steps on this rank."""

    def __init__(self) -> None:
        self._starts = 0
        self.restart()

    def restart(self) -> None:
        """Count from 1 again, as after training on uneven numbers of batches; local, on all ranks."""
        self._starts += 1
        self._reduced = 0
        self._in_backward = False
        self._begun = 0
        self._waiting = 0  # forwards without a backward so far

    @property
    def number(self) -> int:
        """This rank's step, from 1; 0 before the first."""
        return self._reduced + self._in_backward + self._waiting

    def begin(self) -> Callable[..., None]:
        """Count a forward; local.

        Returns:
            A function to call when its backward begins, with `in_backward=True`; or with False if there will be
            none, or if `torch.autograd.grad` runs, whose gradients are this rank's alone.
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
        """Count a backward with reduced gradients; return flags for `check`; local."""
        self._reduced += 1
        self._in_backward = False
        own, begun = self.number % (_MOST + 1), self._begun % (_MOST + 1)
        return [own, _MOST - own, begun, _MOST - begun]

    def check(self, flags: Sequence[int], groups: Iterable[ProcessGroup]) -> None:
        """Raise unless all ranks are at the same step; collective if they are not.

        Args:
            flags: Maxima over the ranks of the result of `reduce`, or of zeros on ranks without a step.
            groups: Groups of the ranks: an all-gather in each, in turn, reaches every rank.

        Raises:
            CollectiveMismatchError: Names the ranks of each step.
        """
        at_step(None)
        if _MOST in (flags[0] + flags[1], flags[2] + flags[3]):
            return
        texts: dict[int, str] = {}
        for group in groups:
            texts = texts or {int(group.members[group.rank]): f"step {self.number}"}
            for of_rank in group.all_gather_object(texts):
                texts.update(of_rank)
        self.restart()
        raise CollectiveMismatchError(
            "the ranks are at different steps of this model, and the average of their gradients is of no use:\n  "
            + lines_of_ranks(ranks_by_text(texts).items())
            + "\nA rank that is ahead has left out a backward, as by `continue` after a loss that is nan, or has "
            "made a forward of its own. Let all ranks leave a batch out, or none, by a flag that they all_reduce. "
            "A forward of one rank belongs under torch.no_grad(), in eval() or in no_sync()."
        )
