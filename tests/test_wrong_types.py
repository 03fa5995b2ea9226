"""Arguments of wrong types that would pass for something else: refused by name, on mock and on real ranks."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers.compare import refused
from torch import nn

import axonmpi as ax


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def calls(world: ax.World) -> dict[str, Callable[[], object]]:
    """Calls by what their errors say."""
    backend, ranks = world.default_group.backend, world.size
    mesh = ax.DeviceMesh({"dp": ranks})
    synchronizer = ax.GradientSynchronizer("no_sync")
    synchronizer.prepare(0)
    fsdp = ax.FSDP(linear())
    logits, targets = torch.ones(2, 2), torch.zeros(2, dtype=torch.int64)

    attention = partial(ax.tensor_parallel_attention, 4 * ranks, ranks)
    pipeline = partial(ax.Pipeline.from_modules, [linear() for _ in range(ranks)])
    loss = partial(ax.parallel_cross_entropy, logits, targets)
    return {
        # numbers
        "dp: expected an integer, got 0.0": lambda: mesh.rank_at(dp=0.0),
        "dp: expected an integer, got False": lambda: mesh.rank_at(dp=False),
        "rank: expected an integer, got 0.0": lambda: mesh.coordinates_of(0.0),
        "size: expected an integer, got True": lambda: world.subworld(True),
        "num_threads: expected": lambda: ax.World.init("mock", num_threads=2.5),
        "world_size: expected an integer, got True": lambda: fsdp.memory_estimate(world_size=True),
        "optimizer_states: expected at least 0, got -1": lambda: fsdp.memory_estimate(optimizer_states=-1),
        "ranks_per_node: expected at least 1, got 0": lambda: fsdp.memory_estimate(ranks_per_node=0),
        "vocabulary: expected an integer, got 2.0": lambda: loss(vocabulary=2.0),
        "ignore_index: expected an integer, got 1.5": lambda: loss(ignore_index=1.5),
        "label_smoothing: expected a number, got True": lambda: loss(label_smoothing=True),
        "num_kv_heads: expected an integer, got 1.0": lambda: attention(num_kv_heads=1.0),
        "head_dim: expected an integer, got True": lambda: attention(head_dim=True),
        "p: expected a number, got True": lambda: attention(dropout=True),
        "sequence_dim: expected an integer, got True": lambda: ax.RowParallelLinear(ranks, 4, sequence_dim=True),
        "heads: expected an integer, got True": lambda: ax.tensor.Column(heads=True),
        "parts: expected an integer, got 2.0": lambda: ax.tensor.Column(parts=2.0),
        "max_norm: expected a number, got '1'": lambda: ax.clip_grad_norm(linear(), "1"),
        # ranks
        f"ranks: expected {ranks}, as the backend has, got {ranks + 1}": lambda: ax.ProcessGroup(
            backend, range(ranks + 1)
        ),
        "ranks: expected different ranks, got [0, 0]": lambda: ax.ProcessGroup(backend, [0, 0]),
        "ranks: expected an integer, got '0'": lambda: ax.ProcessGroup(backend, "0" * ranks),
        "ranks: expected a rank of the group as an int, got '0'": lambda: ax.new_group("01"),
        "src: expected a rank of the group as an int, got None": lambda: ax.irecv(logits, None),
        # one thing for many, and things for functions
        "names: expected a tuple of names, got 'num_heads'": lambda: ax.tensor.Divide("num_heads"),
        "expected a list of tensors, got generator": lambda: ax.sync_gradients(t for t in [logits]),
        "axis: expected one of the mesh's, 'dp', got ['dp']": lambda: mesh.group(["dp"]),
        "world: expected an axonmpi.World or None, got ProcessGroup": lambda: ax.DeviceMesh(
            {"dp": ranks}, world.default_group
        ),
        "group: expected an axonmpi.ProcessGroup or None, got int": lambda: synchronizer.sync_all(0),
        "loss_fn: expected a function or None, got 'mse'": lambda: pipeline(loss_fn="mse"),
        "loss_fn: expected a function or None, got the class MSELoss": lambda: pipeline(loss_fn=nn.MSELoss),
        "loss_weight: expected a function or None, got 1.0": lambda: pipeline(loss_weight=1.0),
        "param_init_fn: expected a function or None, got 3": lambda: ax.FSDP(linear(), param_init_fn=3),
        "generator: expected a torch.Generator or None, got 3": lambda: ax.ShardedDropout(generator=3),
        "script_or_code: expected a path or source code, got 5": lambda: ax.testing.launch(2, 5),
    }


@pytest.mark.ranks(2)
def test_wrong_types_are_refused_by_name(world) -> None:
    refused((TypeError, ValueError), *((call, re.escape(words)) for words, call in calls(world).items()))
    ax.barrier()
