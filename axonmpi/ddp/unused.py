"""What is said about parameters without a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from ..utils.text import name_ranks

__all__ = ["unused_message"]

_NAMED_PARAMETERS = 10
"""How many parameters an error lists before it only counts."""


def unused_message(names_of: Sequence[Sequence[str]]) -> str:
    """Name the parameters without a gradient, and the ranks, as an error says it.

    Args:
        names_of: The names on each rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, names in enumerate(names_of):
        for name in names:
            ranks_of.setdefault(name, []).append(rank)
    listed = [f"{name} ({name_ranks(ranks)})" for name, ranks in ranks_of.items()][:_NAMED_PARAMETERS]
    more = len(ranks_of) - len(listed)
    return (
        f"{len(ranks_of)} parameter{'s' if len(ranks_of) > 1 else ''} got no gradient in this backward: "
        f"{', '.join(listed)}{f' and {more} more' if more else ''}. Use every parameter in every forward, freeze "
        "those that are not trained with requires_grad_(False), or wrap with find_unused_parameters=True."
    )
