"""What carries a call of a group with GPUs: NCCL or the CPUs' backend. The "GPU" here is torch's device meta."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import nccl_double

from axonmpi import CollectiveMismatchError, NcclBackend, World
from axonmpi.backends.nccl import library
from axonmpi.launch import board
from axonmpi.testing import run_ranks

META = torch.device("meta")


class Recorder:
    """In place of nccl4py's communicator: keeps the names of what it is told."""

    is_valid = True

    def __init__(self) -> None:
        self.told: list[str] = []

    def get_async_error(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_options: self.told.append(name)


@pytest.fixture(autouse=True)
def _pretended_library():
    found = library.Library(nccl_double, (nccl_double.NCCLError, nccl_double.NcclInvalid))
    with patch.object(library, "load", lambda: found):
        yield


def backend_of(world: World) -> tuple[NcclBackend, Recorder]:
    communicator, host = Recorder(), world.default_group.backend
    return NcclBackend._of(communicator, world.rank, world.size, META, None, host), communicator


def test_tensors_go_by_where_they_are_and_barriers_by_the_cpus() -> None:
    def body(world: World) -> None:
        backend, nccl = backend_of(world)
        assert (backend.on(META), backend.on(torch.device("cpu"))) == (backend, backend.host)
        on_cpu = torch.ones(3)
        backend.all_reduce(on_cpu)
        assert on_cpu.tolist() == [2.0] * 3
        backend.barrier()
        sent = backend.isend(torch.tensor([world.rank]), 1 - world.rank, tag=7)
        backend.recv(received := torch.zeros(1, dtype=torch.int64), 1 - world.rank, tag=7)
        sent.wait()
        assert received.item() == 1 - world.rank
        assert backend.scatter(torch.arange(2) if world.rank == 1 else None, 1).tolist() == [world.rank]
        assert nccl.told == []
        backend.all_reduce(torch.ones(3, device=META))
        backend.broadcast(torch.ones(3, device=META), 1)
        assert backend.scatter(torch.ones(2, device=META) if world.rank == 1 else None, 1).device == META
        assert nccl.told[:2] == ["reduce", "broadcast"]
        with pytest.raises(ValueError, match="expected tensors on one device, got them on cpu and meta"):
            backend.all_to_all([torch.ones(1), torch.ones(1, device=META)])

    run_ranks(2, body)


def test_the_page_of_a_rank_has_both() -> None:
    def body(world: World) -> None:
        host = world.default_group.backend
        host.notes = board.own_page().join(world.rank, 2, 70 + world.rank)
        backend, _ = backend_of(world)
        for device in (META, "cpu"):
            backend.all_reduce(torch.ones(3, device=device))
        assert host.notes.count == 2

    run_ranks(2, body)


def test_a_call_on_the_cpu_and_one_on_a_gpu_differ(monkeypatch) -> None:
    monkeypatch.setenv("AXONMPI_DEBUG", "1")

    def body(world: World) -> None:
        backend, nccl = backend_of(world)
        with pytest.raises(CollectiveMismatchError, match=r"\[3\], SUM\) at .* on cpu\n.*\[3\], SUM\) .* on meta"):
            backend.all_reduce(torch.ones(3, device=META if world.rank else "cpu"))
        assert nccl.told == []

    run_ranks(2, body)
