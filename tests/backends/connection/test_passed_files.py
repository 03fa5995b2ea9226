"""The files that a large reduction passes are those that docs/architecture.md lists, in their order."""

import re
import sys

import pytest
import torch
from helpers import REPOSITORY
from helpers.placements import REAL

import axonmpi as ax

PAGE = REPOSITORY / "docs" / "architecture.md"
MOST_BEFORE_THE_FIRST_BYTE = 10
ONLY_WHERE_A_RANK_WAITS = "utils/waiting.py"


def listed_files(heading: str) -> list[str]:
    """The names in a table's first column; `connection/agreement.py`, `barrier.py` share a line and a folder."""
    section = PAGE.read_text().partition(f"# {heading}\n")[2].partition("| file |")[2].partition("\n\n")[0]
    files: list[str] = []
    for line in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        first, *others = re.findall(r"`(.*?)`", line)
        files.append(first)
        for name in others:
            files.append(name if "/" in name else f"{files[-1].rpartition('/')[0]}/{name}")
    return files


def passed_files(tensor: torch.Tensor, group: ax.ProcessGroup, first: str) -> tuple[list[str], list[str]]:
    """Return the files that a reduction passes, and those before it calls the function `first`."""
    passed: list[str] = []
    before_the_first_byte: list[str] = []

    def note(frame, event, _) -> None:
        _, found, name = frame.f_code.co_filename.rpartition("axonmpi/")
        if event == "call" and found and name not in (*passed, ONLY_WHERE_A_RANK_WAITS):
            passed.append(name)
        if frame.f_code.co_name == first and not before_the_first_byte:
            before_the_first_byte.extend(passed)

    ax.all_reduce(tensor, group=group)
    sys.setprofile(note)
    try:
        ax.all_reduce(tensor, group=group)
    finally:
        sys.setprofile(None)
    assert bool((tensor == group.size**2).all())
    return passed, before_the_first_byte


@REAL
@pytest.mark.ranks(2)
def test_a_large_reduction_passes_few_files(world, monkeypatch) -> None:
    together = world.default_group
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "1")
    apart = world.new_group(range(world.size))
    with world.activate():
        for group, heading, first, numel, most in (
            (together, "A collective", "copy_in", 1 << 24, 9),
            (apart, "Between nodes", "_swap", 1 << 17, 11),  # small enough for MPI's own sum
        ):
            passed, before_the_first_byte = passed_files(torch.ones(numel), group, first)
            assert passed == listed_files(heading)
            assert sum(name.startswith("backends/") for name in passed) <= most
            assert len(before_the_first_byte) <= MOST_BEFORE_THE_FIRST_BYTE
