"""The files that a large reduction on one node passes are those that docs/architecture.md lists, in their order."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers.placements import REAL

import axonmpi as ax

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
MOST_BEFORE_THE_FIRST_BYTE = 8
ONLY_WHERE_A_RANK_WAITS = "utils/waiting.py"


def listed_files() -> list[str]:
    """The names in the table's first column; `shared/handshake.py`, `barrier.py` share a line and a folder."""
    section = PAGE.read_text().partition("## A collective")[2].partition("MPI libraries")[0]
    files: list[str] = []
    for line in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        first, *others = re.findall(r"`(.*?)`", line)
        files += [first, *(f"{first.rpartition('/')[0]}/{other}" for other in others)]
    return files


@REAL
@pytest.mark.ranks(2)
def test_a_large_reduction_passes_few_files(world) -> None:
    with world.activate():
        tensor = torch.ones(1 << 24)
        ax.all_reduce(tensor)
        passed: list[str] = []
        before_the_first_byte: list[str] = []

        def note(frame, event, _) -> None:
            _, found, name = frame.f_code.co_filename.rpartition("axonmpi/")
            if event == "call" and found and name not in (*passed, ONLY_WHERE_A_RANK_WAITS):
                passed.append(name)
            if frame.f_code.co_name == "copy_in" and not before_the_first_byte:
                before_the_first_byte.extend(passed)

        sys.setprofile(note)
        try:
            ax.all_reduce(tensor)
        finally:
            sys.setprofile(None)
        assert bool((tensor == world.size**2).all())
    assert passed == listed_files()
    assert len(before_the_first_byte) <= MOST_BEFORE_THE_FIRST_BYTE
