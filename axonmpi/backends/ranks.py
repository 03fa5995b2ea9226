"""Ranks and ordered sets of ranks: checks, and arrays instead of objects, since a group can have many thousands."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..utils.arguments import hint
from ..utils.text import listed


class Parts:
    """Disjoint ordered sets of the ranks of a group.

    Args:
        ranks: [ranks] int32 the ranks of all parts, one part after the other.
        stops: [parts] int64 the end of each part in `ranks`.

    Attributes:
        ranks: The same.
        key: A fingerprint, the same in every process.
    """

    def __init__(self, ranks: NDArray[np.int32], stops: NDArray[np.int64]) -> None:
        self.ranks = ranks
        self._stops = stops
        content = np.concatenate([[len(stops)], stops, ranks])
        self.key = int.from_bytes(hashlib.blake2b(content.tobytes(), digest_size=8).digest(), "little")

    @classmethod
    def single(cls, ranks: NDArray[np.int32]) -> Parts:
        """Make one part of some ranks of a group; local."""
        return cls(ranks, np.array([len(ranks)]))

    def __len__(self) -> int:
        return len(self._stops)

    def __getitem__(self, number: int) -> tuple[int, ...]:
        return tuple(self.array(number).tolist())

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parts) and self.key == other.key

    def __hash__(self) -> int:
        return self.key

    def array(self, number: int) -> NDArray[np.int32]:
        """Return the ranks of a part, in order; local."""
        return self.ranks[self._stops[number - 1] if number else 0 : self._stops[number]]

    def find(self, rank: int) -> tuple[int, int] | None:
        """Return the number of the part that has a rank and the rank's place in it, None if none has it; local."""
        at = np.flatnonzero(self.ranks == rank)
        if not len(at):
            return None
        number = int(np.searchsorted(self._stops, at[0], side="right"))
        return number, int(at[0] - (self._stops[number - 1] if number else 0))


def integer_array(values: Iterable[object], check: Callable[[object], object]) -> NDArray[np.integer]:
    """Return integers as a new array; local.

    Args:
        values: The integers.
        check: Called for each value, unless all are plain integers: raises if it is none.
    """
    if isinstance(values, range):
        return np.arange(values.start, values.stop, values.step)
    if isinstance(values, np.ndarray):
        if values.ndim == 1 and values.dtype.kind == "i":
            copied: NDArray[np.integer] = values.copy()
            return copied
        values = values.tolist()
    plain: list[Any] = list(values)
    if not set(map(type, plain)) <= {int}:
        for value in plain:
            check(value)
        plain = list(map(operator.index, plain))
    return np.array(plain) if plain else np.empty(0, np.int64)


def check_rank(rank: object, what: str, size: int) -> None:
    """Raise unless `rank` is a rank of a group of `size`."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{what}: expected a rank of the group as an int, got {rank!r}{hint(rank)}")
    if not 0 <= rank < size:
        raise ValueError(f"{what}: expected a rank of the group, 0 to {size - 1}, got {rank}")


def check_ranks(ranks: Iterable[int], size: int) -> NDArray[np.int32]:
    """Check an ordered set of ranks of a group of `size` and return it as an array."""
    _check_given(ranks)
    chosen = _in_group(ranks, size)
    check_different(chosen)
    return chosen


def check_different(ranks: NDArray[np.integer]) -> None:
    """Raise if a rank is named twice."""
    if not np.diff(np.sort(ranks)).all():
        raise ValueError(f"ranks: expected different ranks, got {listed(ranks.tolist())}")


def check_parts(parts: Iterable[Iterable[int]] | Parts, size: int) -> Parts:
    """Check disjoint sets that all ranks of a group of `size` are divided into and return them as arrays."""
    if isinstance(parts, Parts):
        return parts  # they were checked when they were made
    if not isinstance(parts, Iterable):
        raise TypeError(f"parts: expected a list of lists of ranks, got {parts!r}")
    ranks: Iterable[int]
    if isinstance(parts, np.ndarray) and parts.ndim == 2:
        ranks, lengths, given = parts.reshape(-1), [parts.shape[1]] * len(parts), list(parts[:1])
    else:
        given = [part if isinstance(part, np.ndarray) else list(_check_given(part)) for part in parts]
        lengths = list(map(len, given))
        ranks = list(chain.from_iterable(part.tolist() if isinstance(part, np.ndarray) else part for part in given))
    if 0 in lengths:
        raise ValueError("ranks: expected at least one rank, got none")
    chosen = _in_group(ranks, size) if len(ranks) else np.empty(0, np.int32)
    times = np.bincount(chosen, minlength=size)
    if (wrong := np.flatnonzero(times != 1)).size:
        for part in given:
            check_ranks(part, size)
        raise ValueError(
            f"parts: expected every rank of the group in one of them, got rank {wrong[0]} in {times[wrong[0]]}"
        )
    return Parts(chosen, np.cumsum(lengths))


def _check_given(ranks: object) -> Iterable[int]:
    if not isinstance(ranks, Iterable):
        raise TypeError(f"ranks: expected a list of ranks, got {ranks!r}")
    return ranks


def _in_group(ranks: Iterable[int], size: int) -> NDArray[np.int32]:
    chosen = integer_array(ranks, lambda rank: check_rank(rank, "ranks", size))
    if not len(chosen):
        raise ValueError("ranks: expected at least one rank, got none")
    outside = (chosen < 0) | (chosen >= size)
    if outside.any():
        check_rank(int(chosen[outside][0]), "ranks", size)
    return chosen.astype(np.int32)
