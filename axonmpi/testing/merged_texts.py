"""One text from the texts of several ranks.

    rank 0: "boom"                       ranks 0, 2: boom
    rank 1: "assert 1 == 2"      ->      rank 1: assert 1 == 2
    rank 2: "boom"

Ranks with the same text are named together, once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..utils.text import name_ranks, ranks_by_text

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def group_by_text(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Group ranks whose texts differ in memory addresses at most, in order of their lowest rank; local."""
    groups = ranks_by_text({rank: _ADDRESS.sub("0x", text) for rank, text in texts.items()})
    return [(ranks, texts[ranks[0]]) for ranks in groups.values()]


def merge_texts(texts: Mapping[int, str], title: str = "") -> str:
    """Return each different text once, under a line that names its ranks; local."""
    return "\n".join(
        f"---- {title}{name_ranks(ranks)} ----\n{text.rstrip()}" for ranks, text in group_by_text(texts)
    )
