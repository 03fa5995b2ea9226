"""Counts beyond 2^31: every line that cuts data into pieces or messages, with limits of a few bytes instead."""

from __future__ import annotations

import pytest
import torch
from collective_checks import CollectiveChecks
from numpy_reference import reductions

from axonmpi import ProcessGroup
from axonmpi.backends.reduction import DTYPES

pytestmark = [
    pytest.mark.ranks(1, 2, 3, 4),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]
SHAPES = ((5,), (8, 8), (4, 37), (211,), (3, 0, 2))


@pytest.fixture(
    params=[(7, 7), (64, 1000), (1000, 64), (1 << 20, 7)], ids=lambda limits: f"{limits[0]}-{limits[1]}"
)
def limits(request) -> tuple[int, int]:
    """Bytes in a piece of a reduction, and in a message."""
    return request.param


def limited(group: ProcessGroup, limits: tuple[int, int]) -> ProcessGroup:
    """The group with these limits. Mock ranks have none: there, this shows what is expected of the others."""
    if group.backend.name == "mpi":
        group.backend.piece_bytes, group.backend.max_message_bytes = limits
    return group


def test_copies(world, limits) -> None:
    group = limited(world.new_group(range(world.size)), limits)
    checks = CollectiveChecks(group, label=f"limits {limits}")
    root = group.size - 1
    for dtype in (torch.bool, torch.float16, torch.float64, torch.complex128):
        for shape in SHAPES:
            checks.broadcast(dtype, shape, root)
            checks.all_gather(dtype, shape, len(shape) - 1)
            checks.all_gather(dtype, shape, 0, sizes=[shape[0], 0, 3 * shape[0]])
            checks.gather(dtype, shape, root, sizes=[shape[0], 1, 0])
            checks.scatter(dtype, shape, root)
            checks.all_to_all([(dtype, shape), (torch.int16, (50,)), (dtype, ())])
            checks.ring(dtype, shape)
            checks.ring(dtype, shape, "transposed" if len(shape) > 1 else "offset")
    checks.finish()


def test_reductions(world, limits) -> None:
    group = limited(world.new_group(range(world.size)), limits)
    checks = CollectiveChecks(group, label=f"limits {limits}")
    for number, dtype in enumerate(DTYPES):
        for shape in SHAPES:
            op = reductions(dtype)[number % len(reductions(dtype))]
            checks.all_reduce(dtype, shape, op)
            checks.reduce(dtype, shape, op, number % group.size)
            checks.reduce_scatter(dtype, shape, op, len(shape) - 1)
    checks.finish()


def test_a_message_of_another_size_does_not_spoil_the_next(world, limits) -> None:
    """Also where both sizes are multiples of the largest message."""
    group = limited(world.new_group(range(world.size)), limits)
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    piece = limits[1]
    for sent, expected in ((3 * piece, 2 * piece), (2 * piece, 3 * piece), (piece + 1, piece), (piece, 2), (0, 1)):
        message = torch.full((sent,), group.rank, dtype=torch.uint8)
        works = [group.isend(message, after), group.isend(message[:1] if sent else message.new_ones(1), after)]
        buffer = torch.zeros(expected, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match=f"expected {expected} bytes"):
            group.recv(buffer, before)
        following = torch.zeros(1, dtype=torch.uint8)
        group.recv(following, before)
        assert following.item() == (before if sent else 1)
        for work in works:
            work.wait()
