"""Run on several ranks: every operation of torch.distributed over MPI, against what numpy says it gives.

What each rank contributes is known on all, so each rank computes what it should get.
"""

from __future__ import annotations

import itertools
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
UFUNCS = {
    dist.ReduceOp.SUM: np.add,
    dist.ReduceOp.PRODUCT: np.multiply,
    dist.ReduceOp.MIN: np.minimum,
    dist.ReduceOp.MAX: np.maximum,
    dist.ReduceOp.BAND: np.bitwise_and,
    dist.ReduceOp.BOR: np.bitwise_or,
    dist.ReduceOp.BXOR: np.bitwise_xor,
}
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
SHAPE = (3, 4)


def own(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """What a rank contributes: small integers, whose sums every dtype has."""
    made = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(rank + 1))
    return made.to(dtype)


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy() if tensor.dtype.is_floating_point else tensor.numpy()


def reduced(ranks: range | list[int], dtype: torch.dtype, op, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    parts = [numbers(own(rank, dtype, shape)) for rank in ranks]
    if dtype is torch.bool and op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
        combine = np.logical_or if op == dist.ReduceOp.SUM else np.logical_and
        return torch.from_numpy(np.asarray([combine.reduce(parts)]))[0]
    if op == dist.ReduceOp.AVG:
        return torch.from_numpy(sum(parts) / len(parts)).to(dtype)
    return torch.from_numpy(UFUNCS[op].reduce(parts)).to(dtype)


def allowed(dtype: torch.dtype) -> list:
    floating = dtype.is_floating_point
    return [*(op for op in UFUNCS if op not in BITWISE or not floating), *([dist.ReduceOp.AVG] if floating else [])]


def same(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    assert torch.equal(found, expected), f"{what}: {found} is not {expected}"


def finish(work: object, is_async: bool) -> None:
    assert (work is not None) == is_async
    if is_async:
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        work.get_future().wait()


def reductions(group, members: list[int]) -> None:
    rank, size = group.rank(), group.size()
    for dtype, is_async in itertools.product(DTYPES, (False, True)):
        for op in allowed(dtype):
            what = (dtype, op, is_async)
            expected = reduced(members, dtype, op)
            tensor = own(members[rank], dtype)
            finish(dist.all_reduce(tensor, op, group, is_async), is_async)
            same(tensor, expected, ("all_reduce", *what))
            tensor = own(members[rank], dtype)
            finish(dist.reduce(tensor, members[-1], op, group, is_async), is_async)
            same(tensor, expected if rank == size - 1 else own(members[rank], dtype), ("reduce", *what))
            whole = (2 * size, 3)
            result = torch.empty((2, 3), dtype=dtype)
            given = own(members[rank], dtype, whole)
            finish(dist.reduce_scatter_single(result, given, op, group, is_async), is_async)
            part = reduced(members, dtype, op, whole).tensor_split(size)[rank]
            same(result, part, ("reduce_scatter_single", *what))
            finish(
                dist.reduce_scatter(result.zero_(), list(given.tensor_split(size)), op, group, is_async), is_async
            )
            same(result, part, ("reduce_scatter", *what))
    tensor = own(members[rank])
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5), group)
    same(tensor, reduced(members, torch.float32, dist.ReduceOp.SUM) / 2, "PREMUL_SUM")
    sparse = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 1,))
    dist.all_reduce(sparse, group=group)
    same(sparse.to_dense(), torch.tensor([1.0] * size + [2.0 * size]), "sparse")
    several = [own(members[rank]), own(members[rank], shape=(5,))]
    with dist._coalescing_manager(group):
        for tensor in several:
            dist.all_reduce(tensor, group=group)
    for tensor in several:
        same(tensor, reduced(members, torch.float32, dist.ReduceOp.SUM, tuple(tensor.shape)), "coalesced")


def copies(group, members: list[int]) -> None:
    rank, size = group.rank(), group.size()
    me, everyone = members[rank], [own(each) for each in members]
    for is_async in (False, True):
        for dtype in [*DTYPES, torch.complex64]:
            tensor = own(me, dtype)
            finish(dist.broadcast(tensor, members[-1], group, is_async), is_async)
            same(tensor, own(members[-1], dtype), ("broadcast", dtype))
            gathered = [torch.empty(SHAPE, dtype=dtype) for _ in members]
            finish(dist.all_gather(gathered, own(me, dtype), group, is_async), is_async)
            for each, found in zip(members, gathered, strict=True):
                same(found, own(each, dtype), ("all_gather", dtype))
        into = torch.empty(size, *SHAPE)
        finish(dist.all_gather_single(into, own(me), group, is_async), is_async)
        same(into, torch.stack(everyone), "all_gather_single")
        strided = torch.empty(*reversed(SHAPE), size).permute(2, 1, 0)
        finish(dist.all_gather_single(strided, own(me).T.contiguous().T, group, is_async), is_async)
        same(strided, torch.stack(everyone), "all_gather_single of strided tensors")
        gathered = [torch.empty(SHAPE) for _ in members] if rank == 0 else None
        finish(dist.gather(own(me), gathered, members[0], group, is_async), is_async)
        for expected, found in zip(everyone, gathered or (), strict=rank == 0):
            same(found, expected, "gather")
        tensor = torch.empty(SHAPE)
        finish(dist.scatter(tensor, everyone if rank == 0 else None, members[0], group, is_async), is_async)
        same(tensor, own(me), "scatter")
    sizes = [rank + to + 1 for to in range(size)]
    received = torch.empty(sum(sizes))
    dist.all_to_all_single(received, torch.full((sum(sizes),), float(rank)), sizes, sizes, group)
    same(
        received,
        torch.cat([torch.full((count,), float(each)) for each, count in enumerate(sizes)]),
        "uneven splits",
    )
    outputs = [torch.empty(count) for count in sizes]
    dist.all_to_all(outputs, [torch.full((count,), float(rank)) for count in sizes], group)
    same(torch.cat(outputs), received, "all_to_all")
    uneven = [torch.empty(each + 1) for each in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)), group)
    same(torch.cat(uneven), torch.cat([torch.full((each + 1,), float(each)) for each in range(size)]), "uneven")
    dist.barrier(group)
    dist.barrier(group, async_op=True).wait()
    dist.barrier(group, timeout=timedelta(seconds=30))


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
    pairs = [[first, (first + 1) % size] for first in range(size)] if size > 2 else [[0, 1]]
    mine = [sorted(pair) for pair in pairs if rank in pair]
    made = [dist.new_group(pair, use_local_synchronization=True) for pair in sorted(mine)]
    for pair, group in zip(sorted(mine), made, strict=True):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor == sum(pair)
    own_half, _ = dist.new_subgroups(size // 2)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=own_half)
    assert tensor == size // 2
    backwards = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    assert dist.get_rank(backwards) == size - 1 - rank
    if size == 2:
        return
    group = dist.new_group([1, size - 1])
    if rank in (1, size - 1):
        everything(group, [1, size - 1])
    dist.destroy_process_group(own_half)


def everything(group, members: list[int]) -> None:
    for part in (reductions, copies, objects, messages):
        part(group, members)


def refusals() -> None:
    """Mistakes of the caller are errors on the rank that made them, before anything is sent."""
    size = dist.get_world_size()
    for call, message in (
        (lambda: dist.all_gather([torch.empty(1)], torch.empty(1)), f"expected a list of {size}"),
        (lambda: dist.all_gather_single(torch.empty(1), torch.empty(3)), "sizes do not fit"),
        (lambda: dist.all_to_all_single(torch.empty(size + 1), torch.empty(size + 1)), "equal parts"),
        (lambda: dist.all_reduce(torch.ones(1, dtype=torch.int64), dist.ReduceOp.AVG), "AVERAGE needs"),
        (lambda: dist.isend(torch.ones(1), 0, tag=1 << 20), "tag: expected"),
        (lambda: dist.all_reduce(torch.empty(1, device="meta")), r"tensors on cpu, .* move it with .cpu\(\)"),
        (lambda: dist.group.WORLD._get_backend(torch.device("cuda")), r"axonmpi.init_process_group\(.nccl.\)"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            call()


def main() -> None:
    warnings.simplefilter("ignore")  # of torch's own deprecations
    dist.init_process_group("axonmpi")
    assert dist.get_backend() == "axonmpi"
    everything(dist.group.WORLD, list(range(dist.get_world_size())))
    groups()
    refusals()
    tensor = torch.ones(2, requires_grad=True)
    dist.all_reduce(tensor)
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2), async_op=True).wait()
    dist.destroy_process_group()
    dist.init_process_group("axonmpi", rank=dist_rank(), timeout=timedelta(seconds=60))
    dist.barrier()
    dist.destroy_process_group()
    print("all is well", flush=True)


def dist_rank() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank


if __name__ == "__main__":
    main()
