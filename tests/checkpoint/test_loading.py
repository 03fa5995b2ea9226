"""Loading: all that was saved comes back, at any number of ranks; what does not fit changes nothing."""

import json
import os
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import flip, on_first, refused_on_all
from helpers.compare import assert_equal
from helpers.layouts import laid_out, optimizer_for, train_alone, whole_model
from helpers.models import built
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import CheckpointInfo, load_checkpoint, save_checkpoint


def refused(
    kind: type[Exception], messages: list[str], path: Path, model: nn.Module, *others: Any, **options: Any
) -> None:
    """Check that loading is refused on all ranks with texts that match, and leaves the model as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    text = refused_on_all(kind, load_checkpoint, path, model, *others, **options)
    assert [message for message in messages if not re.search(message, text)] == [], text
    assert_equal(model.state_dict(), before)


def trained(folder: Path, **options: Any) -> nn.Module:
    """Save a plain model that was trained for two steps, and return it."""
    model = whole_model()
    optimizer = optimizer_for(model.parameters())
    train_alone(model, optimizer, range(2))
    save_checkpoint(folder / "it", model, optimizer, step=2, **options)
    return model


# ---- other numbers of ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("many", "few"),
    [("fsdp_tp", "pp"), ("pp_tp", "fsdp"), ("hybrid", "tp"), ("pp_fsdp", "ddp"), ("dp_tp", "offload")],
)
@pytest.mark.ranks(4)
def test_training_goes_on_with_fewer_and_then_with_more_ranks(
    world: ax.World, many: str, few: str, shared_tmp_path: Path
) -> None:
    """Four ranks begin, two of them go on, all of them end."""
    alone = whole_model(tied=True)
    expected = train_alone(alone, optimizer_for(alone.parameters()), range(3))
    half, path = world.subworld(2), shared_tmp_path / "it"
    for step, (of, layout) in enumerate(((world, many), (half, few), (world, many))):
        if of is not None:
            laid, group = laid_out(layout, of, tied=True, seed=step), of.default_group
            if step:
                info = load_checkpoint(path, laid.model, laid.optimizer, random=False, group=group)
                assert info.layout["ranks"] == (4 if step == 1 else 2)
            assert laid.step(step) == pytest.approx(expected[step], abs=1e-5)
            save_checkpoint(path, laid.model, laid.optimizer, blocking=False, group=group).wait()
        ax.barrier()


# ---- all that a checkpoint has ----------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_everything_comes_back(world: ax.World, shared_tmp_path: Path) -> None:
    def make() -> tuple[Any, ...]:
        model = whole_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        sampler = ax.DistributedSampler(range(40), seed=3)
        return (model, optimizer), {"scheduler": schedule, "scaler": scaler, "sampler": sampler}

    (model, optimizer), others = make()
    others["scaler"].scale(torch.ones(()))
    others["scaler"].update(64.0)
    for _ in range(2):
        optimizer.step()
        others["scheduler"].step()
    next(iter(others["sampler"]))
    extra = {"best": 0.5, "shape": (3, 4), 7: torch.tensor([1.5])}
    save_checkpoint(shared_tmp_path / "it", model, optimizer, step=7, epoch=2, extra=extra, **others)
    again, its_others = make()
    info = load_checkpoint(shared_tmp_path / "it", *again, **its_others)
    expected = CheckpointInfo, 7, 2, extra, world.size
    assert (type(info), info.step, info.epoch, info.extra, info.layout["ranks"]) == expected
    for name, stateful in others.items():
        assert its_others[name].state_dict() == stateful.state_dict()
    assert again[1].param_groups[0]["lr"] == pytest.approx(0.1)
    assert_equal(again[0].state_dict(), model.state_dict())


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 2)
def test_each_rank_goes_on_with_its_own_random_numbers(world: ax.World, shared_tmp_path: Path) -> None:
    def drawn() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    if world.peers and world.size > 1:
        pytest.skip("the ranks of one process have the same generators")
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(world.rank)
    model = nn.Linear(2, 2)
    drawn()
    save_checkpoint(shared_tmp_path / "it", model)
    expected = drawn()
    load_checkpoint(shared_tmp_path / "it", model, random=False)
    assert drawn() != expected
    load_checkpoint(shared_tmp_path / "it", model)
    assert drawn() == expected


class Noted(nn.Linear):
    """A layer that adds to its state dict."""

    note: Any = None

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def noted(kind: str, *notes: Any) -> nn.Module:
    model = nn.Sequential(Noted(2, 2), nn.Linear(2, 2), Noted(2, 2))
    model[0].note, model[2].note = notes
    if kind == "pp":
        return ax.Pipeline.from_modules(ax.pipeline.split_module(model, 2))
    return {"plain": lambda model: model, "ddp": ax.DDP, "fsdp": ax.FSDP}[kind](model)


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp", "pp"])
@pytest.mark.ranks(2)
def test_what_modules_add_to_their_state_comes_back(world: ax.World, kind: str, shared_tmp_path: Path) -> None:
    model, other = noted(kind, {"steps": (1, 2.5)}, torch.tensor([7, 8])), noted(kind, "", torch.tensor([0, 0]))
    save_checkpoint(shared_tmp_path / "it", model)
    load_checkpoint(shared_tmp_path / "it", other)
    assert_equal(*([getattr(layer, "note", None) for layer in each.modules()] for each in (other, model)))
    plain = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    refused(ValueError, ["the model has not: .*'0._extra_state'"], shared_tmp_path / "it", plain)
    info = load_checkpoint(shared_tmp_path / "it", plain, strict=False)
    assert {*info.unexpected} == {"0._extra_state", "2._extra_state"}
    save_checkpoint(shared_tmp_path / "plain", plain)
    text = refused_on_all(ValueError, load_checkpoint, shared_tmp_path / "plain", model)
    assert re.search("it has not: .*'0._extra_state'", text)


# ---- other tools' files -----------------------------------------------------------------------------------------


def write_sharded(values: dict[str, Tensor], folder: Path) -> None:
    """Write three files and an index, as `transformers` does."""
    names, index = sorted(values), {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: values[name] for name in names[number::3]}, folder / file)
        index |= dict.fromkeys(names[number::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.parametrize("form", ["file", "folder", "index"])
@pytest.mark.ranks(1, 2)
def test_weights_of_other_tools(world: ax.World, form: str, shared_tmp_path: Path) -> None:
    values, file = whole_model(seed=5).state_dict(), shared_tmp_path / "model.safetensors"
    path = file if form == "file" else shared_tmp_path
    on_first(*((write_sharded, values, path) if form == "index" else (save_file, values, file, {"format": "pt"})))
    model = ax.FSDP(whole_model())
    info = load_checkpoint(path, model)
    assert (info.step, info.epoch, info.extra, info.layout) == (0, 0, None, {})
    assert_equal(model.full_state_dict(), values)
    refused(
        ValueError,
        [f"^optimizer: {path} has no state of one: leave optimizer= out$"],
        path,
        model,
        optimizer_for(model.parameters()),
    )


@pytest.mark.ranks(1, 2)
def test_values_are_converted_to_the_dtypes_of_the_model(world: ax.World, shared_tmp_path: Path) -> None:
    values = {"weight": torch.linspace(-1, 1, 6).view(2, 3), "bias": torch.linspace(0, 1, 2)}
    on_first(save_file, values, shared_tmp_path / "a.safetensors")
    for own, dtype in ((torch.float64, None), (torch.float64, torch.bfloat16), (torch.float16, None)):
        model = nn.Linear(3, 2, dtype=own)
        load_checkpoint(shared_tmp_path / "a.safetensors", model, dtype=dtype)
        assert_equal(model.state_dict(), {name: value.to(dtype or own).to(own) for name, value in values.items()})


@pytest.mark.ranks(1)
def test_integers_are_widened_and_not_cut_off(world: ax.World, tmp_path: Path) -> None:
    path, model = tmp_path / "a.safetensors", nn.Module()
    for saved, held in ((torch.int64, torch.int32), (torch.uint8, torch.bool), (torch.int32, torch.int64)):
        save_file({"steps": torch.tensor([1], dtype=saved)}, path)
        model.register_buffer("steps", torch.zeros(1, dtype=held))
        if held != torch.int64:
            refused(ValueError, [f"'steps': expected integers that {held} holds, got {saved}"], path, model)
    load_checkpoint(path, model)
    assert torch.equal(model.steps, torch.tensor([1]))


def tied_pair(*, tied: bool) -> nn.Module:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    if tied:
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("names", [["0.weight"], ["1.weight"], ["0.weight", "1.weight"]])
@pytest.mark.ranks(1, 2)
def test_a_tied_tensor_is_found_by_either_name(world: ax.World, names: list[str], shared_tmp_path: Path) -> None:
    value = torch.arange(6.0).view(3, 2)
    on_first(save_file, {name: value.clone() for name in names}, shared_tmp_path / "a.safetensors")
    model = tied_pair(tied=True)
    load_checkpoint(shared_tmp_path / "a.safetensors", model)
    assert torch.equal(model[0].weight, value)


@pytest.mark.ranks(1, 2)
def test_tensors_that_were_tied_when_they_were_saved(world: ax.World, shared_tmp_path: Path) -> None:
    model = tied_pair(tied=True)
    nn.init.ones_(model[0].weight)
    save_checkpoint(shared_tmp_path / "it", model)
    assert list(load_file(shared_tmp_path / "it/model.safetensors")) == ["0.weight"]
    apart = tied_pair(tied=False)
    load_checkpoint(shared_tmp_path / "it", apart)
    assert_equal([layer.weight for layer in apart], [model[0].weight] * 2)


# ---- what does not fit ------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 4)
def test_missing_and_unexpected_names_of_all_stages(world: ax.World, shared_tmp_path: Path) -> None:
    values, path = trained(shared_tmp_path).state_dict(), shared_tmp_path / "a.safetensors"
    del values["block0.scale"], values["head.weight"]
    values |= {"other": torch.ones(2), "more": torch.ones(2)}
    on_first(save_file, values, path)
    model = laid_out("pp", world, seed=1).model
    messages = [
        "the model has, and it has not: 'block0.scale', 'head.weight'\n",
        "it has, and the model has not: ('more', 'other'|'other', 'more')\n",
    ]
    refused(ValueError, messages, path, model)
    info = load_checkpoint(path, model, strict=False)
    assert (info.missing, {*info.unexpected}) == (("block0.scale", "head.weight"), {"more", "other"})
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items() if name in values)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.ranks(1, 2)
def test_shapes_and_kinds_of_numbers_have_to_fit(world: ax.World, strict: bool, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "a.safetensors"
    on_first(save_file, {"weight": torch.ones(3, 2), "bias": torch.ones(2).long()}, path)
    messages = [
        r"'weight': expected shape \[2, 3\], got \[3, 2\]",
        "'bias': expected floating-point numbers such as torch.float32, got torch.int64",
    ]
    refused(ValueError, messages, path, nn.Linear(3, 2), strict=strict)


@pytest.mark.ranks(1, 2)
def test_what_was_not_saved_cannot_be_loaded(world: ax.World, shared_tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    save_checkpoint(shared_tmp_path / "it", model)
    given: dict[str, Any] = {
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "scaler": torch.amp.GradScaler("cpu"),
        "sampler": ax.DistributedSampler(range(4)),
    }
    for name, value in given.items():
        refused(
            ValueError,
            [f"^{name}: {shared_tmp_path / 'it'} has no state of one: leave {name}= out$"],
            shared_tmp_path / "it",
            model,
            **{name: value},
        )


@pytest.mark.ranks(1, 2)
def test_another_optimizer_or_sampler_is_refused(world: ax.World, shared_tmp_path: Path) -> None:
    trained(shared_tmp_path, sampler=ax.DistributedSampler(range(40)))
    path, model = shared_tmp_path / "it", whole_model(seed=1)
    refused(ValueError, ["expected a AdamW"], path, model, torch.optim.SGD(model.parameters()))
    refused(ValueError, ["length"], path, model, sampler=ax.DistributedSampler(range(41)))


@pytest.mark.ranks(2)
def test_arguments_that_differ_between_ranks_are_named(world: ax.World, shared_tmp_path: Path) -> None:
    it, other, model = shared_tmp_path / "it", shared_tmp_path / "other", nn.Linear(2, 2)
    save_checkpoint(it, model)
    refused(ValueError, [f"rank 0: path {other}", f"path {it}"], it if world.rank else other, model)
    refused(ValueError, ["rank 0: strict True"], it, model, strict=world.rank == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strict": 1}, "strict: expected True or False, got 1"),
        ({"random": None}, "random: expected True or False, got None"),
        ({"dtype": "bfloat16"}, "dtype: expected a floating-point torch.dtype or None, got 'bfloat16'"),
        ({"dtype": torch.int64}, "dtype: expected a floating-point torch.dtype or None, got torch.int64"),
        ({"model": {}}, "model: expected a torch.nn.Module, got dict"),
        ({"optimizer": {}}, "optimizer: expected a torch.optim.Optimizer, got dict"),
        ({"sampler": [3]}, "sampler: expected something with load_state_dict(), got list"),
        ({"path": 3}, "expected str, bytes or os.PathLike object, not int"),
        ({"group": 3}, "group: expected an axonmpi.ProcessGroup or None, got int"),
    ],
)
@pytest.mark.ranks(1, 2)
def test_wrong_arguments(world: ax.World, arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"path": tmp_path, "model": nn.Linear(1, 1), **arguments}
    assert message in refused_on_all(TypeError, load_checkpoint, **given)


# ---- what is not whole ------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_a_checkpoint_is_found_that_was_being_replaced(world: ax.World, shared_tmp_path: Path) -> None:
    model = trained(shared_tmp_path)
    path, previous = shared_tmp_path / "it", shared_tmp_path / "it.previous"
    on_first(path.rename, previous)
    loaded = whole_model(seed=1)
    assert load_checkpoint(path, loaded).step == 2
    assert_equal(loaded.state_dict(), model.state_dict())
    on_first(previous.rename, shared_tmp_path / "it.partial")
    refused(
        ax.CheckpointError,
        ["found none, but it.partial, which a job that was killed has not finished$"],
        path,
        loaded,
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.unlink(path / "model.safetensors"), "model.safetensors: cannot be read: No such file"),
        (lambda path: os.truncate(path / "model.safetensors", 5000), "cut off in"),
        (
            lambda path: os.truncate(path / "optimizer.safetensors", 5),
            "optimizer.safetensors: this is no safetensors",
        ),
        (lambda path: flip(path / "model.safetensors", 30), "with its header and .*the file is damaged"),
        (lambda path: flip(path / "model.safetensors", -1), "the file is damaged"),
        (lambda path: (path / "state.json").write_text("{"), "it is damaged"),
        (lambda path: (path / "state.json").write_text('["model"]'), "it is damaged"),
        (
            lambda path: (path / "state.json").write_text('{"format": "axonmpi checkpoint", "version": 99}'),
            "of version 2 at the most, got 'axonmpi checkpoint' of version 99",
        ),
        (
            lambda path: save_file({"model.safetensors": torch.ones(7)}, path / "checksums.safetensors"),
            "checksums.safetensors: it is damaged, or of another checkpoint than state.json",
        ),
    ],
)
@pytest.mark.ranks(1, 2)
def test_damage_is_told_to_all_ranks(world: ax.World, damage: Any, message: str, shared_tmp_path: Path) -> None:
    trained(shared_tmp_path)
    path = shared_tmp_path / "it"
    on_first(damage, path)
    model = whole_model(seed=1)
    refused(ax.CheckpointError, [message, str(path)], path, model, optimizer_for(model.parameters()))


def as_version_1(path: Path) -> None:
    state = json.loads((path / "state.json").read_text())
    for name in ("checksums", "checksum"):
        del state[name]
    (path / "state.json").write_text(json.dumps({**state, "version": 1}))


def with_value(path: Path, *keys: Any, value: Any) -> None:
    as_version_1(path)
    state = json.loads((path / "state.json").read_text())
    at = state
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    (path / "state.json").write_text(json.dumps(state))


@pytest.mark.ranks(1)
def test_a_checkpoint_of_version_1_is_loaded(world: ax.World, tmp_path: Path) -> None:
    model = trained(tmp_path)
    as_version_1(tmp_path / "it")
    loaded = whole_model(seed=1)
    assert load_checkpoint(tmp_path / "it", loaded, optimizer_for(loaded.parameters())).step == 2
    assert_equal(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["step"], -1),
        (["step"], True),
        (["step"], 2.0),
        (["epoch"], 1 << 63),
        (["more"], 1),
        (["layout", "ranks"], 0),
        (["versions"], []),
        (["model", "aliases"], {"a": 1}),
        (["extra"], {"<tuple>": 3}),
        (["extra"], {"<dtype>": "float"}),
        (["optimizer", "class"], None),
        (["optimizer", "groups"], {}),
        (["optimizer", "values"], None),
    ],
    ids=str,
)
@pytest.mark.ranks(1)
def test_values_of_other_types_are_refused_by_name(
    world: ax.World, keys: list[str], value: Any, tmp_path: Path
) -> None:
    """Version 1 has no checksum of its state."""
    trained(tmp_path)
    with_value(tmp_path / "it", *keys, value=value)
    model = whole_model(seed=1)
    named = ".*" if keys == ["optimizer", "groups"] else keys[-1]
    message = rf"state.json: it is damaged: .*{named}"
    refused(ax.CheckpointError, [message], tmp_path / "it", model, optimizer_for(model.parameters()))


@pytest.mark.parametrize(
    "name", ["optimizer.safetensors", "state.json", "checksums.safetensors", "random.safetensors"]
)
@pytest.mark.ranks(1)
def test_a_missing_file_is_named_also_if_it_is_not_asked_for(world: ax.World, name: str, tmp_path: Path) -> None:
    trained(tmp_path)
    os.unlink(tmp_path / "it" / name)
    refused(ax.CheckpointError, [rf"it/{name}: "], tmp_path / "it", whole_model(seed=1), random=False)


# ---- buffers that get their shapes in a forward ------------------------------------------------------------------


class Observed(nn.Module):
    """Keeps the largest value of each column, as an observer of quantization does."""

    def __init__(self, knows: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.largest: Tensor
        self.register_buffer("largest", torch.empty(0))
        self.knows = knows

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)
        self.largest.resize_(5).copy_(result.detach().amax(0))
        return result

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state.get(f"{prefix}largest")
        if saved is not None and self.knows:
            self.largest.resize_(saved.shape)
        super()._load_from_state_dict(state, prefix, *rest)


def observed(knows: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Identity(), Observed(knows))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("wrap", [nn.Sequential, ax.DDP, ax.FSDP])
def test_modules_are_asked_for_buffers_of_other_shapes(world: ax.World, wrap: Any, shared_tmp_path: Path) -> None:
    model = wrap(built(observed, 1))
    model(torch.linspace(0, 1, 6).view(2, 3))
    save_checkpoint(shared_tmp_path / "it", model)
    largest = dict(model.named_buffers())
    fresh = wrap(built(observed, 2))
    load_checkpoint(shared_tmp_path / "it", fresh)
    assert_equal(dict(fresh.named_buffers()), largest)
    refused(
        ValueError,
        [r"largest': expected shape \[0\], got \[5\]"],
        shared_tmp_path / "it",
        wrap(built(partial(observed, knows=False))),
    )
    other = built(observed)
    other[1].register_parameter("more", nn.Parameter(torch.ones(2)))
    refused(ValueError, ["the model has, and it has not: .*more"], shared_tmp_path / "it", wrap(other))
