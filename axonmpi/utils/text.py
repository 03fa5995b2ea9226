"""Ranks in words, as messages name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["lines_of_ranks", "name_ranks", "ranks_by_text"]


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 2" or "ranks 0, 2"; local."""
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))}"


def ranks_by_text(texts: Sequence[str]) -> dict[str, list[int]]:
    """Return which ranks said each text, those of the lowest rank first; local.

    Args:
        texts: One a rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    return ranks_of


def lines_of_ranks(ranks_of: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return an indented line for each text, which names the ranks that it is of; local."""
    return "\n  ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in ranks_of)
