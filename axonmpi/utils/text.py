"""Ranks in words, as messages name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["lines_of_ranks", "name_ranks", "ranks_by_text", "text_of_problems"]


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 2" or "ranks 0, 2"; local."""
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))}"


def ranks_by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that have each text, the text of the lowest rank first; local.

    Args:
        texts: By rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks_of.setdefault(texts[rank], []).append(rank)
    return ranks_of


def lines_of_ranks(ranks_of: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return an indented line for each text, which names its ranks; local."""
    return "\n  ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in ranks_of)


def text_of_problems(problems: Sequence[str]) -> str:
    """Return what to raise on all ranks; empty if no rank has a problem; local.

    Args:
        problems: One a rank, empty where a rank has none.

    Returns:
        The problem itself where all ranks have the same one, else a line for each, which names its ranks.
    """
    found = ranks_by_text({rank: problem for rank, problem in enumerate(problems) if problem})
    if len(set(problems)) == 1:
        return problems[0]
    return "\n".join(f"{name_ranks(ranks)}: {problem}" for problem, ranks in found.items())
