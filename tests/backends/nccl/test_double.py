"""What the double of NCCL refuses, and faults of the library that it has shown."""

import pytest
import torch
from helpers.compare import refused
from helpers.device_double import Gpu
from helpers.nccl_double import Communicator, NCCLError, NcclInvalid, NcclRedOp, group
from jobs.mutants.nccl import MUTANTS, REPOSITORY

import axonmpi as ax
from axonmpi import ReduceOp, World
from axonmpi.backends import NcclBackend
from axonmpi.backends.nccl import collectives
from axonmpi.testing import run_ranks

pytestmark = pytest.mark.over_double
TWO_RANKS = pytest.mark.ranks(2)
ELSEWHERE = torch.ones(2, device="meta")


def parts_of(world: World) -> tuple[Gpu, Communicator, int]:
    """Return a rank's pretended GPU, its communicator and the address of its stream."""
    backend = world.default_group.backend
    return backend._device, backend._streams.main.communicator, backend._streams.main.handle


@TWO_RANKS
def test_what_nccl4py_and_nccl_refuse(world: World) -> None:
    _, nccl, stream = parts_of(world)
    two, four = torch.ones(2), torch.ones(4)

    def reduce(sent: torch.Tensor, received: torch.Tensor, root: int | None = None) -> None:
        nccl.reduce(sent, received, NcclRedOp.SUM, root, stream=stream)

    for tensor, message in (
        (two.short(), "no NCCL equivalent"),
        (two.to(torch.complex64), "no NCCL equivalent"),
        (ELSEWHERE, "is on device meta"),
        (torch.ones(4, 2)[:, 0], "not in contiguous memory"),
    ):
        refused(NcclInvalid, (lambda tensor=tensor: reduce(tensor, tensor), message))
    refused(
        NcclInvalid,
        (lambda: reduce(four, two), "at least 4 elements, got 2"),
        (lambda: nccl.allgather(two, two, stream=stream), "at least 4 elements, got 2"),
        (lambda: nccl.reduce_scatter(four, two.double(), NcclRedOp.SUM, stream=stream), "Dtype mismatch"),
    )
    refused(
        NCCLError,
        (lambda: reduce(two, two, 2), "invalid root 2"),
        (lambda: nccl.send(two, 0, stream=10**9), "is none of GPU of rank"),
    )


@pytest.mark.ranks(1)
def test_a_rank_alone_gets_back_what_it_has(world: World) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16):
        tensor = torch.arange(1, 4).to(dtype)
        for op in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MAX):
            world.default_group.all_reduce(tensor, op)
            assert world.default_group.reduce_scatter(tensor, op).tolist() == tensor.tolist() == [1, 2, 3]


@TWO_RANKS
def test_nothing_of_a_group_in_which_a_call_fails_is_launched(world: World) -> None:
    gpu, nccl, stream = parts_of(world)

    def two_calls() -> None:
        with group():
            nccl.reduce(torch.ones(2), torch.ones(2), NcclRedOp.SUM, stream=stream)
            nccl.reduce(torch.ones(2), torch.ones(2), NcclRedOp.SUM, 5, stream=stream)

    refused(NCCLError, (two_calls, "invalid root"))
    assert not gpu.streams[stream].queue
    gpu.faults.clear()  # nothing was ordered


@TWO_RANKS
def test_an_aborted_communicator_and_the_ranks_that_wait_for_it(world: World) -> None:
    _, nccl, stream = parts_of(world)
    host = world.default_group.backend.host
    if world.rank:
        work = world.default_group.all_reduce(torch.ones(3), async_op=True)
    host.barrier()
    if world.rank == 0:
        nccl.abort()
        with pytest.raises(NcclInvalid, match="Communicator not initialized"):
            nccl.reduce(torch.ones(2), torch.ones(2), NcclRedOp.SUM, stream=stream)
    host.barrier()
    if world.rank:
        with pytest.raises(ax.NcclError, match="remote process exited"):
            work.wait(10)


@pytest.mark.ranks(1)
def test_memory_is_spoilt_where_a_wait_is_missing(world: World) -> None:
    gpu, _, _ = parts_of(world)
    side = gpu.new_stream()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.ones(4, dtype=dtype)
        with gpu.within(side):
            doubled_tensor = tensor * 2
        assert gpu.faults.pop().startswith("rank 0: mul.Tensor on stream")
        gpu.wait(gpu.current_stream(), gpu.record(side))
        assert doubled_tensor.tolist() != [2] * 4
        gpu.keep(tensor, side)
        gpu.keep(doubled_tensor, gpu.current_stream())


@TWO_RANKS
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT])
def test_views_that_nccl_does_not_see(world: World, op: ReduceOp) -> None:
    """Conjugated numbers, an odd count of them, one element whose stride means nothing."""
    own = torch.full((3,), 1 + 1j)
    expected = torch.full((3,), 2 - 2j if op is ReduceOp.SUM else -2j)
    reduced = own.conj().clone().conj().conj()
    world.default_group.all_reduce(reduced, op)
    assert torch.equal(reduced.resolve_conj(), expected)
    assert torch.equal(world.default_group.all_gather(own.conj()).resolve_conj(), torch.full((6,), 1 - 1j))
    assert torch.equal(world.default_group.reduce_scatter(own.repeat(2).conj(), op).resolve_conj(), expected)
    one = torch.ones(2, dtype=torch.int16).as_strided((1, 1), (0, 0))
    assert world.default_group.all_gather(one).tolist() == [[1], [1]]


@TWO_RANKS
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_scan_gathers_a_part_of_a_large_tensor_at_a_time(world: World, monkeypatch, layout: str) -> None:
    monkeypatch.setattr(collectives, "GATHERED_BYTES", 24)
    given = torch.arange(10.0).view(2, 5) + 10 * world.rank
    tensor = given.t() if layout == "transposed" else given
    expected = (given + given - 10 if world.rank else given).clone()
    ax.scan(tensor)
    world.barrier()
    assert torch.equal(given, expected)


@TWO_RANKS
def test_tensors_of_other_strides_on_each_rank_are_reduced_together(world: World) -> None:
    matrix = torch.arange(6.0).view(2, 3)
    own = matrix.t().contiguous().t() if world.rank else matrix.clone()
    short = torch.ones(2, dtype=torch.int16)
    assert world.default_group.backend.reduce_together([own, short], ReduceOp.SUM)
    assert torch.equal(own, 2 * matrix)
    assert short.tolist() == [2, 2]


def test_a_rank_that_fails_releases_the_cpus_that_wait_for_its_gpu() -> None:
    def body(world: World) -> None:
        if world.rank:
            raise ArithmeticError("rank 1 fails")
        world.default_group.all_reduce(torch.ones(2), async_op=True).wait()

    with pytest.raises(ArithmeticError):
        run_ranks(2, body)


def test_ranks_that_wait_for_each_other_say_what_their_streams_have_to_do() -> None:
    """Both send first, outside of a group: usage/p2p.rst."""

    def body(world: World) -> None:
        gpu, nccl, stream = parts_of(world)
        gpu.host.rendezvous.world.timeout = 1
        nccl.send(torch.ones(2), 1 - world.rank, stream=stream)
        nccl.recv(torch.ones(2), 1 - world.rank, stream=stream)
        gpu.synchronize()

    with pytest.raises(ax.CollectiveTimeoutError, match=r"(?s)GPU of rank 0 has to do.*GPU of rank 1 has to do"):
        run_ranks(2, body)


@pytest.mark.ranks(3)
def test_connecting_over_another_backend(world: World) -> None:
    backend = NcclBackend.over(world.default_group.backend.host, torch.device("cpu"))
    tensor = torch.ones(3)
    backend.all_reduce(tensor)
    assert tensor.tolist() == [world.size] * 3
    part = backend.partition([[0, 2], [1]])
    part.all_reduce(tensor)
    assert tensor.tolist() == [3 if world.rank == 1 else 6] * 3


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_mutants_are_of_the_library_as_it_is(mutant) -> None:
    """That tests notice them is what `python tests/jobs/mutants/nccl.py` shows."""
    assert (REPOSITORY / "axonmpi" / mutant.file).read_text().count(mutant.old) == 1
