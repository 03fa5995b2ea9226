"""Checkpoints in every layout of ranks, beside plain torch in one process: the same bytes, and training goes on."""

import pytest
import torch
from helpers.checkpoints import assert_checksums
from helpers.compare import assert_equal
from helpers.layouts import LAYOUTS, OPTIMIZERS, laid_out, optimizer_for, train_alone, whole_model
from safetensors.torch import load_file

import axonmpi as ax

BEFORE, AFTER = range(2), range(2, 4)
UNREPLICATED = ax.ProcessGroup.mock()


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("[mo]*.safetensors")}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=LAYOUTS)
def test_a_layout_loads_what_one_process_wrote_and_writes_the_same_bytes(number, world, shared_tmp_path):
    alone, again = shared_tmp_path / "alone", shared_tmp_path / "again"
    kind, tied = [*OPTIMIZERS][number % len(OPTIMIZERS)], number % 2 == 1
    model = whole_model(tied=tied)
    optimizer = optimizer_for(model.parameters(), kind)
    train_alone(model, optimizer, BEFORE)
    if world.rank == 0:
        ax.save_checkpoint(alone, model, optimizer, step=3, group=UNREPLICATED)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train_alone(model, optimizer, AFTER)
    ax.barrier()
    laid = laid_out([*LAYOUTS][number], world, optimizer=kind, tied=tied, seed=1)
    info = ax.load_checkpoint(alone, laid.model, laid.optimizer)
    assert (info.step, info.missing, info.unexpected) == (3, (), ())
    ax.save_checkpoint(again, laid.model, laid.optimizer, step=3)
    assert files_of(again) == files_of(alone)
    assert_checksums(again)
    found = load_file(again / "model.safetensors")
    assert values.keys() - found.keys() == ({"head.weight"} if tied else set())
    assert_equal(found, {name: values[name] for name in found})
    assert [laid.step(number) for number in AFTER] == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks(2, 4)
def test_ranks_with_experts_of_their_own_have_a_trunk_in_common(world, shared_tmp_path):
    model = torch.nn.ModuleDict({"trunk": torch.nn.Linear(64, 64), f"expert{world.rank}": torch.nn.Linear(4, 4)})
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, number)
    ax.save_checkpoint(shared_tmp_path / "it", model)
    assert_checksums(shared_tmp_path / "it")
    found = load_file(shared_tmp_path / "it/model.safetensors")
    assert len(found) == 2 + 2 * world.size
    own = model.state_dict()
    assert_equal({name: found[name] for name in own}, own)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_model_has_the_names_of_the_model(world, tmp_path):
    model = whole_model()
    ax.save_checkpoint(tmp_path / "it", torch.compile(model))
    ax.load_checkpoint(tmp_path / "it", whole_model(seed=1))
    assert load_file(tmp_path / "it/model.safetensors").keys() == model.state_dict().keys()
