"""`--cases 1/2` and `--cases 1/8`: a share of the cases of tests above the backends.

The parallelism is written once for all backends, and its tests are products of settings and numbers of ranks. A
share is taken of what the session would run without one, so that no parameter decides; tests of what is below
always run.

A half, for mock ranks, has every setting of every test, with half of its numbers of ranks. A smaller share, for
real ranks, has that part of each test's cases. Two neighbours such as 1/8 and 2/8 have every test between them:
both have cases of a test that has several, one of them has a single case. Tests marked `every_count`, whose
settings depend on the number of ranks, are one for each number.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

ABOVE_THE_BACKENDS = ("data", "ddp", "fsdp", "mesh", "pipeline", "tensor", "train")
"""Folders of tests that a share is taken of."""
RANK_COUNT = r"\b\d+ranks?\b"
"""What the harness writes into the name of a case."""


def is_above_backends(item: pytest.Item) -> bool:
    """Say whether a test is of the parallelism that is written once for all backends."""
    return any(folder in Path(item.nodeid.partition("::")[0]).parts for folder in ABOVE_THE_BACKENDS)


def parse(text: str) -> tuple[int, int]:
    """Return K and N of `K/N`."""
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
        return int(first), int(second)
    raise pytest.UsageError(f"--cases: expected K/N with 1 <= K <= N, such as 1/8, got {text!r}")


def shared(items: list[pytest.Item], share: tuple[int, int]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return what runs and what does not, both in the order of `items`."""
    number, shares = share
    chosen, groups = set(), defaultdict(list)
    for item in items:
        test = item.nodeid.partition("[")[0]
        if not is_above_backends(item):
            chosen.add(item.nodeid)
        elif item.get_closest_marker("every_count"):
            groups[item.nodeid].append(item.nodeid)
        elif shares <= 2:
            groups[re.sub(RANK_COUNT, "", item.nodeid)].append(item.nodeid)
        else:
            groups[test].append(item.nodeid)
    for group, names in groups.items():
        if shares <= 2:
            step = min(shares, len(names))
        else:
            names.sort(key=lambda name: (zlib.crc32(name.encode()), name))
            step = min(shares, max(2, len(names)))
        chosen.update(names[(number + zlib.crc32(group.encode())) % step :: step])
    return [i for i in items if i.nodeid in chosen], [i for i in items if i.nodeid not in chosen]
