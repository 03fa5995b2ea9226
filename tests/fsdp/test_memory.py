"""How much memory sharded training takes, counted by hand, and what lies in files."""

import gc
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compare import assert_close
from helpers.models import STRATEGIES, Blocks, built, in_turn, new_group, train, trained_alone
from helpers.steps import adamw, optimizer_of, usual_step
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import CPUOffload, ShardingStrategy
from axonmpi.fsdp.offload import Files

WIDTH = 128
BLOCK, HEAD, COUNT = WIDTH * WIDTH + WIDTH, 3 * WIDTH + 3, 6
TOTAL = COUNT * BLOCK + HEAD
"""Parameter elements of a block, of the rest, number of blocks; and of all."""


def blocks() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(COUNT)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def by_hand(strategy: ShardingStrategy, world: int, local: int, states: int = 2) -> tuple[float, float, float]:
    """Bytes of a rank's parameters, gradients and optimizer state in float32, on nodes of `local` ranks."""
    ranks = {ShardingStrategy.NO_SHARD: 1, ShardingStrategy.HYBRID_SHARD: local}.get(strategy, world)
    parameters = divided = 4 * TOTAL / ranks
    if local < world and strategy is ShardingStrategy.SHARD_GRAD_OP:  # the whole model, once a node
        parameters = 4 * TOTAL / local
    if local < world and strategy is ShardingStrategy.FULL_SHARD:  # two blocks in turn, and the rest
        parameters = 4 * COUNT * BLOCK / world + 4 * (2 * BLOCK + HEAD) / local
    return parameters, divided, states * divided


def assert_near(
    stats: ax.FSDPMemoryStats, expected: tuple[float, float, float], world: int, states: int = 2
) -> None:
    got = stats.param_memory_bytes, stats.grad_memory_bytes, stats.optim_memory_bytes
    assert got == pytest.approx(expected, rel=0.1)
    assert (stats.total_params, stats.world_size) == (TOTAL, world)
    assert (stats.unsharded_bytes, stats.total_memory_bytes) == (4 * TOTAL * (2 + states), sum(got))
    assert stats.total_memory_mb() == sum(got) / 2**20
    assert abs(stats.memory_savings() - (1 - sum(expected) / (4 * TOTAL * (2 + states)))) < 0.03


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("strategy", "local"),
    [
        (ShardingStrategy.FULL_SHARD, 4),
        (ShardingStrategy.FULL_SHARD, 2),
        (ShardingStrategy.FULL_SHARD, 1),
        (ShardingStrategy.SHARD_GRAD_OP, 2),
        (ShardingStrategy.SHARD_GRAD_OP, 1),
        (ShardingStrategy.HYBRID_SHARD, 2),
        (ShardingStrategy.NO_SHARD, 4),
    ],
)
@pytest.mark.not_over_double("is about memory that the CPUs of a node share")
def test_memory_that_is_measured_and_computed_equals_what_is_counted_by_hand(world, monkeypatch, strategy, local):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", str(local))
    with new_group(world) as group:
        model = ax.FSDP(built(blocks), group, sharding_strategy=strategy)
        before = model.memory_stats()
        assert before.grad_memory_bytes == before.optim_memory_bytes == 0
        optimizer = adamw(model)  # as long as it lives, its state counts
        usual_step(model, optimizer, (torch.ones(2, WIDTH), torch.zeros(2, 3)))
        stats = model.memory_stats()
        assert_near(stats, by_hand(strategy, 4, local), 4)
        for other in STRATEGIES:
            assert_near(model.memory_estimate(other), by_hand(other, 4, local), 4)
        on_node = group.all_gather_object(stats.param_memory_bytes)[:local]
    if strategy is ShardingStrategy.HYBRID_SHARD or local == 4:
        copies = local if strategy is ShardingStrategy.NO_SHARD else 1  # what is in common counts once
        assert abs(sum(on_node) - 4 * TOTAL * copies) < 0.01 * 4 * TOTAL


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("local", "states"), [(1, 0), (4, 1), (16, 2)])
@pytest.mark.not_over_double("is about memory that the CPUs of a node share")
def test_estimates_of_other_worlds(world, local, states):
    model = ax.FSDP(built(blocks))
    for strategy in STRATEGIES:
        stats = model.memory_estimate(strategy, 16, ranks_per_node=local, optimizer_states=states)
        assert_near(stats, by_hand(strategy, 16, local, states), 16, states)
    on_one_node = model.memory_estimate(world_size=8, optimizer_states=states)
    assert_near(on_one_node, by_hand(ShardingStrategy.FULL_SHARD, 8, 8, states), 8, states)


@pytest.mark.ranks(4)
@pytest.mark.not_over_double("is about memory that the CPUs of a node share")
def test_mixed_precision_adds_what_is_computed_with(world):
    model = ax.FSDP(built(blocks), mixed_precision=True)
    shard, computed = 4 * TOTAL / 4, 2 * (2 * BLOCK + HEAD) / 4
    stats = model.memory_stats(), model.memory_estimate(), model.memory_estimate(mixed_precision=False)
    expected = shard + computed, shard + computed, shard
    assert [each.param_memory_bytes for each in stats] == pytest.approx(expected, rel=0.05)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("local", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("trained", [False, True], ids=["made", "trained"])
def test_a_dropped_model_is_freed_without_collecting_garbage(world, monkeypatch, strategy, local, trained):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", str(local))
    with new_group(world) as group:
        model = ax.FSDP(built(blocks), group, sharding_strategy=strategy)
        if trained:
            usual_step(model, adamw(model), (torch.ones(2, WIDTH), torch.zeros(2, 3)))
        flats = [weakref.ref(flat) for flat in model.runtime.flats]
        del model
        assert flats
        assert not any(flat() for flat in flats)


@pytest.mark.ranks(2)
def test_frozen_parameters_have_no_gradient_and_no_state(world):
    model = built(blocks)
    model[:3].requires_grad_(False)
    stats = ax.FSDP(model).memory_estimate()
    assert stats.grad_memory_bytes == pytest.approx(4 * (TOTAL - 3 * BLOCK) / 2, rel=0.05)
    assert stats.optim_memory_bytes == 2 * stats.grad_memory_bytes
    assert stats.unsharded_bytes == 4 * (4 * TOTAL - 3 * 3 * BLOCK)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells")
@pytest.mark.ranks(1)
def test_memory_of_the_process(world):
    model = ax.FSDP(built(blocks))
    stats, estimate = model.memory_stats(), model.memory_estimate()
    assert 0 < stats.resident_bytes <= stats.peak_bytes
    assert estimate.resident_bytes == estimate.peak_bytes == 0


@pytest.mark.ranks(1)
def test_one_rank_saves_nothing(world):
    for strategy in STRATEGIES:
        model = ax.FSDP(nn.Linear(3, 5), sharding_strategy=strategy)  # padded to twice its elements
        assert model.strategy is model.sharding_strategy is strategy
        assert model.memory_stats().memory_savings() == model.memory_estimate().memory_savings() == 0.0


# ---- files ------------------------------------------------------------------------------------------------------


def mappings(wanted: Callable[[str], bool]) -> list[list[int]]:
    """Return the addresses, from and to, of this process's mappings whose lines in /proc are wanted."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [[int(address, 16) for address in line.split()[0].split("-")] for line in lines if wanted(line)]


def in_files(tensor: Tensor, folder: Path) -> bool:
    """Say whether a tensor lies in files of a folder, which have no names any more."""
    found = mappings(lambda line: str(folder) in line and line.endswith("(deleted)"))
    return any(low <= tensor.data_ptr() < high for low, high in found)


def mapped() -> int:
    """Bytes that this process may write to, by itself or with others, whether it uses them or not."""
    return sum(high - low for low, high in mappings(lambda line: "w" in line.split()[1]))


OPTIMIZERS = (
    adamw,
    optimizer_of("NAdam", lr=0.1, foreach=True),
    optimizer_of("Adagrad", lr=0.1, initial_accumulator_value=0.5),
)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is mapped")
@pytest.mark.ranks(2)
@in_turn(
    "case",
    [
        (CPUOffload.PARAMS, adamw),
        *((CPUOffload.FULL, make) for make in OPTIMIZERS),
    ],
)
@pytest.mark.not_over_double("what is offloaded from a GPU lies in pinned memory, and not in files")
def test_what_lies_in_files(world, wrap, shared_tmp_path, case):
    offload, optimizer_of = case
    folder = shared_tmp_path / "made" / "here"
    model = wrap(built(Blocks), cpu_offload=offload, offload_folder=str(folder))
    world.default_group.barrier()  # replicas make files of their own
    assert list(folder.iterdir()) == []
    world.default_group.barrier()  # the first step makes more of them
    optimizer = train(model, world, 2, optimizer_of)
    assert_close(model.full_state_dict(), trained_alone(Blocks, 2, optimizer_of).state_dict())
    assert list(folder.iterdir()) == []
    for part in (p for name, p in model.named_parameters() if p.numel() and name.startswith("blocks.")):
        others = [part.grad, *(v for v in optimizer.state[part].values() if isinstance(v, Tensor) and v.dim())]
        assert in_files(part, folder)
        assert [in_files(other, folder) for other in others] == [offload is CPUOffload.FULL] * len(others)


def collect(group: ax.ProcessGroup) -> None:
    """Collect garbage, one rank after the other: of threads that do so at once all but one do nothing."""
    for rank in range(group.size):
        if rank == group.rank:
            gc.collect()
        group.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "setting", [pytest.param("one_node", marks=pytest.mark.real_ranks), "replicas"], indirect=True
)
@pytest.mark.not_over_double("what is offloaded from a GPU lies in pinned memory, and not in files")
def test_a_folder_that_was_made_for_files_goes_with_the_model(world, wrap, shared_tmp_path):
    for folder in (shared_tmp_path / "made" / "here", shared_tmp_path):
        model = wrap(built(Blocks), cpu_offload=CPUOffload.FULL, offload_folder=folder)
        optimizer = train(model, world, 1)
        world.default_group.barrier()
        assert folder.exists()
        world.default_group.barrier()
        del model, optimizer
        collect(world.default_group)
        assert list(shared_tmp_path.iterdir()) == []


@pytest.mark.ranks(2)
@in_turn("context", ["no_sync", "full_parameters"])
def test_a_model_that_is_dropped_is_freed(world, wrap, context):
    model = wrap(built(lambda: nn.Sequential(blocks(), nn.BatchNorm1d(3))))
    optimizer = adamw(model)
    with getattr(model, context)():
        loss = model(torch.ones(2, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    kept = [model, model.module, *model.parameters(), *model.buffers(), optimizer]
    kept += [part.grad for part in model.parameters() if part.grad is not None]
    kept += [value for state in optimizer.state.values() for value in state.values()]
    references = [weakref.ref(each) for each in kept]
    del model, kept, optimizer, loss
    collect(world.default_group)
    assert [each() for each in references if each() is not None] == []


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells")
@pytest.mark.ranks(2)
@pytest.mark.real_ranks
@pytest.mark.not_over_double("the double keeps books of memory")
def test_memory_is_freed_with_the_model(world):
    """36 models of 8 MiB, one after the other; the allocators of all threads keep about 1 MiB of each."""

    def dropped() -> None:
        model = ax.FSDP(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2))), group)
        model(torch.ones(1, 1024)).sum().backward()
        del model
        collect(group)

    group = world.default_group
    for _ in range(6):
        dropped()
    before = mapped()
    for _ in range(36):
        dropped()
    assert mapped() - before < 72 << 20  # half of their parts' gradients alone


def test_a_folder_that_another_rank_removes_meanwhile_is_made_anew(tmp_path, monkeypatch):
    files, made, removed = Files(tmp_path / "made" / "here"), tempfile.mkstemp, []

    def remove_first(**where: Any) -> tuple[int, str]:
        if len(removed) < 3:
            removed.append(where["dir"].rmdir())
        return made(**where)

    monkeypatch.setattr(tempfile, "mkstemp", remove_first)
    assert (files.zeros((2, 3), torch.float32).tolist(), len(removed)) == ([[0.0] * 3] * 2, 3)


EXCHANGES = {
    "link": lambda path, victim: path.symlink_to(victim),
    "other file": lambda path, victim: path.hardlink_to(victim),
    "FIFO": lambda path, victim: os.mkfifo(path),
}


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_a_file_whose_name_has_become_another_files_is_not_written(tmp_path, monkeypatch, exchange):
    files, make, victim = Files(tmp_path), Files._make, tmp_path / "victim"
    victim.write_bytes(b"mine")

    def make_and_lose(self: Files, nbytes: int) -> tuple[Path, int]:
        path, inode = make(self, nbytes)
        path.rename(path.with_name("away"))
        exchange(path, victim)
        return path, inode

    monkeypatch.setattr(Files, "_make", make_and_lose)
    with pytest.raises(OSError, match=r"expected|symbolic links"):
        files.zeros((64,), torch.float32)
    assert victim.read_bytes() == b"mine"


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="no folder is known to be memory")
@pytest.mark.ranks(2)
@pytest.mark.not_over_double("what is offloaded from a GPU lies in pinned memory, and not in files")
def test_files_without_a_folder_of_their_own_are_on_a_disk(world, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")  # as TMPDIR=/dev/shm
    model = ax.FSDP(built(Blocks), cpu_offload=CPUOffload.FULL)
    train(model, world, 1)
    lines = Path("/proc/self/maps").read_text().splitlines()
    own = [line for line in lines if line.rpartition("/")[2].startswith("axonmpi-")]  # by the file's own name
    assert {("/dev/shm/" in line, line.endswith("(deleted)")) for line in own} == {(False, True)}
