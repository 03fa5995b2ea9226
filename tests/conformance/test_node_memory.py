"""Memory that the ranks of a node have in common, and the collectives on it."""

import pytest
import torch
from helpers.collective_checks import complete
from helpers.compare import refused
from helpers.settings import all_pairs

import axonmpi as ax
from axonmpi.errors import CollectiveMismatchError, DtypeError

SIZES = {"equal": [5, 5, 5, 5], "uneven": [7, 0, 1, 12], "large": [70_000, 30_000, 123_456, 1]}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def part_of(rank: int, size: int) -> torch.Tensor:
    return (torch.arange(size) % 251 + 1000 * rank).to(torch.float32)


@pytest.mark.ranks(1, 2, 4)
def test_the_ranks_of_a_node_share_the_memory(world, group):
    here = group.backend.node_ranks
    common = group.node_empty([world.size, 64], torch.int64)
    for number in range(50):
        group.barrier()  # before anybody writes again
        common[world.rank] = world.rank + number
        group.barrier()
        assert common[list(here)].tolist() == [[rank + number] * 64 for rank in here]
    assert (world.rank in here, here) == (True, tuple(sorted(here)))
    assert sorted({rank for ranks in group.all_gather_object(here) for rank in ranks}) == list(range(world.size))


@pytest.mark.ranks(1, 2, 4)
def test_all_gather_into(world, group):
    for row in all_pairs(kind=list(SIZES), dtype=DTYPES, in_place=(True, False), asynchronous=(True, False)):
        sizes = SIZES[row["kind"]][: world.size]
        parts = [part_of(rank, size) for rank, size in enumerate(sizes)]
        common = group.node_empty([sum(sizes)], row["dtype"])
        if row["in_place"]:
            common.split(sizes)[world.rank].copy_(parts[world.rank])
        given = None if row["in_place"] else parts[world.rank]
        complete(group.all_gather_into(common, given, sizes, async_op=row["asynchronous"]))
        assert torch.equal(common, torch.cat(parts).to(row["dtype"])), row
        group.barrier()


@pytest.mark.ranks(2)
def test_nothing_is_overwritten_before_all_have_called(group):
    common = group.node_empty([8], torch.float32)
    for turn in range(100):
        group.all_gather_into(common, torch.full((4,), float(turn)), [4, 4])
        assert torch.equal(common, torch.full((8,), float(turn)))  # still so while the other rank calls again


@pytest.mark.ranks(1, 2, 4)
def test_reduce_scatter_into(world, group):
    in_torch = {ax.ReduceOp.SUM: torch.sum, ax.ReduceOp.AVERAGE: torch.mean, ax.ReduceOp.MAX: torch.amax}
    for row in all_pairs(kind=list(SIZES), dtype=DTYPES, op=list(in_torch), asynchronous=(True, False)):
        sizes, dtype = SIZES[row["kind"]][: world.size], row["dtype"]
        total = sum(sizes)
        generators = [torch.Generator().manual_seed(rank) for rank in range(world.size)]
        whole = [torch.randn(total, generator=generator).to(dtype) for generator in generators]
        for each in whole:
            each[total // 3 : total // 2] = 0
        own = whole[world.rank]
        rest = own[total // 2 :]
        halves = [rest[: rest.numel() // 2 * 2].view(-1, 2), rest[rest.numel() // 2 * 2 :]]
        strided = own[: total // 3].repeat_interleave(2)[::2]  # [total // 3] every other element of its memory
        output = torch.full((sizes[world.rank],), 7.0, dtype=dtype)
        tensors = [strided, total // 2 - total // 3, *halves]
        complete(group.reduce_scatter_into(output, tensors, sizes, row["op"], async_op=row["asynchronous"]))
        expected = in_torch[row["op"]](torch.stack(whole).double(), 0).split(sizes)[world.rank]
        # NCCL rounds sums of 16-bit floats at each step.
        steps = 0.05 if group.backend.name == "nccl" and dtype.itemsize == 2 else None
        torch.testing.assert_close(
            output, expected.to(dtype), rtol=steps, atol=steps, msg=lambda text, row=row: f"{row}: {text}"
        )


@pytest.mark.ranks(2, 4)
def test_a_rank_may_have_its_result_in_place_of_its_part(world):
    each = 300_000  # several chunks
    numbers = torch.arange(each * world.size, dtype=torch.float64) % 1000
    mine = (numbers + world.rank).float()
    parts = list(mine.split(each))
    world.default_group.reduce_scatter_into(parts[world.rank], parts, [each] * world.size)
    expected = (numbers * world.size + sum(range(world.size))).split(each)[world.rank]
    assert torch.equal(parts[world.rank].double(), expected)


@pytest.mark.ranks(2, 4)
def test_sums_of_16_bit_tensors_can_stay_in_float32(world, group):
    mine = torch.full((1000 * world.size,), 1.0 + 2**-7 * world.rank, dtype=torch.bfloat16)
    output = torch.empty(1000)
    group.reduce_scatter_into(output, [mine], [1000] * world.size, ax.ReduceOp.AVERAGE)
    expected = sum(1.0 + 2**-7 * rank for rank in range(world.size)) / world.size
    assert torch.equal(output, torch.full((1000,), expected))


@pytest.mark.ranks(2)
def test_a_rank_with_nothing_but_zeros(world, group):
    tensors = [torch.ones(10, dtype=torch.bfloat16)] if world.rank else [10]
    output = torch.empty(5)
    group.reduce_scatter_into(output, tensors, [5, 5], dtype=torch.bfloat16)
    assert torch.equal(output, torch.ones(5))


@pytest.mark.ranks(2)
def test_wrong_arguments_are_named(group):
    common = group.node_empty([4], torch.float32)
    refused(
        ValueError,
        (lambda: group.all_gather_into(common, None, [2, 1, 1]), "sizes: expected 2 sizes, one for each .*, got 3"),
        (
            lambda: group.all_gather_into(common, None, [2, 3]),
            r"output: .* contiguous tensor of shape \[5\], got \[4\]",
        ),
        (lambda: group.all_gather_into(common, torch.ones(4), [2, 2]), r"tensor: .*of shape \[2\], got \[4\]"),
        (
            lambda: group.reduce_scatter_into(torch.empty(2), [torch.ones(3)], [2, 2]),
            "tensors: expected 4 elements in all, the sum of sizes, got 3",
        ),
        (lambda: group.node_empty([-1], torch.float32), "sizes of at least 0"),
    )
    refused(
        DtypeError,
        (
            lambda: group.reduce_scatter_into(torch.empty(2, dtype=torch.float64), [torch.ones(4)], [2, 2]),
            r"expected tensors of torch.float32, and output of that",
        ),
    )
    group.barrier()


@pytest.mark.ranks(2)
@pytest.mark.compares_calls
def test_calls_that_differ_are_an_error_on_every_rank(world, group):
    common = group.node_empty([4], torch.float32)
    refused(
        CollectiveMismatchError,
        (lambda: group.all_gather_into(common, None, [1, 3] if world.rank else [2, 2]), "all_gather_into"),
        (
            lambda: group.reduce_scatter_into(
                torch.empty(2), [torch.ones(4)], [2, 2], ax.ReduceOp(int(world.rank))
            ),
            "reduce_scatter_into",
        ),
    )
    group.barrier()
