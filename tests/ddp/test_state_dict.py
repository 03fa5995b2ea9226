"""State dicts have the names of the module that was wrapped."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from helpers.compare import assert_close, assert_equal, refused
from helpers.models import batch_norm, batch_of, built, mlp, own_loss, part_of, wrapped
from helpers.steps import adamw, loss_of
from torch import Tensor, nn

import axonmpi as ax


def has_module() -> nn.Module:
    """Make submodules whose names clash once a prefix is taken off or put on."""
    inner = nn.ModuleDict({"0": nn.Linear(2, 3), "module": nn.Linear(3, 4), "block": nn.Linear(1, 6)})
    outer = nn.ModuleDict({"module": inner, "block": nn.Linear(4, 5)})
    for module in (outer, inner):
        module.weight = nn.Parameter(torch.ones(1))
    return outer


class Versioned(nn.Module):
    """Migrates old state dicts, which it tells by their version."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state, prefix, local_metadata, *rest):
        if local_metadata.get("version") != self._version:
            state[prefix + "scale"] = state[prefix + "scale"] * 100
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


class ExtraState(nn.Linear):
    counted = 0

    def get_extra_state(self):
        return {"counted": self.counted}

    def set_extra_state(self, state):
        self.counted = state["counted"]


KINDS: dict[str, Callable[[], nn.Module]] = {
    "buffers": batch_norm,
    "has_module": has_module,
    "versioned": lambda: nn.Sequential(nn.Linear(2, 2), Versioned()),
    "root_versioned": Versioned,
    "extra_state": lambda: ExtraState(2, 2),
}
KIND = pytest.mark.parametrize("kind", KINDS)


def tensors(state: dict[str, object]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@pytest.mark.ranks(1)
@KIND
@pytest.mark.parametrize("way", [("wrapped", "wrapped"), ("wrapped", "plain"), ("plain", "wrapped")])
@pytest.mark.parametrize("nested", [True, False])
def test_loads_with_and_without_the_wrapper(world, kind, way, nested):
    source, target = way
    # torch gives a nested module no access to the versions of what is below it under another name
    nested &= "versioned" not in kind or way != ("plain", "wrapped")

    def make(how: str, seed: int) -> nn.Module:
        module = built(KINDS[kind], seed)
        inner = wrapped(world, module) if how == "wrapped" else module
        around = {"before": nn.Linear(1, 1), "inner": inner, "module": nn.Linear(1, 1)}
        return nn.ModuleDict(around) if nested else inner

    saved, loaded = make(source, 1), make(target, 2)
    if kind == "extra_state":
        getattr(saved, "inner", saved).get_submodule("module" if source == "wrapped" else "").counted = 7
    state = pickle.loads(pickle.dumps(saved.state_dict()))
    names = list(state)
    assert (str(loaded.load_state_dict(state)), list(state)) == ("<All keys matched successfully>", names)
    assert list(loaded.state_dict()) == names
    assert_close(tensors(loaded.state_dict()), tensors(saved.state_dict()), tolerance=0)
    if kind == "extra_state":
        assert getattr(loaded, "inner", loaded).get_submodule("module" if target == "wrapped" else "").counted == 7


@pytest.mark.ranks(1)
@KIND
def test_loads_what_torch_saved_with_a_prefix(world, kind):
    saved = built(KINDS[kind], 1)
    loaded = wrapped(world, built(KINDS[kind], 2))
    loaded.load_state_dict(nn.ModuleDict({"module": saved}).state_dict())
    assert_close(tensors(loaded.state_dict()), tensors(saved.state_dict()), tolerance=0)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("prefix", ["", "inner."])
def test_errors_name_what_the_module_calls_it(world, prefix):
    inner = wrapped(world, built(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))))
    model = nn.ModuleDict({"inner": inner}) if prefix else inner
    state = model.state_dict()
    del state[prefix + "0.weight"]
    state[prefix + "2.weight"] = torch.ones(2)
    state[prefix + "1.bias"] = torch.ones(7)
    expected = (
        f'Missing key(s) in state_dict: "{prefix}0.weight"',
        f'Unexpected key(s) in state_dict: "{prefix}2.weight"',
        f"size mismatch for {prefix}1.bias: ",
    )
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state)
    assert [text for text in expected if text not in str(error.value)] == []
    assert "module" not in str(error.value)
    del state[prefix + "1.bias"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (sorted(missing), unexpected) == ([prefix + "0.weight", prefix + "1.bias"], [prefix + "2.weight"])


@pytest.mark.ranks(2)
def test_training_goes_on_from_a_checkpoint(world):
    """Model and optimizer saved half-way, loaded into new ones, end where an uninterrupted training ends."""

    def trained(steps: range, saved: dict[str, dict], seed: int) -> dict[str, dict]:
        model = wrapped(world, built(batch_norm, seed))
        optimizer = adamw(model)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in steps:
            optimizer.zero_grad()
            own_loss(model, world, step).backward()
            optimizer.step()
        return pickle.loads(pickle.dumps({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))

    half = trained(range(2), {}, 0)
    assert_equal(trained(range(2, 4), half, 5)["model"], trained(range(4), {}, 0)["model"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [ax.DDP, ax.FSDP])
@KIND
def test_parameters_and_buffers_have_the_names_of_the_module(world, kind, wrapper):
    """So groups of parameters made by name are the same with and without a wrapper, and with another one."""
    plain, model = built(KINDS[kind]), wrapper(built(KINDS[kind]))
    for listed in ("named_parameters", "named_buffers"):
        for arguments in ((), ("p", False)):
            assert list(dict(getattr(model, listed)(*arguments))) == list(dict(getattr(plain, listed)(*arguments)))
    assert set(dict(plain.named_parameters())) <= set(model.state_dict())
    plain.mine = model.module.mine = 1
    refused(AttributeError, (lambda: model.mine, f"'{wrapper.__name__}' object has no attribute 'mine'"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("make", "prefix"), [(mlp, "module."), (batch_norm, ""), (lambda: nn.Linear(5, 3), "")])
def test_functional_call_by_the_names_of_parameters(world, make, prefix):
    """Values computed from the parameters: gradients go through them to the parameters, and are averaged."""
    model, alone = wrapped(world, built(make)), built(make)

    def loss(module: nn.Module, prefix: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        named = alone.named_parameters() if module is alone else model.module.named_parameters()
        values = {f"{prefix}{name}": 2 * p + 0.1 for name, p in named}
        return loss_of(torch.func.functional_call(module, values, (batch[0],)), batch[1])

    for module in (model, alone):
        module.eval()
    before = copy.deepcopy(model.state_dict())
    for step in range(2):
        for module in (model, alone):
            module.zero_grad()
        loss(alone, "", batch_of(alone, step)).backward()
        loss(model, prefix, part_of(batch_of(alone, step), world.rank, world.size)).backward()
        gradients = {name: p.grad for name, p in model.module.named_parameters()}
        assert_close(gradients, {name: p.grad for name, p in alone.named_parameters()})
    assert_close(tensors(model.state_dict()), tensors(before), tolerance=0)
