"""The tools for checkpoints: which files are whole, and the same in formats of torch, loaded with torch alone."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.checkpoints import by_name, cut_off, flip, on_first
from helpers.compare import assert_equal, refused
from helpers.layouts import optimizer_for, train_alone, whole_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import StepLR

import axonmpi as ax
from axonmpi.checkpoint.files.checksums import BLOCK_BYTES
from axonmpi.checkpoint.tools import convert_checkpoint, describe_checkpoint, verify_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
ALONE = ax.ProcessGroup.mock()
AFTER = range(3, 5)


def made(seed=1):
    model = whole_model(tied=True, seed=seed)
    return model, optimizer_for(model.parameters())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a model with tied parameters after three steps, its schedule, and losses of later steps."""
    model, optimizer = made(seed=0)
    schedule = StepLR(optimizer, 2)
    train_alone(model, optimizer, range(3))
    schedule.step()
    path = tmp_path_factory.mktemp("trained") / "checkpoint"
    ax.save_checkpoint(path, model, optimizer, step=3, scheduler=schedule, extra={"seen": (1, 2)}, group=ALONE)
    state = schedule.state_dict()
    return SimpleNamespace(path=path, schedule=state, losses=train_alone(model, optimizer, AFTER))


# ---- torch.save -------------------------------------------------------------------------------------------------


def test_torch_alone_goes_on_from_a_converted_checkpoint(trained, tmp_path):
    convert_checkpoint(trained.path, tmp_path / "all.pt")
    loaded, again = (torch.load(tmp_path / "all.pt", weights_only=True) for _ in range(2))
    model, optimizer = made()
    model.load_state_dict(again["model"])
    optimizer.load_state_dict(again["optimizer"])
    assert train_alone(model, optimizer, AFTER) == trained.losses
    model, optimizer = made()  # by name
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert train_alone(model, optimizer, AFTER) == trained.losses
    assert (loaded["step"], loaded["extra"], loaded["scheduler"]) == (3, {"seen": (1, 2)}, trained.schedule)
    assert loaded["model"]["head.weight"].data_ptr() == loaded["model"]["embedding.weight"].data_ptr()


def test_a_file_of_torch_becomes_the_checkpoint_that_it_was_made_of(trained, tmp_path):
    convert_checkpoint(trained.path, tmp_path / "all.pt")
    convert_checkpoint(tmp_path / "all.pt", tmp_path / "again", optimizer="AdamW")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (trained.path / name).read_bytes()
    assert verify_checkpoint(tmp_path / "again").is_whole
    model, optimizer = made()
    schedule = StepLR(optimizer, 2)
    info = ax.load_checkpoint(tmp_path / "again", model, optimizer, scheduler=schedule, group=ALONE)
    assert (info.step, info.extra, schedule.state_dict()) == (3, {"seen": (1, 2)}, trained.schedule)
    assert train_alone(model, optimizer, AFTER) == trained.losses


def linear():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_dicts_as_people_save_them_are_understood(tmp_path):
    model, optimizer = linear()
    states = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save({**states, "epoch": 7, "args": [1]}, tmp_path / "all.ckpt")
    convert = functools.partial(convert_checkpoint, tmp_path / "all.ckpt", tmp_path / "all")
    refused(ax.CheckpointError, (convert, "--optimizer AdamW"))
    assert convert(optimizer="Adam").left_out == ["'args' (list)"]
    other, its_optimizer = linear()
    assert ax.load_checkpoint(tmp_path / "all", other, its_optimizer, group=ALONE).epoch == 7
    assert torch.equal(other.weight, model.weight)
    assert_equal(*([by_name(state) for state in each.state.values()] for each in (its_optimizer, optimizer)))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda model, optimizer: {"net": model.state_dict(), "lr": 1}, "got a dict with 'net', 'lr'"),
        (lambda model, optimizer: [model.state_dict()], "expected a dict, got list"),
        (
            lambda model, optimizer: {"model": model.state_dict(), "state_dict": model.state_dict()},
            "'model' and 'state_dict': which of them",
        ),
        (lambda model, optimizer: {"model": model.state_dict(), "optim": {}}, "'optim': expected an optimizer's"),
        (
            lambda model, optimizer: {"model": {**model.state_dict(), "mean": torch.ones(1)}, "optim": optimizer},
            "numbers 2 parameters, and which of the model's 3 tensors",
        ),
        (lambda model, optimizer: model, "more than tensors and plain values.*Linear"),
    ],
    ids=["names", "list", "two", "optimizer", "numbers", "code"],
)
def test_what_is_not_clear_is_refused(saved, message, tmp_path):
    model, optimizer = linear()
    torch.save(saved(model, optimizer.state_dict()), tmp_path / "all.pt")
    convert = functools.partial(convert_checkpoint, tmp_path / "all.pt", tmp_path / "all", optimizer="Adam")
    refused(ax.CheckpointError, (convert, message))
    assert not (tmp_path / "all").exists()


# ---- DCP --------------------------------------------------------------------------------------------------------


def test_dcp_goes_on_from_a_converted_checkpoint_and_back(trained, tmp_path):
    convert_checkpoint(trained.path, tmp_path / "dcp", to="dcp")
    model, optimizer = made()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path / "dcp")
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    assert train_alone(model, optimizer, AFTER) == trained.losses

    convert = functools.partial(convert_checkpoint, tmp_path / "dcp", tmp_path / "again", optimizer="AdamW")
    refused(ax.CheckpointError, (convert, "--trust"))
    convert(trust=True)
    model, optimizer = made()
    assert ax.load_checkpoint(tmp_path / "again", model, optimizer, group=ALONE).step == 3
    assert train_alone(model, optimizer, AFTER) == trained.losses


# ---- safetensors ------------------------------------------------------------------------------------------------


def test_weights_alone(trained, tmp_path):
    convert_checkpoint(trained.path, tmp_path / "w.safetensors")
    expected = load_file(trained.path / "model.safetensors")
    assert_equal(by_name(load_file(tmp_path / "w.safetensors")), by_name(expected))
    tensors = {"odd": torch.ones(3, dtype=torch.uint8), "x": torch.arange(5.0)}
    save_file(tensors, tmp_path / "o.safetensors")
    convert_checkpoint(tmp_path / "o.safetensors", tmp_path / "o.pt")
    assert_equal(by_name(torch.load(tmp_path / "o.pt", weights_only=True)), tensors)


def test_a_target_that_is_there_is_left_alone(trained, tmp_path):
    convert = functools.partial(convert_checkpoint, trained.path, tmp_path / "w.pt")
    (tmp_path / "w.pt").write_text("mine")
    refused(ax.CheckpointError, (convert, "--overwrite"))
    assert (tmp_path / "w.pt").read_text() == "mine"
    convert(overwrite=True)
    assert torch.load(tmp_path / "w.pt", weights_only=True)["step"] == 3
    (tmp_path / "folder").mkdir()
    convert = functools.partial(convert_checkpoint, trained.path, tmp_path / "folder", overwrite=True)
    refused(
        ax.CheckpointError, *((functools.partial(convert, to=to), "not replaced") for to in ("checkpoint", "dcp"))
    )
    assert not (tmp_path / "folder.partial").exists()


# ---- inspect and verify -----------------------------------------------------------------------------------------


def test_a_description_is_json_and_says_what_was_saved(trained):
    described = describe_checkpoint(trained.path)
    assert json.loads(json.dumps(described)) == described
    assert (described["format"], described["step"], described["states"]) == ("checkpoint", 3, ["scheduler"])
    assert [group["parameters"] for group in described["optimizer"]["groups"]] == [9, 21]
    assert described["aliases"] == {"head.weight": "embedding.weight"}
    (weight,) = [each for each in described["tensors"] if each["name"] == "block0.down.weight"]
    assert (weight["kind"], weight["dtype"], weight["shape"]) == ("model", "float32", [6, 8])


def big_checkpoint(path, **options):
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 256))  # 2 MiB, 1 MiB
    model.config = {"layers": 2}
    ax.save_checkpoint(path, model, group=ALONE, **options)


@pytest.mark.ranks(1, 2, 4)
def test_damaged_tensors_are_named(world, shared_tmp_path):
    path, seen = shared_tmp_path / "checkpoint", []
    on_first(big_checkpoint, path)
    found = verify_checkpoint(path, group=world.default_group, progress=lambda *at: seen.append(at))
    assert (found.is_whole, found.has_checksums) == (True, True)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    on_first(flip, path / "model.safetensors", BLOCK_BYTES + 7, 3 * BLOCK_BYTES + 7)
    (damage,) = verify_checkpoint(path, group=world.default_group).damages
    assert (damage.file, damage.tensors) == ("model.safetensors", ("0.weight", "1.weight"))
    assert "number 1, 3" in damage.text


DAMAGES = {
    "cut": ("model-00002-of-00002.safetensors", lambda path: cut_off(path, 100), "cut off in '"),
    "missing": ("model-00001-of-00002.safetensors", lambda path: path.unlink(), "No such file"),
    "header": ("random.safetensors", lambda path: path.write_bytes(b"{" * path.stat().st_size), "no safetensors"),
    "state": ("state.json", lambda path: path.write_text("{"), "damaged"),
    "index": ("model.safetensors.index.json", lambda path: path.write_text("{}"), "weight_map"),
    "checksums": ("checksums.safetensors", lambda path: path.unlink(), "No such file"),
    "config": ("config.json", lambda path: flip(path, -3), "1 block of 1 (of 1 MiB: number 0) damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_every_file_is_found(damage, tmp_path):
    name, act, message = DAMAGES[damage]
    big_checkpoint(tmp_path / "checkpoint", max_file_size=5 << 19)
    assert verify_checkpoint(tmp_path / "checkpoint").is_whole
    act(tmp_path / "checkpoint" / name)
    assert message in "\n".join(map(str, verify_checkpoint(tmp_path / "checkpoint").damages))


def test_files_of_other_tools_have_no_checksums(tmp_path):
    save_file({"x": torch.ones(5)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        found = verify_checkpoint(path)
        assert (found.is_whole, found.has_checksums, [*found.files]) == (True, False, ["model.safetensors"])
    cut_off(tmp_path / "model.safetensors")
    assert not verify_checkpoint(tmp_path).is_whole
    refused(ax.CheckpointError, (lambda: verify_checkpoint(tmp_path / "nothing"), "found none"))
