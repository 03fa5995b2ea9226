"""Every operation on symmetric tensors, wherever in shared memory they lie on each rank, against numpy."""

import itertools

import pytest
import torch
from helpers.collective_checks import CollectiveChecks
from helpers.numpy_reference import reductions
from helpers.placements import PLACEMENTS, REAL, SMALL_CHUNK_BYTES, Places, limits, new_groups_of, places_in
from helpers.settings import all_pairs

from axonmpi import ReduceOp
from axonmpi.backends.connection.connection import ChunkSizes
from axonmpi.backends.reduction import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.ranks(2, 3)
def test_every_operation_wherever_the_tensors_lie(world) -> None:
    """In one group, one after the other and beside each other. A page is a piece, so little data is several."""
    with new_groups_of(world, ChunkSizes(chunk=SMALL_CHUNK_BYTES)):
        group, other = (world.new_group(range(world.size)) for _ in range(2))
    direct = limits(world.size).direct
    checks = {
        (kind, way): CollectiveChecks(
            group, asynchronous=way, label=kind, put=Places(group, kind, 5 * direct, other).put
        )
        for kind in PLACEMENTS
        for way in (False, True)
    }
    for setting in all_pairs(
        dtype=DTYPES,
        nbytes=(0, 1, 128, 129, direct, direct + 1, 3 * direct),
        rows=(0, 1, 7),
        kind=PLACEMENTS,
        op=range(5),
        asynchronous=(False, True),
        which=range(world.size),
    ):
        dtype, rows = setting["dtype"], setting["rows"]
        count = -(-setting["nbytes"] // dtype.itemsize)
        shape = (rows, count // rows) if rows else (count,)
        ops = reductions(dtype)
        each = checks[setting["kind"], setting["asynchronous"]]
        each.every_symmetric_operation(dtype, shape, ops[setting["op"] % len(ops)], setting["which"])
    for each in checks.values():
        each.finish()


@REAL
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["view", "mixed", "foreign"])
def test_blocks_of_any_sizes_and_pieces_as_large_as_they_are(world, kind) -> None:
    edges = limits(world.size)
    with places_in(world, kind, 3 * edges.chunk + 64, ChunkSizes(chunk=SMALL_CHUNK_BYTES)) as places:
        checks = CollectiveChecks(places.group, label=kind, put=places.put)
        # One chunk (1,024 elements), several, nothing; in every combination.
        for sizes in itertools.product((0, 3, 1024, 1025, 1500), repeat=2):
            checks.all_gather(torch.float32, (1,), 0, sizes=sizes)
        checks.all_gather(torch.float32, (1, 13), 0, sizes=(1, 400))
        checks.all_gather(torch.float32, (13, 1), 1, sizes=(7, 8, 9))
        checks.finish()
    with places_in(world, kind, 3 * edges.chunk + 64) as places:
        checks = CollectiveChecks(places.group, label=kind, put=places.put)
        for limit, more in itertools.product((edges.medium, edges.slices, 2 * edges.chunk), (0, 1)):
            checks.all_reduce(torch.int32, (limit // 4 + more,))
        checks.every_symmetric_operation(torch.int32, (2 * edges.chunk // 4 + 1,), ReduceOp.MIN, 1)
        checks.every_symmetric_operation(torch.bfloat16, (3, edges.chunk // 4 + 1), ReduceOp.SUM, 1)
        checks.finish()
