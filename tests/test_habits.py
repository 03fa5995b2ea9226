"""What people write out of habit: names in place of enums, time spans, other libraries' calls."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
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
        model = ax.DDP(nn.Linear(2, 2), sync_strategy=name)
        assert model.sync_strategy is ax.GradSyncStrategy[name.upper().replace("-", "_")]
        assert ax.GradientSynchronizer(name).strategy is model.sync_strategy
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
        tensor = torch.ones(2)
        ax.all_reduce(tensor, name)
        assert tensor.tolist() == [expected] * 2


@pytest.mark.ranks(2)
def test_other_names_are_answered_with_those_there_are(world) -> None:
    refusals = {
        "sync_strategy: .*SYNCHRONOUS, OVERLAPPED, NO_SYNC, got 'none'": lambda: ax.DDP(
            nn.Linear(2, 2), sync_strategy="none"
        ),
        "strategy: .*SYNCHRONOUS, OVERLAPPED, NO_SYNC, got 'none'": lambda: ax.GradientSynchronizer("none"),
        r"sharding_strategy: .*FULL_SHARD \('full'\), SHARD_GRAD_OP \('grad'\).* got 'zero3'": lambda: ax.FSDP(
            nn.Linear(2, 2), sharding_strategy="zero3"
        ),
        "cpu_offload: .*NONE, PARAMS, FULL, got 'all'": lambda: ax.FSDP(nn.Linear(2, 2), cpu_offload="all"),
        r"schedule: .*GPIPE, ONE_F_ONE_B \('1f1b'\).* got 'pipedream'": lambda: ax.Pipeline.from_modules(
            [nn.Linear(2, 2) for _ in range(world.size)], schedule="pipedream"
        ),
        "op: .*SUM, PRODUCT, MIN, MAX, AVERAGE, .*, got 'total'": lambda: ax.all_reduce(torch.ones(2), "total"),
    }
    for words, call in refusals.items():
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match=r"op: .*SUM, PRODUCT, MIN, MAX, AVERAGE, BAND, BOR, BXOR, got 0"):
        ax.all_reduce(torch.ones(2), 0)
    ax.barrier()


# ---- spans of time ----


def test_spans_of_time_serve_for_seconds() -> None:
    """Those of `Work.wait` are tested with asynchronous operations."""
    ax.World.init("mock", timeout=timedelta(minutes=2)).close()
    worlds = ax.World.mock(2, timeout=timedelta(milliseconds=30)).peers
    with pytest.raises(CollectiveTimeoutError, match=r"0\.03 s"):
        worlds[0].default_group.barrier()
    with pytest.raises(CollectiveTimeoutError, match=r"within 0\.2 s"):
        ax.testing.run_ranks(
            2, lambda world: ax.recv(torch.ones(1), 1 - world.rank), timeout=timedelta(seconds=0.2)
        )
    for wrong in (timedelta(0), timedelta(seconds=-1), "1s", True):
        with pytest.raises(ValueError, match="timeout: expected a positive number of seconds, a timedelta or"):
            ax.World.init("mock", timeout=wrong)


# ---- calls of other libraries ----


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_messages_send_people_on(world) -> None:
    t, group = torch.ones(2, 2), world.default_group
    refusals = {
        r"group: .* got int; broadcast_from\(t, src\)": lambda: ax.broadcast(t, 0),
        "op: .* name the group, as group=": lambda: ax.all_reduce(t, group),
        r"group: .* got int; .*the dimension is named, as dim=": lambda: ax.all_gather(t, 1),
        r"group: .* got ReduceOp; .* as dim=": lambda: ax.reduce_scatter_sum(t, ax.ReduceOp.SUM),
        "group: .* got int; the tag is named, as tag=": lambda: ax.isend(t, 0, 7),
        "group: .* got World; its group of all ranks is its default_group": lambda: ax.barrier(world),
        "group: .* got Tensor; the result is returned": lambda: ax.all_gather([t, t], t),
        "expected a torch.Tensor, got list; .* results are returned": lambda: ax.all_gather([t, t]),
        "dst: .* name the group, as group=": lambda: ax.gather_tensor(t, group),
        "async_op: expected True or False.*": lambda: group.all_reduce(t, ax.ReduceOp.SUM, group),
        "dim: .* name the group, as group=": lambda: group.all_gather(t, group),
    }
    for words, call in refusals.items():
        with pytest.raises(TypeError, match=words):
            call()
    for flag in (0, 1, None, "yes"):
        with pytest.raises(TypeError, match="async_op: expected True or False"):
            ax.all_reduce(t, async_op=flag)
    ax.all_reduce(t)  # a plan for it is kept, which has to ask for the flag as well
    with pytest.raises(TypeError, match="async_op: expected True or False"):
        ax.all_reduce(t, async_op=0)
    ax.barrier()


def test_backends_that_are_missing() -> None:
    for name, words in (("cuda", "got 'cuda'$"), ("gloo", "sent by 'mpi'"), ("ucc", "got 'ucc'$")):
        with pytest.raises(ValueError, match=f"backend: expected one of .*'nccl'.*{words}"):
            ax.World.init(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["nccl", "mpi+nccl"])
def test_nccl_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    alone = Started(None, Topology.of([0], 0), None, 1, "one rank without MPI")
    monkeypatch.setattr(world_module.runtime, "start_world", lambda *_, **__: alone)
    with pytest.raises(
        ax.NcclError, match=r"(?s)no GPU: .*\nInstall a torch with CUDA, ask for GPUs .*'mpi'.* CPU"
    ):
        ax.World.init(name)


@pytest.mark.ranks(2)
def test_wrong_dimensions(world) -> None:
    """As torch an IndexError; as every mistake in a call a ValueError."""
    t = torch.ones(2, 2)
    for call in (
        lambda: ax.all_gather(t, dim=2),
        lambda: ax.reduce_scatter_sum(t, dim=-3),
        lambda: ax.autograd.scatter(t, dim=5),
        lambda: ax.autograd.all_to_all(t, split_dim=0, concat_dim=2),
        lambda: ax.tensor.join_sequence(t, dim=2),
    ):
        with pytest.raises(DimensionError, match="dim: expected -2 to 1 for a tensor of 2 dimensions, got"):
            call()
    assert issubclass(DimensionError, ValueError)
    assert issubclass(DimensionError, IndexError)
    ax.barrier()
