"""More than 2^31 elements, for real: `mpirun -n 2 pytest tests/backends/mpi/large_counts.py`, in 12 GiB."""

import re
from pathlib import Path

import pytest
import torch

from axonmpi import ReduceOp

pytestmark = pytest.mark.not_over_double("is about counts of MPI")

COUNT = 2**31 + 4321
NEEDED_BYTES = 12 << 30


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    return int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024


@pytest.mark.ranks(2)
@pytest.mark.rank_timeout(300)
def test_more_than_two_to_the_31_elements(group) -> None:
    if group.backend.name != "mpi":
        pytest.skip("counts are MPI's: needs an mpirun")
    if group.broadcast_object(available_bytes()) < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of memory")
    tensor = torch.zeros(COUNT, dtype=torch.int8)
    # Marks around every place where a 32-bit count could go wrong.
    places = [0, 1, 2**30 - 1, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, COUNT - 1]

    def marks() -> list[int]:
        assert tensor.count_nonzero().item() == len(places)
        return [tensor[place].item() for place in places]

    expected = list(range(1, len(places) + 1))
    if group.rank == 0:
        for mark, place in zip(expected, places, strict=True):
            tensor[place] = mark
    group.broadcast(tensor)
    assert marks() == expected
    if group.rank == 1:
        for place in places:
            tensor[place] += 10 if place % 2 else -20
    group.all_reduce(tensor, ReduceOp.MAX)
    expected = [mark + (10 if place % 2 else 0) for mark, place in zip(expected, places, strict=True)]
    assert marks() == expected
    # The same as one message, which goes in several pieces.
    if group.rank == 0:
        group.send(tensor, 1)
    else:
        group.recv(tensor.zero_(), 0)
    assert marks() == expected
