"""What the double of NCCL refuses, and faults of the library that it has shown."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from helpers.device_double import Gpu
from helpers.doubled_worlds import doubled
from helpers.nccl_double import NCCLError, NcclInvalid, NcclRedOp, group, group_end
from helpers.nccl_mutants import MUTANTS, found_by

import axonmpi as ax
from axonmpi import ReduceOp, World
from axonmpi.backends import NcclBackend
from axonmpi.testing import run_ranks


@pytest.fixture(autouse=True)
def _over_double() -> Iterator[None]:
    with doubled():
        yield


def parts_of(world: World) -> tuple[Gpu, object, int]:
    """Return a rank's pretended GPU, its communicator and the address of its stream."""
    backend = world.default_group.backend
    assert isinstance(backend, NcclBackend)
    return backend._device, backend._main.communicator, backend._main.handle


def test_what_nccl4py_and_nccl_refuse() -> None:
    def body(world: World) -> None:
        _, nccl, stream = parts_of(world)
        two, four = torch.ones(2), torch.ones(4)
        for tensor, why in (
            (torch.ones(2, dtype=torch.int16), "no NCCL equivalent"),
            (torch.ones(2, dtype=torch.complex64), "no NCCL equivalent"),
            (torch.ones(2, device="meta"), "is on device meta"),
            (torch.ones(4, 2)[:, 0], "not in contiguous memory"),
        ):
            with pytest.raises(NcclInvalid, match=why):
                nccl.allreduce(tensor, tensor, NcclRedOp.SUM, stream=stream)
        with pytest.raises(NcclInvalid, match="at least 4 elements, got 2"):
            nccl.allreduce(four, two, NcclRedOp.SUM, stream=stream)
        with pytest.raises(NcclInvalid, match="at least 4 elements, got 2"):
            nccl.allgather(two, two, stream=stream)
        with pytest.raises(NcclInvalid, match="Dtype mismatch"):
            nccl.reduce_scatter(four, two.double(), NcclRedOp.SUM, stream=stream)
        with pytest.raises(NCCLError, match="invalid root 2"):
            nccl.reduce(two, two, NcclRedOp.SUM, 2, stream=stream)
        with pytest.raises(NCCLError, match="is none of GPU of rank"):
            nccl.send(two, 0, stream=10**9)
        with pytest.raises(NCCLError, match="not in a group call"):
            group_end()

    run_ranks(2, body, timeout=20)


def test_nothing_of_a_group_in_which_a_call_fails_is_launched() -> None:
    def body(world: World) -> None:
        gpu, nccl, stream = parts_of(world)

        def two_calls() -> None:
            with group():
                nccl.allreduce(torch.ones(2), torch.ones(2), NcclRedOp.SUM, stream=stream)
                nccl.reduce(torch.ones(2), torch.ones(2), NcclRedOp.SUM, 5, stream=stream)

        with pytest.raises(NCCLError, match="invalid root"):
            two_calls()
        assert not gpu.streams[stream].queue
        gpu.faults.clear()  # nothing was ordered

    run_ranks(2, body, timeout=20)


def test_an_aborted_communicator_and_the_ranks_that_wait_for_it() -> None:
    def body(world: World) -> None:
        _, nccl, stream = parts_of(world)
        if world.rank:
            work = world.default_group.all_reduce(torch.ones(3), async_op=True)
        world.default_group.backend.host.barrier()
        if world.rank == 0:
            nccl.abort()
            assert not nccl.is_valid
            with pytest.raises(NcclInvalid, match="Communicator not initialized"):
                nccl.allreduce(torch.ones(2), torch.ones(2), NcclRedOp.SUM, stream=stream)
        world.default_group.backend.host.barrier()
        if world.rank:
            with pytest.raises(ax.NcclError, match="remote process exited"):
                work.wait(10)

    run_ranks(2, body, timeout=20)


def test_memory_is_spoilt_where_a_wait_is_missing() -> None:
    def body(world: World) -> None:
        gpu, _, _ = parts_of(world)
        side = gpu.new_stream()
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = torch.ones(4, dtype=dtype)
            with gpu.within(side):
                doubled_tensor = tensor * 2
            assert gpu.faults.pop().startswith(f"rank {world.rank}: mul.Tensor on stream")
            gpu.wait(gpu.current_stream(), gpu.record(side))
            assert doubled_tensor.tolist() != [2] * 4
            gpu.keep(tensor, side)
            gpu.keep(doubled_tensor, gpu.current_stream())

    run_ranks(1, body, timeout=20)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT])
def test_views_that_nccl_does_not_see(op: ReduceOp) -> None:
    """Conjugated numbers, an odd count of them, one element whose stride means nothing."""

    def body(world: World) -> None:
        own = torch.full((3,), 1 + 1j)
        expected = torch.full((3,), 2 - 2j if op is ReduceOp.SUM else -2j)
        reduced = own.conj().clone().conj().conj()
        world.default_group.all_reduce(reduced, op)
        assert torch.equal(reduced.resolve_conj(), expected)
        assert torch.equal(world.default_group.all_gather(own.conj()).resolve_conj(), torch.full((6,), 1 - 1j))
        assert torch.equal(world.default_group.reduce_scatter(own.repeat(2).conj(), op).resolve_conj(), expected)
        one = torch.ones(2, dtype=torch.int16).as_strided((1, 1), (0, 0))
        assert world.default_group.all_gather(one).tolist() == [[1], [1]]

    run_ranks(2, body, timeout=20)


def test_tensors_of_other_strides_on_each_rank_are_reduced_together() -> None:
    def body(world: World) -> None:
        matrix = torch.arange(6.0).view(2, 3)
        own = matrix.t().contiguous().t() if world.rank else matrix.clone()
        short = torch.ones(2, dtype=torch.int16)
        assert world.default_group.backend.reduce_together([own, short], ReduceOp.SUM)
        assert torch.equal(own, 2 * matrix)
        assert short.tolist() == [2, 2]

    run_ranks(2, body, timeout=20)


def test_a_rank_that_fails_releases_the_cpus_that_wait_for_its_gpu() -> None:
    def body(world: World) -> None:
        if world.rank:
            raise ArithmeticError("rank 1 fails")
        world.default_group.all_reduce(torch.ones(2), async_op=True).wait(30)

    begun = time.monotonic()
    with pytest.raises(ArithmeticError):
        run_ranks(2, body, timeout=20)
    assert time.monotonic() - begun < 10


def test_ranks_that_wait_for_each_other_say_what_their_streams_have_to_do() -> None:
    """Both send first, outside of a group: usage/p2p.rst."""

    def body(world: World) -> None:
        gpu, nccl, stream = parts_of(world)
        nccl.send(torch.ones(2), 1 - world.rank, stream=stream)
        nccl.recv(torch.ones(2), 1 - world.rank, stream=stream)
        gpu.synchronize()

    with pytest.raises(ax.CollectiveTimeoutError, match=r"(?s)GPU of rank 0 has to do.*GPU of rank 1 has to do"):
        run_ranks(2, body, timeout=2)


def test_connecting_over_another_backend() -> None:
    def body(world: World) -> None:
        backend = NcclBackend.over(world.default_group.backend.host, torch.device("cpu"))
        tensor = torch.ones(3)
        backend.all_reduce(tensor)
        assert tensor.tolist() == [world.size] * 3
        part = backend.partition([[0, 2], [1]])
        part.all_reduce(tensor)
        assert tensor.tolist() == [3 if world.rank == 1 else 6] * 3

    run_ranks(3, body, timeout=20)


def test_a_broken_order_is_found() -> None:
    """One of the mutants; all: `python tests/helpers/nccl_mutants.py`."""
    assert found_by(MUTANTS[7])
