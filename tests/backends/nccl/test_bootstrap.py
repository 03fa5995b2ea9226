"""How ranks come to one communicator, and that a failure on one of them is the same error on all, never a hang."""

import threading
from collections.abc import Callable

import pytest
import torch
from helpers.placements import WITH_NCCL

import axonmpi as ax
from axonmpi import NcclBackend, NcclError, NcclUniqueId, World
from axonmpi.backends import MAX_TAG
from axonmpi.backends.nccl.bootstrap import agree_on, connect_all, exchange_unique_id
from axonmpi.backends.nccl.devices import ChosenDevice, check_choices
from axonmpi.launch.topology import Topology

pytestmark = pytest.mark.ranks(2, 4)
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
CPU = torch.device("cpu")


def error_on_all(world: World, action: Callable[[], object]) -> str:
    """Return the text of the NcclError that every rank raises, which is the same."""
    with pytest.raises(NcclError) as caught:
        action()
    texts = world.default_group.all_gather_object(str(caught.value))
    assert texts == [texts[0]] * world.size
    return texts[0]


@WITH_NCCL
def test_the_id_that_rank_0_makes_with_nccl_reaches_all(world: World) -> None:
    unique_id = exchange_unique_id(world.default_group.backend)
    assert world.default_group.all_gather_object(unique_id) == [unique_id] * world.size
    assert len(set(bytes(unique_id))) > 8  # an address and a random number, not zeros
    assert exchange_unique_id(world.default_group.backend) != unique_id


def test_rank_0_that_cannot_make_an_id_tells_all(world: World) -> None:
    def make() -> NcclUniqueId:
        raise OSError("no socket interface found")

    text = error_on_all(world, lambda: exchange_unique_id(world.default_group.backend, make))
    assert text == f"rank 0 of {world.size} could not make a unique id: no socket interface found"


@WITHOUT_GPU
def test_ranks_without_a_gpu_are_told_what_to_do(world: World) -> None:
    backend, nodes = world.default_group.backend, [0] * world.size
    text = error_on_all(world, lambda: NcclBackend.for_world(backend, Topology.of(nodes, world.rank)))
    assert text.startswith("no GPU: ")
    assert "init_process_group('mpi')" in text


def test_a_rank_that_finds_no_library_stops_all(world: World) -> None:
    last = world.size - 1

    def find() -> int:
        if world.rank == last:
            raise NcclError("nccl4py cannot be imported")
        return world.rank

    text = error_on_all(world, lambda: agree_on(world.default_group.backend, find))
    assert text == f"rank {last}: nccl4py cannot be imported"
    assert agree_on(world.default_group.backend, lambda: world.rank) == list(range(world.size))


def test_ranks_with_different_versions_or_one_gpu_are_refused(world: World) -> None:
    def check(version: tuple[int, int, int], gpu: int) -> None:
        own = ChosenDevice(0, f"GPU-{gpu}", version)
        check_choices(agree_on(world.default_group.backend, lambda: own))

    text = error_on_all(world, lambda: check((2, 28, 9) if world.rank == 1 else (2, 30, 7), world.rank))
    assert "has NCCL 2.28.9" in text
    assert "rank 1:" in text
    text = error_on_all(world, lambda: check((2, 28, 9), max(world.rank, 1)))
    assert "ranks 0, 1: use GPU GPU-1" in text
    check((2, 30, 7), world.rank)


def test_a_rank_that_fails_while_the_others_are_inside_nccl_stops_all(world: World) -> None:
    backend, last = world.default_group.backend, world.size - 1
    never = threading.Event()

    def connect() -> None:
        if world.rank == last:
            raise NcclError("unhandled cuda error")
        never.wait()

    text = error_on_all(world, lambda: connect_all(backend, CPU, connect))
    assert text == f"the ranks could not connect by NCCL: rank {last}: unhandled cuda error"
    never.set()


def test_all_return_once_all_are_connected(world: World) -> None:
    backend, meeting = world.default_group.backend, world.default_group.private()
    assert connect_all(backend, CPU, lambda: (meeting.barrier(), world.rank)) == (None, world.rank)
    received = torch.zeros(1, dtype=torch.int64)
    sent = ax.isend(torch.tensor([world.rank]), (world.rank + 1) % world.size, tag=MAX_TAG)
    ax.recv(received, (world.rank - 1) % world.size, tag=MAX_TAG)  # no message of the above is left over
    sent.wait()
    assert received.item() == (world.rank - 1) % world.size
