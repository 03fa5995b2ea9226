"""Ranks on two nodes: what MPI's shared-memory split sees, results, and bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from two_nodes import TwoNodes

MEBIBYTE = 1 << 20
SUITE = Path(__file__).parent.parent / "conformance"

ALL_REDUCE = f"""
import sys, torch, axonmpi as ax
world = ax.init_process_group()
tensor = torch.full(({16 * MEBIBYTE},), float(world.rank))
for _ in range(int(sys.argv[1])):
    ax.all_reduce(tensor, ax.ReduceOp.AVERAGE)
assert (tensor == sum(range(world.size)) / world.size).all()
assert world.default_group.backend.path == "nodes", world.default_group.backend.path
ax.destroy_process_group()
"""

PLACES = """
import axonmpi as ax
world = ax.init_process_group()
place = (world.node_rank, world.local_rank, world.local_size, world.num_nodes)
places = ax.all_gather_object(place)
for node in range(2):
    group = world.new_group([rank for rank, other in enumerate(places) if other[0] == node])
    if group.contains(world.rank) and group.size > 1:
        assert group.backend.path == "node"
if world.rank == 0:
    print("places", places)
ax.destroy_process_group()
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    obstacle = TwoNodes.obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    with TwoNodes() as both:
        yield both


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2), (2, 1), (1, 1)], ids=str)
def test_ranks_know_their_nodes(nodes: TwoNodes, ranks: tuple[int, int]) -> None:
    expected = [(node, local, ranks[node], 2) for node in (0, 1) for local in range(ranks[node])]
    assert f"places {expected}" in nodes.run(ranks, "-c", PLACES, timeout=60)


def test_each_byte_crosses_the_network_once(nodes: TwoNodes) -> None:
    """With two nodes an all-reduce cannot do with less than the tensor's size in each direction."""
    traffic = []
    for repeats in ("1", "3"):
        before = nodes.traffic()
        nodes.run((2, 2), "-c", ALL_REDUCE, repeats, timeout=120)
        traffic.append([after - start for after, start in zip(nodes.traffic(), before, strict=True)])
    for once, thrice in zip(*traffic, strict=True):
        assert 0.99 <= (thrice - once) / 2 / (64 * MEBIBYTE) <= 1.08


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2)], ids=str)
def test_the_conformance_suite_passes(nodes: TwoNodes, ranks: tuple[int, int]) -> None:
    tests = [str(SUITE / name) for name in ("test_bits.py", "test_mismatch.py")]
    printed = nodes.run(ranks, "-m", "pytest", "-q", "-m", "ranks", *tests, timeout=240)
    assert " passed" in printed, printed
    assert "failed" not in printed


def test_sharded_training_equals_one_process(nodes: TwoNodes) -> None:
    """Each strategy, also HYBRID_SHARD with replicas on the nodes, with accumulation and clipping."""
    tests = str(SUITE.parent / "fsdp" / "test_fsdp_training.py")
    chosen = "each_strategy and 4ranks and 0.05 and not frozen"
    printed = nodes.run((2, 2), "-m", "pytest", "-q", "-m", "ranks", tests, "-k", chosen, timeout=240)
    assert "8 passed" in printed, printed
    assert "failed" not in printed


def test_a_job_that_fails_is_an_error_with_its_output(nodes: TwoNodes) -> None:
    with pytest.raises(AssertionError, match=r"(?s)exit code .*no such file"):
        nodes.run(
            (1, 1), "-c", "import axonmpi as ax; ax.init_process_group(); raise OSError('no such file')", timeout=60
        )
    # The nodes are still of use afterwards.
    assert "both" in nodes.run((1, 1), "-c", "print('both')", timeout=60)
