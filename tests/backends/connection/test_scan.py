"""Scans of every kind of placement: bits in rank order on one node, or where they are asked for; else numbers."""

import itertools

import pytest
import torch
from helpers.compare import assert_close
from helpers.numpy_reference import same_bits
from helpers.placements import REAL, new_groups_of
from torch import Tensor

from axonmpi import ReduceOp, World
from axonmpi.backends.connection.connection import ChunkSizes

pytestmark = [REAL, pytest.mark.ranks(2, 4)]
COUNTS = (1, 29, 1000, 9001)
COMBINE = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}
DTYPES = (torch.float32, torch.bfloat16)


def contribution(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that another order of adding gives other bits."""
    generator = torch.Generator().manual_seed(1000 * count + rank)
    numbers = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-2, 3, (count,), generator=generator)
    return numbers.to(dtype)


def one_after_the_other(parts: list[Tensor], op: ReduceOp) -> Tensor:
    """Torch's reduction in the order of the parts, in float32, rounded at the end."""
    total = parts[0].float()
    for part in parts[1:]:
        total = COMBINE[op](total, part.float())
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("order", ["auto", "ordered"])
@pytest.mark.parametrize("on_a_node", ["1", "2", "3", "4"])
def test_each_rank_gets_the_reduction_up_to_it(world: World, monkeypatch, on_a_node: str, order: str) -> None:
    """Each alone, on nodes of two ranks, of three ranks and one, on one node; in several chunks and messages."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", on_a_node)
    monkeypatch.setenv("AXONMPI_SUMS", order)
    with new_groups_of(world, ChunkSizes(4096, 10_000)):
        group = world.new_group(range(world.size))
    in_rank_order = group.backend.path == "node" or order == "ordered"
    for count, dtype, op in itertools.product(COUNTS, DTYPES, COMBINE):
        parts = [contribution(rank, count, dtype) for rank in range(group.size)]
        for exclusive, reverse in itertools.product((False, True), repeat=2):
            case = f"{count} {dtype} {op.name} exclusive={exclusive} reverse={reverse}"
            mine = parts[group.rank + exclusive :] if reverse else parts[: group.rank + 1 - exclusive]
            tensor = parts[group.rank].clone()
            group.backend.scan(tensor, op, exclusive=exclusive, reverse=reverse)
            if not mine:
                continue  # the identity, which conformance compares
            expected = one_after_the_other(mine, op)
            if in_rank_order or op in (ReduceOp.MIN, ReduceOp.MAX):
                assert same_bits(tensor, expected), case
            else:
                bound = one_after_the_other([part.abs() for part in mine], op).float().max().item()
                assert_close(tensor / bound, expected / bound, 2.0**-7 if dtype is torch.bfloat16 else 1e-6, case)
    group.close()
