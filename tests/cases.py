"""`--cases 1/4`: of a test with many cases, one in four, chosen so that no parameter decides.

The parallelism is written once for all backends, and the mock runs every case of it. Real ranks show that processes
and an MPI library change nothing, for which a share of the cases does, of those that the session would run without
one. Two neighbouring shares, such as 1/4 and 2/4, have every test between them: both have cases of a test that has
several, one of them has a single case. Tests of what is about a library always run.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from pathlib import Path

import pytest

ABOVE_THE_BACKENDS = ("data", "ddp", "fsdp", "mesh", "pipeline", "tensor", "train")
"""Folders of tests that a share is taken of."""


def parse(text: str) -> tuple[int, int]:
    """Return K and N of `K/N`."""
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
        return int(first), int(second)
    raise pytest.UsageError(f"--cases: expected K/N with 1 <= K <= N, such as 1/4, got {text!r}")


def shared(items: list[pytest.Item], share: tuple[int, int]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return what runs and what does not, both in the order of `items`."""
    number, shares = share
    cases: dict[str, list[str]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item.nodeid)
    chosen = set()
    for test, names in cases.items():
        if is_shared(test):
            mixed = sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))
            step = min(shares, max(2, len(names)))
            first = (number + zlib.crc32(test.encode())) % step
            chosen.update(mixed[first::step])
        else:
            chosen.update(names)
    return [i for i in items if i.nodeid in chosen], [i for i in items if i.nodeid not in chosen]


def is_shared(test: str) -> bool:
    return any(folder in Path(test.partition("::")[0]).parts for folder in ABOVE_THE_BACKENDS)
