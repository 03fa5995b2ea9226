"""Rows of a tensor that ranks have in parts: the rank that has a row, and the rows that ranks send each other.

    parts of 3, 3 and 2 rows        0 1 2 | 3 4 5 | 6 7
    rank 1 needs rows 2 to 7        row 2 of rank 0, its own, row 0 of rank 2
    "circular", rows -1 to 3        row 1 of rank 2, then rank 0's
    "reflect", rows -2 to 3         rows 2 and 1 of rank 0, then rows 0 to 2
    "replicate", rows -1 to 3       row 0 of rank 0 twice, then rows 1 and 2

All ranks make the same plan of the same numbers, without communication. A plan moves rows to the ranks that need
them; transposed, it returns rows, which are added to those of their owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, get_args

Mode = Literal["zeros", "circular", "reflect", "replicate"]
"""Rows beyond the ends: a constant, those of the other end, mirrored ones, the last one repeated."""
MODES: tuple[str, ...] = get_args(Mode)


class Run(NamedTuple):
    """Rows that follow each other in an owner's part and in a result.

    Attributes:
        owner: The rank that has them.
        start: The first of them in the owner's part.
        stop: The end of them there.
        at: The first of them in the result.
    """

    owner: int
    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.stop - self.start


class Piece(NamedTuple):
    """Rows among those that a rank shows to the others.

    Attributes:
        source: The rank that shows them.
        start: The first of them, counted over all rows that it shows.
        stop: The end of them.
    """

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class Exchange:
    """One exchange of rows; the same on all ranks.

    Attributes:
        shown: [ranks] how many rows each rank shows.
        wanted: [ranks] the pieces that each rank takes, none of its own.
    """

    shown: tuple[int, ...]
    wanted: tuple[tuple[Piece, ...], ...]

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """All of its numbers: exchanges with the same ones are the same."""
        of_pieces = ((rank, *piece) for rank, pieces in enumerate(self.wanted) for piece in pieces)
        return (*self.shown, *(number for numbers in of_pieces for number in numbers))

    def scaled(self, count: int) -> Exchange:
        """Return the exchange in which each row is `count` rows."""
        wanted = tuple(
            tuple(Piece(source, low * count, high * count) for source, low, high in pieces)
            for pieces in self.wanted
        )
        return Exchange(tuple(rows * count for rows in self.shown), wanted)


@dataclass(frozen=True)
class RowPlan:
    """Who gets which rows of whom.

    Attributes:
        sizes: [ranks] rows of each rank's part.
        ranges: [ranks] first row and end of each rank's result; may lie beyond the ends.
        mode: Rows beyond the ends.
        runs: [ranks] the rows of each result that some rank has, in the order of the result.
    """

    sizes: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    mode: str
    runs: tuple[tuple[Run, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        runs = tuple(_runs(self.sizes, start, stop, self.mode) for start, stop in self.ranges)
        object.__setattr__(self, "runs", runs)

    def rows(self, rank: int) -> int:
        """Return the number of rows of a rank's result."""
        start, stop = self.ranges[rank]
        return stop - start

    def foreign(self, rank: int) -> list[Run]:
        """Return the runs of a rank's result that others have."""
        return [run for run in self.runs[rank] if run.owner != rank]

    def own(self, rank: int) -> list[Run]:
        """Return the runs of a rank's result that are its own."""
        return [run for run in self.runs[rank] if run.owner == rank]

    def beyond(self, rank: int) -> list[tuple[int, int]]:
        """Return the rows of a rank's result that no rank has: the first of each range, and its end."""
        edges = [0, *(edge for run in self.runs[rank] for edge in (run.at, run.at + run.size))]
        pairs = zip(edges[::2], [*edges[1::2], self.rows(rank)], strict=True)
        return [(low, high) for low, high in pairs if low < high]

    @cached_property
    def edges(self) -> RowPlan:
        """The plan by which each rank gets the same rows without its own ones; the exchanges are the same."""
        plan, ranges, runs = copy(self), [], []
        for rank, (start, stop) in enumerate(self.ranges):
            left, own = [], 0
            for run in self.runs[rank]:
                if run.owner == rank:
                    own += run.size
                else:
                    left.append(run._replace(at=run.at - own))
            ranges.append((start, stop - own))
            runs.append(tuple(left))
        object.__setattr__(plan, "ranges", tuple(ranges))
        object.__setattr__(plan, "runs", tuple(runs))
        return plan

    @cached_property
    def shown(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """[ranks] the rows of each part that others need, as ranges that neither overlap nor touch."""
        needed: list[list[tuple[int, int]]] = [[] for _ in self.sizes]
        for rank in range(len(self.sizes)):
            for run in self.foreign(rank):
                needed[run.owner].append((run.start, run.stop))
        return tuple(_joined(ranges) for ranges in needed)

    @cached_property
    def forward(self) -> Exchange:
        """Owners show rows, each once however many ranks need it."""
        starts = [_starts(ranges) for ranges in self.shown]

        def piece(run: Run) -> Piece:
            index = max(i for i, (low, _) in enumerate(self.shown[run.owner]) if low <= run.start)
            at = starts[run.owner][index] + run.start - self.shown[run.owner][index][0]
            return Piece(run.owner, at, at + run.size)

        ranks = range(len(self.sizes))
        shown = tuple(sum(high - low for low, high in ranges) for ranges in self.shown)
        return Exchange(shown, tuple(tuple(map(piece, self.foreign(rank))) for rank in ranks))

    @cached_property
    def transposed(self) -> Exchange:
        """Ranks show the rows that they return, and owners take these, in the order of the ranks."""
        ranks = range(len(self.sizes))
        wanted: list[list[Piece]] = [[] for _ in ranks]
        shown = []
        for rank in ranks:
            at = 0
            for run in self.foreign(rank):
                stop = at + run.size
                wanted[run.owner].append(Piece(rank, at, stop))
                at = stop
            shown.append(at)
        return Exchange(tuple(shown), tuple(map(tuple, wanted)))

    def returned(self, rank: int) -> list[Run]:
        """Return the runs of other ranks' results that are rows of this rank's part, in the order of the ranks."""
        others = (other for other in range(len(self.sizes)) if other != rank)
        return [run for other in others for run in self.runs[other] if run.owner == rank]


@lru_cache(maxsize=1024)
def row_plan(sizes: tuple[int, ...], ranges: tuple[tuple[int, int], ...], mode: str) -> RowPlan:
    """Return the plan by which each rank gets a range of rows.

    Args:
        sizes: [ranks] rows of each rank's part.
        ranges: [ranks] first row and end of each rank's result; may lie beyond the ends.
        mode: One of `MODES`.

    Raises:
        ValueError: There is no row at all, and `mode` would repeat one.
    """
    return RowPlan(sizes, ranges, mode)


def _runs(sizes: Sequence[int], start: int, stop: int, mode: str) -> tuple[Run, ...]:
    """Return the runs of the rows `start` to `stop` of the whole."""
    total, first = sum(sizes), [0, *accumulate(sizes)]
    low, high = min(max(start, 0), total), min(max(stop, 0), total)
    if mode != "zeros" and not total and start < stop:
        raise ValueError(f"mode: expected 'zeros' for a tensor without rows, got {mode!r}")
    spans: list[list[int]] = []  # row of the whole, its end, row of the result
    if mode != "zeros":
        _add_spans(spans, range(start, min(stop, 0)), start, total, mode)
    if low < high:
        spans.append([low, high, low - start])
    if mode != "zeros":
        _add_spans(spans, range(max(start, total), stop), start, total, mode)
    return tuple(
        Run(owner, max(row, begin) - begin, min(end, after) - begin, at + max(row, begin) - row)
        for row, end, at in spans
        for owner, (begin, after) in enumerate(pairwise(first))
        if max(row, begin) < min(end, after)
    )


def _add_spans(spans: list[list[int]], rows: Iterable[int], start: int, total: int, mode: str) -> None:
    """Add the rows that stand for rows beyond the ends, those that follow each other as one span."""
    for row in rows:
        source, at = _source(row, total, mode), row - start
        if spans and spans[-1][1] == source and spans[-1][2] + source - spans[-1][0] == at:
            spans[-1][1] = source + 1
        else:
            spans.append([source, source + 1, at])


def _source(row: int, total: int, mode: str) -> int:
    """Return the row that stands for one beyond the ends."""
    if mode == "circular":
        return row % total
    if mode == "replicate" or total == 1:
        return min(max(row, 0), total - 1)
    row %= 2 * (total - 1)
    return min(row, 2 * (total - 1) - row)


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join ranges that overlap or touch."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return tuple(joined)


def _starts(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many rows lie before each range, if they follow each other."""
    return [0, *accumulate(high - low for low, high in ranges)][:-1]
