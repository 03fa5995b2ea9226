"""What carries a call of a group with GPUs: NCCL or the CPUs' backend. The "GPU" here is torch's device meta."""

from unittest.mock import Mock

import pytest
import torch
from helpers import nccl_double

from axonmpi import CollectiveMismatchError, CommunicatorError, NcclBackend, World
from axonmpi.backends.nccl import library
from axonmpi.record import files

pytestmark = pytest.mark.ranks(2)
META = torch.device("meta")


@pytest.fixture(autouse=True)
def _pretended_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: nccl_double.LIBRARY)


@pytest.fixture
def _debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXONMPI_DEBUG", "1")


def backend_of(world: World) -> NcclBackend:
    """Return a backend whose communicator only keeps what it is told."""
    communicator = Mock(**{"get_async_error.return_value": 0})
    return NcclBackend._of(communicator, world.rank, world.size, META, None, world.default_group.backend)


def told(backend: NcclBackend) -> list[str]:
    names = [name for name, *_ in backend._streams.main.communicator.method_calls]
    return [name for name in names if name != "get_async_error"]


def test_tensors_go_by_where_they_are_and_barriers_by_the_cpus(world: World) -> None:
    backend, other = backend_of(world), 1 - world.rank
    assert (backend.on(META), backend.on(torch.device("cpu"))) == (backend, backend.host)
    on_cpu = torch.ones(3)
    backend.all_reduce(on_cpu)
    assert on_cpu.tolist() == [2.0] * 3
    backend.barrier()
    sent = backend.isend(torch.tensor([world.rank]), other, tag=7)
    backend.recv(received := torch.zeros(1, dtype=torch.int64), other, tag=7)
    sent.wait()
    assert received.item() == other
    for tensor, name in ((received, "mock"), (torch.zeros(1, device=META), "nccl")):
        with pytest.raises(CommunicatorError, match=f"the {name} backend receives from a named rank only"):
            backend.irecv(tensor, None)
    assert backend.scatter(torch.arange(2) if world.rank == 1 else None, 1).tolist() == [world.rank]
    assert told(backend) == []
    backend.all_reduce(torch.ones(3, device=META))
    backend.broadcast(torch.ones(3, device=META), 1)
    assert backend.scatter(torch.ones(2, device=META) if world.rank == 1 else None, 1).device == META
    assert told(backend)[:2] == ["reduce", "broadcast"]
    with pytest.raises(ValueError, match="expected tensors on one device, got them on cpu and meta"):
        backend.all_to_all([torch.ones(1), torch.ones(1, device=META)])


def test_the_record_of_a_rank_has_both(world: World) -> None:
    host = world.default_group.backend
    host.notes = files.own_record().join(world.rank, 2, 70 + world.rank)
    for device in (META, "cpu"):
        backend_of(world).all_reduce(torch.ones(3, device=device))
    assert host.notes.count == 2


@pytest.mark.usefixtures("_debug")
def test_a_call_on_the_cpu_and_one_on_a_gpu_differ(world: World) -> None:
    backend = backend_of(world)
    with pytest.raises(CollectiveMismatchError, match=r"\[3\], SUM\) at .* on cpu\n.*\[3\], SUM\) .* on meta"):
        backend.all_reduce(torch.ones(3, device=META if world.rank else "cpu"))
    assert told(backend) == []
