"""The files that a large reduction passes are those that docs/backends.md lists, in their order."""

import re
import sys

import pytest
import torch
from helpers import REPOSITORY
from helpers.placements import REAL

import axonmpi as ax

PAGE = REPOSITORY / "docs" / "backends.md"
ONLY_WHERE_A_RANK_WAITS = "utils/waiting.py"


def listed_files(heading: str) -> list[str]:
    """The names in the first column of the table below a heading."""
    section = PAGE.read_text().partition(f"# {heading}\n")[2].partition("| --- | --- |\n")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(.*?)`", section, re.MULTILINE)


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
@pytest.mark.ranks(4)
def test_a_reduction_passes_few_files(world, monkeypatch) -> None:
    """Those that the page lists, on a rank that leads its node."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "4")
    together = world.new_group(range(world.size))
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2")
    apart = world.new_group(range(world.size))
    with world.activate():
        for group, heading, first, numel, most, most_before in (
            (together, "On one node", "copy_in", 1 << 24, 9, 10),
            (together, "On one node, of four ranks", "_put", 1, 9, 10),
            (apart, "Between two nodes of two ranks", "_swap", 1 << 24, 11, 12),
            (apart, "Between two nodes of two ranks, small", "_swap", 1, 11, 12),
        ):
            passed, before_the_first_byte = passed_files(torch.ones(numel), group, first)
            if world.rank == 0:
                assert passed == listed_files(heading)
            assert sum(name.startswith("backends/") for name in passed) <= most
            assert len(before_the_first_byte) <= most_before
