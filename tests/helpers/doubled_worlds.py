"""Worlds of mock ranks whose tensors are on pretended GPUs, and move by NCCL's double.

`doubled()` makes every mock world such a world: the tensors are ordinary ones on the CPU, `KINDS["cpu"]` gives the
pretended GPU of the rank whose thread asks, and nccl4py is replaced by `nccl_double`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from axonmpi import World
from axonmpi.backends import MockBackend, NcclBackend
from axonmpi.backends.nccl import library
from axonmpi.launch.topology import Topology
from axonmpi.types import Seconds
from axonmpi.utils.device import KINDS
from helpers import device_double, nccl_double
from helpers.device_double import CPU, Gpu, pretended_device

__all__ = ["doubled", "make_world"]

_SEEDS = iter(range(1 << 60))
_activate = World.activate


def make_world(world_size: int = 1, *, timeout: Seconds | None = None, seed: int | None = None) -> World:
    """Make a world of ranks with pretended GPUs and return rank 0's view of it; local. See `World.mock`."""
    hosts = MockBackend.create_world(world_size, timeout=timeout)
    seed = next(_SEEDS) if seed is None else seed
    gpus = [Gpu(host, seed) for host in hosts]
    worlds = []
    for host, gpu, communicator in zip(hosts, gpus, nccl_double.connected(gpus), strict=True):
        with using(gpu):
            backend = NcclBackend._of(communicator, host.rank, world_size, CPU, None, host)
        worlds.append(World(backend, Topology.of([0] * world_size, host.rank)))
    for world in worlds:
        world.peers = tuple(worlds)
    return worlds[0]


@contextmanager
def using(gpu: Gpu | None) -> Iterator[None]:
    """Make a GPU this thread's current one for the duration of a `with` block; local."""
    before = device_double.current_gpu()
    device_double._thread.gpu = gpu
    try:
        yield
    finally:
        device_double._thread.gpu = before


@contextmanager
def _activate_with_gpu(world: World) -> Iterator[World]:
    """Activate a world on its GPU, see what torch computes, and fail if memory was used without order."""
    gpu = getattr(world.default_group.backend, "_device", None)
    if not isinstance(gpu, Gpu):
        with _activate(world):
            yield world
        return
    with _activate(world), using(gpu), gpu.watching():
        yield world
    gpu.look_for_freed()
    assert not gpu.faults, "\n".join(gpu.faults)


@contextmanager
def doubled() -> Iterator[None]:
    """Give every mock world that is made in a `with` block pretended GPUs; local."""
    found: Any = library.Library(nccl_double, (nccl_double.NCCLError, nccl_double.NcclInvalid))
    with (
        patch.dict(KINDS, {"cpu": pretended_device}),
        patch.object(library, "load", lambda: found),
        patch.object(World, "mock", staticmethod(make_world)),
        patch.object(World, "activate", _activate_with_gpu),
    ):
        yield


COMPARED = (
    "test_autograd.py::test_every_rank_learns_of_a_call_that_differs",
    "conformance/test_mismatch.py",
    "conformance/test_groups.py",
    "conformance/test_node_memory.py::test_calls_that_differ_are_an_error_on_every_rank",
)
"""Tests of calls that differ: NCCL does not compare calls, and the library does with `AXONMPI_DEBUG=1` only."""
_TAGS = "NCCL has no tags"
_NODE = "is about memory that the CPUs of a node share"
_LOG = "looks at the mock's log of operations"
_FILES = "what is offloaded from a GPU lies in pinned memory, and not in files"
_COMPARED = "GPUs do not compare calls"
NOT_OVER_DOUBLE: dict[str, str] = {
    "conformance/test_bits.py": "NCCL has an order of its own, rounds at each step, and MIN and MAX drop NaN",
    "conformance/test_node_counters.py": _NODE,
    "backends/mpi/test_large_counts.py": "is about counts of MPI",
    "conformance/test_async.py::test_a_time_limit_for_messages": _TAGS,
    "conformance/test_async.py::test_errors_come_through_work_on_every_rank": "calls that differ raise at once",
    "conformance/test_observer.py::test_blocking_operations": "sizes that receivers ask for are observed, too",
    "conformance/test_observer.py::test_asynchronous_operations": "no other thread runs asynchronous operations",
    "conformance/test_observer.py::test_an_operation_that_fails": "comparing the calls, which fails, is observed",
    "conformance/test_messages.py::test_messages_meet": "a message goes before the collectives called after it",
    "conformance/test_messages.py::test_a_message_of_another_size": "NCCL does not know the sizes of messages",
    "conformance/test_messages.py::test_done_becomes_true": _TAGS,
    "conformance/test_messages.py::test_the_memory_of_a_message": _TAGS,
    "conformance/test_messages.py::test_any_plan_of_messages": _TAGS,
    "conformance/test_groups.py::test_each_operation_is_a_function_and_a_method": _TAGS,
    "ddp/test_with_torch.py::test_shared_parameters_under_reentrant": "its mistake is one of order as well",
    "ddp/test_gradient_synchronizer.py::test_one_reduction_for_each_bucket": _LOG,
    "fsdp/test_devices.py::test_buckets_lie_where_the_gradients_do": "pretends memory elsewhere itself",
    "fsdp/test_memory.py::test_a_folder_that_was_made_for_files_goes_with_the_model": _FILES,
    "fsdp/test_memory.py::test_estimates_of_other_worlds": _NODE,
    "fsdp/test_memory.py::test_files_without_a_folder_of_their_own_are_on_a_disk": _FILES,
    "fsdp/test_memory.py::test_memory_is_freed_with_the_model": "the double keeps books of memory",
    "fsdp/test_memory.py::test_memory_that_is_measured_and_computed": _NODE,
    "fsdp/test_memory.py::test_mixed_precision_adds_what_is_computed_with": _NODE,
    "fsdp/test_memory.py::test_what_lies_in_files": _FILES,
    "groups/test_mesh.py::test_joined_axes_are_made_once_by_one_call": _LOG,
    "groups/test_mesh_partition.py::test_every_rank_gets_the_group_it_is_in": _LOG,
    "collectives/test_gradient_norm.py::test_one_message_a_norm": _LOG,
    "tensor/test_cost.py": _LOG,
    "tensor/layers/test_loss.py::test_one_message_and_one_tensor_of_the_size_of_the_logits": _LOG,
    "tensor/layers/test_norm.py::test_what_is_sent": _LOG,
    "tensor/test_regions.py::test_a_sequence_that_does_not_divide": _COMPARED,
    "train/test_layout.py::test_the_table_says_which_rank_has_what": _NODE,
}
"""Why tests are not run over the double: by folder, file, or name of a test, as `folder/file.py::test`."""


def compares_calls(item: Any) -> bool:
    """Say whether a test needs the ranks' calls to be compared; local."""
    return item.nodeid.removeprefix("tests/").startswith(COMPARED)


def not_over_double(item: Any) -> str | None:
    """Say why a test cannot run over the double, None where it can."""
    name = item.nodeid.removeprefix("tests/").partition("[")[0]
    return next((why for place, why in NOT_OVER_DOUBLE.items() if name.startswith(place)), None)
