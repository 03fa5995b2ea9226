"""What people write out of habit: names in place of enums, time spans, other libraries' calls."""

from datetime import timedelta
from functools import partial

import pytest
import torch
from helpers.compare import refused
from torch import nn

import axonmpi as ax
from axonmpi.errors import CollectiveTimeoutError, DimensionError
from axonmpi.groups import world as world_module
from axonmpi.launch.start import Started
from axonmpi.launch.topology import Topology
from axonmpi.pipeline import make_schedule

# ---- names for enums ----


@pytest.mark.ranks(2)
def test_names_serve_for_enums(world) -> None:
    for name in ("overlapped", "OVERLAPPED", "synchronous", "no_sync", "no-sync"):
        named = [ax.DDP(nn.Linear(2, 2), sync_strategy=name).sync_strategy, ax.GradientSynchronizer(name).strategy]
        assert named == [ax.GradSyncStrategy[name.upper().replace("-", "_")]] * 2
    for name, strategy in (("full", "FULL_SHARD"), ("full_shard", "FULL_SHARD"), ("Grad", "SHARD_GRAD_OP")):
        fsdp = ax.FSDP(nn.Linear(2, 2), sharding_strategy=name)
        assert fsdp.sharding_strategy is ax.ShardingStrategy[strategy]
        assert fsdp.memory_estimate("none").total_params == fsdp.memory_estimate().total_params
    assert ax.FSDP(nn.Linear(2, 2), cpu_offload="none").sharding_strategy is ax.ShardingStrategy.FULL_SHARD
    for name in ("gpipe", "1f1b", "ONE_F_ONE_B"):
        stages = [nn.Linear(2, 2) for _ in range(world.size)]
        charted = ax.Pipeline.from_modules(stages, schedule=name, num_microbatches=4).schedule_chart()
        meant = ax.PipelineSchedule.GPIPE if name == "gpipe" else ax.PipelineSchedule.ONE_F_ONE_B
        assert charted == ax.Pipeline.from_modules(stages, schedule=meant, num_microbatches=4).schedule_chart()
        assert make_schedule(name, 2, 4).actions == make_schedule(meant, 2, 4).actions
    for name, expected in (("sum", world.size), ("MAX", 1), ("average", 1)):
        ax.all_reduce(tensor := torch.ones(2), name)
        assert tensor.tolist() == [expected] * 2


@pytest.mark.ranks(2)
def test_other_names_are_answered_with_those_there_are(world) -> None:
    t = torch.ones(2)
    refused(
        (TypeError, ValueError),
        (
            lambda: ax.DDP(nn.Linear(2, 2), sync_strategy="none"),
            "sync_strategy: .*SYNCHRONOUS, OVERLAPPED, NO_SYNC, got 'none'",
        ),
        (lambda: ax.GradientSynchronizer("none"), "strategy: .*SYNCHRONOUS, OVERLAPPED, NO_SYNC, got 'none'"),
        (
            lambda: ax.FSDP(nn.Linear(2, 2), sharding_strategy="zero3"),
            r"sharding_strategy: .*FULL_SHARD \('full'\), SHARD_GRAD_OP \('grad'\).* got 'zero3'",
        ),
        (lambda: ax.FSDP(nn.Linear(2, 2), cpu_offload="all"), "cpu_offload: .*NONE, PARAMS, FULL, got 'all'"),
        (
            lambda: ax.Pipeline.from_modules([nn.Linear(2, 2)] * world.size, schedule="pipedream"),
            r"schedule: .*GPIPE, ONE_F_ONE_B \('1f1b'\).* got 'pipedream'",
        ),
        (lambda: ax.all_reduce(t, "total"), "op: .*SUM, PRODUCT, MIN, MAX, AVERAGE, .*, got 'total'"),
        (lambda: ax.all_reduce(t, 0), "op: .*SUM, PRODUCT, MIN, MAX, AVERAGE, BAND, BOR, BXOR, got 0"),
    )
    ax.barrier()


# ---- spans of time ----


def test_spans_of_time_serve_for_seconds() -> None:
    """Those of `Work.wait` are tested with asynchronous operations."""
    ax.World.init("mock", timeout=timedelta(minutes=2)).close()
    first = ax.World.mock(2, timeout=timedelta(milliseconds=30))
    refused(CollectiveTimeoutError, (first.default_group.barrier, r"0\.03 s"))

    with pytest.raises(CollectiveTimeoutError, match=r"within 0\.2 s"):
        ax.testing.run_ranks(
            2, lambda world: ax.recv(torch.ones(1), 1 - world.rank), timeout=timedelta(seconds=0.2)
        )
    message = "timeout: expected a positive number of seconds, a timedelta or"
    wrong = (timedelta(0), timedelta(seconds=-1), "1s", True)
    refused(ValueError, *((partial(ax.World.init, "mock", timeout=timeout), message) for timeout in wrong))


# ---- calls of other libraries ----


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_messages_send_people_on(world) -> None:
    t, group = torch.ones(2, 2), world.default_group
    ax.all_reduce(t)  # a plan for it is kept, which has to ask for the flag as well
    refused(
        TypeError,
        (lambda: ax.broadcast(t, 0), r"group: .* got int; broadcast_from\(t, src\)"),
        *(
            (partial(call, t, group, 0), "group: .* got int; the rank stands before the group")
            for call in (ax.broadcast_from, ax.gather_tensor, ax.scatter_tensor)
        ),
        (lambda: ax.all_reduce(t, group), "op: .* name the group, as group="),
        (lambda: ax.all_gather(t, 1), r"group: .* got int; .*the dimension is named, as dim="),
        (lambda: ax.reduce_scatter_sum(t, ax.ReduceOp.SUM), r"group: .* got ReduceOp; .* as dim="),
        (lambda: ax.isend(t, 0, 7), "group: .* got int; the tag is named, as tag="),
        (lambda: ax.barrier(world), "group: .* got World; its group of all ranks is its default_group"),
        (lambda: ax.all_gather([t, t], t), "group: .* got Tensor; the result is returned"),
        (lambda: ax.all_gather([t, t]), "expected a torch.Tensor, got list; .* results are returned"),
        (lambda: ax.gather_tensor(t, group), "dst: .* name the group, as group="),
        (lambda: group.all_reduce(t, ax.ReduceOp.SUM, group), "async_op: expected True or False.*"),
        (lambda: group.all_gather(t, group), "dim: .* name the group, as group="),
        *(
            (partial(ax.all_reduce, each, async_op=flag), "async_op: expected True or False")
            for flag in (0, 1, None, "yes")
            for each in (t, torch.ones(5))
        ),
    )
    ax.barrier()


def test_backends_that_are_missing() -> None:
    expected = "backend: expected one of .*'nccl'.*"
    answers = {"cuda": "got 'cuda'$", "gloo": "sent by 'mpi'", "ucc": "got 'ucc'$"}
    refused(ValueError, *((partial(ax.World.init, name), expected + words) for name, words in answers.items()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["nccl", "mpi+nccl"])
def test_nccl_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    alone = Started(None, Topology.of([0], 0), None, 1, "one rank without MPI")
    monkeypatch.setattr(world_module.runtime, "start_world", lambda *_, **__: alone)
    message = r"(?s)no GPU: .*\nInstall a torch with CUDA, ask for GPUs .*'mpi'.* CPU"
    refused(ax.NcclError, (partial(ax.World.init, name), message))


@pytest.mark.ranks(2)
def test_wrong_dimensions(world) -> None:
    """As torch an IndexError; as every mistake in a call a ValueError."""
    t, message = torch.ones(2, 2), "dim: expected -2 to 1 for a tensor of 2 dimensions, got"
    refused(
        DimensionError,
        (lambda: ax.all_gather(t, dim=2), message),
        (lambda: ax.reduce_scatter_sum(t, dim=-3), message),
        (lambda: ax.autograd.scatter(t, dim=5), message),
        (lambda: ax.autograd.all_to_all(t, split_dim=0, concat_dim=2), message),
        (lambda: ax.tensor.join_sequence(t, dim=2), message),
    )
    assert {ValueError, IndexError} <= set(DimensionError.__mro__)
    ax.barrier()
