"""Run on several ranks: every operation of torch.distributed over MPI, against what numpy says it gives.

    mpirun -n 4 python every_operation.py SEED

What each rank contributes is known on all, so each rank computes what it should get.
"""

import sys
import warnings
from copy import deepcopy
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from helpers import numpy_reference as reference
from helpers.compare import assert_equal, refused

from axonmpi.cli.bench.harness.torch_groups import all_gather_flat, reduce_scatter_flat

SEED = int(sys.argv[1])
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]
SHAPE = (3, 4)


def own(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """What a rank contributes."""
    return reference.values(dtype, shape, rank, SEED).clone()


FORMS = (False, True)
"""Blocking and asynchronous."""


def check(group, expected: object, operation, result: object, *arguments: object, forms=FORMS) -> None:
    """Compare the result of an operation, in some of its forms, with what is expected."""
    for is_async in forms:
        found = deepcopy(result)
        work = operation(found, *arguments, group=group, async_op=is_async)
        assert (work is not None) == is_async
        if is_async:
            work.wait()
            assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
            work.get_future().wait()
        if isinstance(expected, reference.Expected):
            assert expected.difference(found) is None, f"{operation.__name__}: {expected.difference(found)}"
        else:
            assert_equal(found, expected, operation.__name__)


def reductions(group, members: list[int]) -> None:
    rank, size = group.rank(), group.size()
    me, sum_of_all = members[rank], partial(reference.reduced, owners=tuple(members), seed=SEED)
    whole = (2 * size, 3)
    for dtype in DTYPES:
        given, result = own(me, dtype, whole), torch.empty((2, 3), dtype=dtype)
        for number, ours in enumerate(reference.reductions(dtype)):
            op = getattr(dist.ReduceOp, "AVG" if ours.name == "AVERAGE" else ours.name)
            expected = sum_of_all(dtype, SHAPE, op=ours)
            part = sum_of_all(dtype, whole, op=ours).slice(size, 0, rank)
            on_root = expected if rank == size - 1 else own(me, dtype)
            check_form = partial(check, group, forms=FORMS[number % 2 :][:1])
            check_form(expected, dist.all_reduce, own(me, dtype), op)
            check_form(on_root, dist.reduce, own(me, dtype), members[-1], op)
            check_form(part, reduce_scatter_flat, result, given, op)
            check_form(part, dist.reduce_scatter, result, list(given.tensor_split(size)), op)
    for dtype in (torch.int64, torch.int8):
        own_integers = (torch.arange(-7, 8) * (1 + me)).to(dtype)
        sums = torch.arange(-7, 8) * sum(1 + member for member in members)
        average = sums.div(size, rounding_mode="trunc").to(dtype)
        check(group, average, dist.all_reduce, own_integers, dist.ReduceOp.AVG)
        on_root = average if rank == 0 else own_integers
        check(group, on_root, dist.reduce, own_integers, members[0], dist.ReduceOp.AVG)
        parts = [own_integers] * size
        check(group, average, dist.reduce_scatter, torch.empty_like(average), parts, dist.ReduceOp.AVG)
    numbers = torch.arange(4.0)
    check(group, size * numbers / 2, dist.all_reduce, numbers, dist._make_nccl_premul_sum(0.5))
    for is_async in FORMS:
        sparse = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 1,))
        if work := dist.all_reduce(sparse, group=group, async_op=is_async):
            work.wait()
        assert_equal(sparse.to_dense(), torch.tensor([1.0] * size + [2.0 * size]), "sparse")
    several = [own(me), own(me, shape=(5,))]
    with dist._coalescing_manager(group):
        for tensor in several:
            dist.all_reduce(tensor, group=group)
    for tensor in several:
        expected = sum_of_all(torch.float32, tuple(tensor.shape), op=reference.ReduceOp.SUM)
        assert expected.difference(tensor) is None, f"coalesced: {expected.difference(tensor)}"


def copies(group, members: list[int]) -> None:
    rank, size = group.rank(), group.size()
    me, everyone = members[rank], [own(each) for each in members]
    for dtype in [*DTYPES, torch.complex64]:
        check(group, own(members[-1], dtype), dist.broadcast, own(me, dtype), members[-1])
        empty = [torch.empty(SHAPE, dtype=dtype) for _ in members]
        check(group, [own(each, dtype) for each in members], dist.all_gather, empty, own(me, dtype))
    stacked, strided = torch.stack(everyone), torch.empty(*reversed(SHAPE), size).permute(2, 1, 0)
    check(group, stacked, all_gather_flat, torch.empty(size, *SHAPE), own(me))
    check(group, stacked, all_gather_flat, strided, own(me).T.contiguous().T)
    check(group, own(me), dist.scatter, torch.empty(SHAPE), everyone if rank == 0 else None, members[0])
    gathered = [torch.empty(SHAPE) for _ in members] if rank == 0 else None

    def gather(results, tensor, root, **options):
        return dist.gather(tensor, results, root, **options)

    check(group, everyone if rank == 0 else None, gather, gathered, own(me), members[0])
    sizes = [rank + to + 1 for to in range(size)]
    blocks = [torch.full((count,), float(rank)) for count in sizes]
    expected = [torch.full((count,), float(sender)) for sender, count in enumerate(sizes)]
    received = torch.empty(sum(sizes))
    check(group, torch.cat(expected), dist.all_to_all_single, received, torch.cat(blocks), sizes, sizes)
    check(group, expected, dist.all_to_all, [torch.empty(count) for count in sizes], blocks)
    uneven = [torch.full((each + 1,), float(each)) for each in range(size)]
    check(group, uneven, dist.all_gather, [torch.empty(each + 1) for each in range(size)], uneven[rank])
    dist.barrier(group)
    dist.barrier(group, async_op=True).wait()
    dist.barrier(group, timeout=timedelta(hours=1))
    group.monitored_barrier()
    group.monitored_barrier(timedelta(hours=1), wait_all_ranks=True)


def objects(group, members: list[int]) -> None:
    rank, size = group.rank(), group.size()
    found = [None] * size
    dist.all_gather_object(found, {"rank": members[rank]}, group)
    assert found == [{"rank": each} for each in members]
    box = [("from", rank)]
    dist.broadcast_object_list(box, members[-1], group)
    assert box == [("from", size - 1)]
    dist.scatter_object_list(box, [f"for {each}" for each in members] if rank == 0 else None, members[0], group)
    assert box == [f"for {members[rank]}"]
    found = [None] * size if rank == 0 else None
    dist.gather_object(rank, found, members[0], group)
    assert found == (list(range(size)) if rank == 0 else None)


def messages(group, members: list[int]) -> None:
    rank, size = group.rank(), group.size()
    after, before = members[(rank + 1) % size], members[rank - 1]
    for numel in (1, 300_000):
        received = torch.empty(numel)
        sent = dist.isend(torch.full((numel,), float(rank)), after, group, tag=7)
        assert dist.recv(received, before, group, tag=7) == before
        sent.wait()
        assert received.eq(members.index(before)).all()
    received = torch.empty(4)
    operations = [
        dist.P2POp(dist.irecv, received, before, group),
        dist.P2POp(dist.isend, torch.full((4,), float(members[rank])), after, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.eq(before).all()
    if rank == 0:
        senders = set()
        for _ in members[1:]:
            source = dist.recv(received, group=group)
            assert received.eq(source).all()
            senders.add(source)
        assert senders == set(members[1:])
    else:
        dist.send(torch.full((4,), float(members[rank])), members[0], group)
    dist.barrier(group)


def groups() -> None:
    """Groups that only their members make, several at once, and in another order on another rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [sorted(pair) for pair in zip(range(size), [*range(1, size), 0], strict=True) if rank in pair]
    made = [dist.new_group(pair, use_local_synchronization=True) for pair in sorted(mine)]
    for pair, group in zip(sorted(mine), made, strict=True):
        dist.all_reduce(tensor := torch.tensor([float(rank)]), group=group)
        assert tensor == sum(pair)
    own_half, _ = dist.new_subgroups(size // 2)
    dist.all_reduce(tensor := torch.ones(1), group=own_half)
    assert tensor == size // 2
    backwards = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    assert dist.get_rank(backwards) == size - 1 - rank
    group = dist.new_group([1, size - 1])
    if rank in (1, size - 1):
        everything(group, [1, size - 1])
    dist.destroy_process_group(own_half)


def callbacks(group, members: list[int]) -> None:
    """Callbacks of futures begin operations, wait for them, for their own and for one behind, in one order."""
    size = group.size()
    first, second, third, fourth, fifth = (torch.full((1000,), float(number)) for number in range(1, 6))
    work = dist.all_reduce(first, group=group, async_op=True)

    def again(future: torch.futures.Future) -> torch.Tensor:
        assert (work.wait(), work.is_completed()) == (True, True)
        (total,) = future.value()
        dist.all_reduce(total, group=group, async_op=True).get_future().wait()
        dist.all_reduce(second, group=group)
        return total

    chained = work.get_future().then(again)
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in (third, fourth)]
    behind = works[0].get_future().then(lambda _: works[1].wait())
    dist.all_reduce(fifth, group=group)
    assert (chained.wait().unique().item(), behind.wait()) == (size**2, True)
    found = [tensor.unique().item() for tensor in (second, third, fourth, fifth)]
    assert found == [2 * size, 3 * size, 4 * size, 5 * size]


def everything(group, members: list[int]) -> None:
    for part in (reductions, copies, objects, messages, callbacks):
        part(group, members)


def refusals() -> None:
    """Mistakes of the caller are errors on the rank that made them, before anything is sent."""
    size = dist.get_world_size()
    refused(
        (ValueError, TypeError, RuntimeError),
        (lambda: dist.all_gather([torch.empty(1)], torch.empty(1)), f"expected a list of {size}"),
        (lambda: all_gather_flat(torch.empty(1), torch.empty(3)), "sizes do not fit"),
        (lambda: dist.all_to_all_single(torch.empty(size + 1), torch.empty(size + 1)), "equal parts"),
        (lambda: dist.all_gather([torch.empty(1)], torch.empty(1), async_op=True), f"expected a list of {size}"),
        (lambda: dist.all_reduce(torch.ones(1, dtype=torch.bool), dist.ReduceOp.AVG), "AVERAGE needs"),
        (lambda: dist.isend(torch.ones(1), 0, tag=1 << 20), "tag: expected"),
        (lambda: dist.all_reduce(torch.empty(1, device="meta")), r"tensors on cpu, .* move it with .cpu\(\)"),
        (lambda: dist.group.WORLD._get_backend(torch.device("cuda")), r"axonmpi.init_process_group\(.nccl.\)"),
    )


def main() -> None:
    warnings.simplefilter("ignore")  # of torch's own deprecations
    dist.init_process_group("axonmpi")
    assert dist.get_backend() == "axonmpi"
    rank = dist.get_rank()
    everything(dist.group.WORLD, list(range(dist.get_world_size())))
    groups()
    refusals()
    dist.all_reduce(torch.ones(2, requires_grad=True))
    with torch.inference_mode():
        made = torch.ones(2)
        dist.all_reduce(made, async_op=True).wait()
    dist.all_reduce(made, async_op=True).wait()
    dist.all_reduce(made)  # also outside of the mode that it was made in, as over gloo
    assert made.tolist() == [dist.get_world_size() ** 3] * 2
    dist.destroy_process_group()
    dist.init_process_group("axonmpi", rank=rank, timeout=timedelta(hours=1))
    dist.barrier()
    dist.destroy_process_group()
    print("all is well", flush=True)


if __name__ == "__main__":
    main()
