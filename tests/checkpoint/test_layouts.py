"""Checkpoints in every layout of ranks, beside plain torch in one process: the same bytes, and training goes on."""

import zlib
from pathlib import Path

import pytest
import torch
from helpers.layouts import LAYOUTS, laid_out, optimizer_for, train_alone, whole_model
from safetensors.torch import load_file

import axonmpi as ax

OPTIMIZERS = ("adamw", "adamw_fused", "sgd", "adagrad")
BEFORE, AFTER = range(3), range(3, 6)


def shared_folder(world, tmp_path):
    return Path(ax.broadcast_object(str(tmp_path), 0, world.default_group))


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("[mo]*.safetensors")}


def check_sums(folder):
    for name, sums in load_file(folder / "checksums.safetensors").items():
        data = (folder / name).read_bytes()
        assert sums.tolist() == [zlib.crc32(data[at : at + (1 << 20)]) for at in range(0, len(data), 1 << 20)], name


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_loads_what_one_process_wrote_and_writes_the_same_bytes(layout, world, tmp_path):
    folder = shared_folder(world, tmp_path)
    number = LAYOUTS.index(layout)
    kind, tied = OPTIMIZERS[number % len(OPTIMIZERS)], number % 2 == 1
    alone = whole_model(tied=tied)
    optimizer = optimizer_for(alone.parameters(), kind)
    train_alone(alone, optimizer, BEFORE)
    if world.rank == 0:
        ax.save_checkpoint(folder / "alone", alone, optimizer, step=3, group=ax.ProcessGroup.mock())
    values = {name: value.clone() for name, value in alone.state_dict().items()}
    expected = train_alone(alone, optimizer, AFTER)
    ax.barrier(world.default_group)
    laid = laid_out(layout, world, optimizer=kind, tied=tied, seed=1)
    group = world.default_group
    info = ax.load_checkpoint(folder / "alone", laid.model, laid.optimizer, group=group)
    assert (info.step, info.missing, info.unexpected) == (3, (), ())
    ax.save_checkpoint(folder / "again", laid.model, laid.optimizer, step=3, group=group)
    assert files_of(folder / "again") == files_of(folder / "alone")
    check_sums(folder / "again")
    found = load_file(folder / "again/model.safetensors")
    assert all(torch.equal(found[name], values[name]) for name in found)
    assert values.keys() - found.keys() == ({"head.weight"} if tied else set())
    losses = [laid.step(number) for number in AFTER]
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("before", "after"), [("fsdp_tp", "pp_dp"), ("pp_tp", "fsdp"), ("tp", "pp_fsdp"), ("hybrid", "dp_tp")]
)
def test_training_goes_on_in_another_layout(before, after, world, tmp_path):
    folder = shared_folder(world, tmp_path)
    alone = whole_model(tied=True)
    expected = train_alone(alone, optimizer_for(alone.parameters()), [*BEFORE, *AFTER])
    first = laid_out(before, world, tied=True)
    losses = [first.step(number) for number in BEFORE]
    group = world.default_group
    ax.save_checkpoint(folder / "it", first.model, first.optimizer, blocking=False, group=group).wait()
    second = laid_out(after, world, tied=True, seed=1)
    ax.load_checkpoint(folder / "it", second.model, second.optimizer, group=group)
    losses += [second.step(number) for number in AFTER]
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks(2)
def test_ranks_load_what_more_ranks_wrote(world, tmp_path):
    """Two ranks write, one goes on alone."""
    folder = shared_folder(world, tmp_path)
    laid = laid_out("fsdp", world)
    for number in BEFORE:
        laid.step(number)
    ax.save_checkpoint(folder / "it", laid.model, laid.optimizer, group=world.default_group)
    alone = whole_model(seed=1)
    optimizer = optimizer_for(alone.parameters())
    ax.load_checkpoint(folder / "it", alone, optimizer, group=ax.ProcessGroup.mock())
    expected = [laid.step(number) for number in AFTER]
    assert train_alone(alone, optimizer, AFTER) == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks(2, 4)
def test_ranks_with_experts_of_their_own_have_a_trunk_in_common(world, tmp_path):
    folder = shared_folder(world, tmp_path)
    model = torch.nn.ModuleDict({"trunk": torch.nn.Linear(64, 64), f"expert{world.rank}": torch.nn.Linear(4, 4)})
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, number)
    ax.save_checkpoint(folder / "it", model, group=world.default_group)
    check_sums(folder / "it")
    found = load_file(folder / "it/model.safetensors")
    assert len(found) == 2 + 2 * world.size
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_model_has_the_names_of_the_model(world, tmp_path):
    model = whole_model()
    ax.save_checkpoint(tmp_path / "it", torch.compile(model), group=world.default_group)
    ax.load_checkpoint(tmp_path / "it", whole_model(seed=1), group=world.default_group)
    assert load_file(tmp_path / "it/model.safetensors").keys() == model.state_dict().keys()
