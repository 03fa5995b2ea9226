"""Which submodules are gathered as one, where parameters lie, and models that begin on the meta device."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import assert_close, built
from sharded import Blocks, Residual, TiedBlocks, alone, data_for, new_group, train
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.fsdp.layout import ALIGNMENT, by_elements, by_parameters
from axonmpi.fsdp.units import find_units, plan_units

# ---- choosing ---------------------------------------------------------------------------------------------------


def large_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(3, 3), nn.Linear(3, 3))


class Twofold(nn.Module):
    """Blocks in two kinds of containers, and a single one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Residual(4) for _ in range(2))
        self.decoder = nn.ModuleDict({"a": Residual(4), "b": Residual(4), "other": nn.Sequential(nn.Linear(2, 2))})
        self.alone = nn.ModuleList([Residual(4)])


BLOCKS = [f"blocks.{index}" for index in range(4)]
CHOICES = [
    (Blocks, None, BLOCKS),
    (Twofold, None, ["encoder.0", "encoder.1", "decoder.a", "decoder.b"]),
    (large_layers, None, ["0", "2"]),
    (lambda: nn.Linear(3, 3), None, []),
    (Blocks, [], []),
    (Blocks, Residual, BLOCKS),
    (Blocks, {Residual}, BLOCKS),
    (Blocks, "blocks.*", None),
    (Blocks, "blocks.?", BLOCKS),
    (Blocks, ["head", "blocks.[12]"], ["blocks.1", "blocks.2", "head"]),
    (Blocks, (nn.LayerNorm, "first"), ["first", *(f"{name}.norm" for name in BLOCKS)]),
    (Blocks, lambda module: isinstance(module, nn.Linear) and module.bias is None, [f"{n}.down" for n in BLOCKS]),
    (Blocks, lambda name, module: name.endswith("3"), ["blocks.3"]),
    (Blocks, lambda module: False, []),
    (Blocks, nn.Module, None),
]


@pytest.mark.parametrize(("make", "units", "expected"), CHOICES)
def test_choosing_units(make, units, expected):
    model = make()
    found = find_units(model, units)
    if expected is None:  # everything below, nested, but the list that is never called
        names = [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]
        expected = [name for name in names if units is nn.Module or name.startswith("blocks.")]
    assert list(found) == expected
    assert all(found[name] is model.get_submodule(name) for name in found)


@pytest.mark.ranks(1, 2)
def test_names_of_units(world):
    assert ax.FSDP(built(Blocks)).unit_names == ["", *BLOCKS]
    assert ax.FSDP(built(Blocks), units="head").unit_names == ["", "head"]


def around(model: nn.Module, name: str) -> list[nn.Module]:
    """Return a submodule and all modules that it lies in."""
    names = name.split(".") if name else []
    return [model.get_submodule(".".join(names[:count])) for count in range(len(names) + 1)]


@pytest.mark.parametrize("units", [None, [], nn.Module, ["blocks.0", "blocks.0.up"]])
@pytest.mark.parametrize("make", [Blocks, TiedBlocks])
def test_every_parameter_belongs_to_the_innermost_unit_around_all_that_use_it(make, units):
    model = built(make)
    users: dict[int, list[list[nn.Module]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(around(model, name))
    plans = plan_units(model, find_units(model, units))
    for plan in plans:
        for member in plan.members:
            of_all = [p for p in plans if all(p.module in chain for chain in users[id(member.parameter)])]
            assert plan.name == max((p.name for p in of_all), key=len), member.name
    assert sorted(id(member.parameter) for plan in plans for member in plan.members) == sorted(users)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "units",
    [
        [],
        nn.Linear,
        [Residual, nn.Linear],
        ["blocks.1", "blocks.1.up"],
        lambda name, _: name != "blocks.0",
    ],
)
@pytest.mark.parametrize("kind", [Blocks, TiedBlocks])
def test_training_with_any_units_equals_one_process(world, setting, units, kind):
    with new_group(world) as group:
        model = ax.FSDP(built(kind), group, sharding_strategy=setting, units=units)
        train(model, group, steps=3)
        assert_close(model.full_state_dict(), alone(kind, steps=3))


# ---- layout -----------------------------------------------------------------------------------------------------

NUMELS = st.lists(st.integers(0, 5000), min_size=1, max_size=12)
RANKS = st.integers(1, 9)


def assert_tiles(layout, numels, ranks) -> None:
    """The parts of all ranks give every parameter, in order, and lie where no other parameter does."""
    assert len(layout.sizes) == ranks
    assert layout.total == sum(layout.sizes)
    taken = torch.zeros(layout.total, dtype=torch.int32)
    for index, numel in enumerate(numels):
        at = 0
        for rank in range(ranks):
            first, last = layout.part(index, rank)
            assert first == at or first == last == 0
            at = max(at, last)
            low, high = layout.bounds(rank)
            assert first == last or low <= layout.offsets[index] + first < layout.offsets[index] + last <= high
        assert at == numel
        taken[layout.offsets[index] : layout.offsets[index] + numel] += 1
    assert int(taken.sum()) == int((taken == 1).sum()) == sum(numels)
    assert sum(layout.gaps()) + sum(numels) == layout.total
    assert min(layout.gaps()) >= 0


@given(numels=NUMELS, ranks=RANKS)
def test_by_elements_every_rank_has_as_much(numels, ranks):
    layout = by_elements(numels, ranks)
    assert_tiles(layout, numels, ranks)
    assert len(set(layout.sizes)) == 1
    assert all(offset % ALIGNMENT == 0 for offset in (*layout.offsets, layout.sizes[0]))
    assert layout.total < sum(numels) + ALIGNMENT * (len(numels) + ranks + 1)


@given(units=st.lists(NUMELS, min_size=1, max_size=4), ranks=RANKS)
def test_by_parameters_nothing_is_split_and_the_loads_are_balanced(units, ranks):
    loads = [0] * ranks
    for numels in units:
        layout = by_parameters(numels, ranks, loads)
        assert_tiles(layout, numels, ranks)
        for index, numel in enumerate(numels):
            assert sorted(layout.part(index, rank) for rank in range(ranks))[-1] == (0, numel)
    assert sum(loads) == sum(map(sum, units))
    assert max(loads) - min(loads) <= max(map(max, units))


# ---- models that begin on the meta device -----------------------------------------------------------------------


def fill_by_shape(module: nn.Module) -> None:
    """Known values for each kind of parameter and buffer."""
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        seed = zlib.crc32(f"{name} {list(tensor.shape)}".encode())
        values = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) - 0.3 * (name == "weight")
        with torch.no_grad():
            tensor.copy_(values)


class WithBuffers(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("shift", torch.full((5,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x) + self.shift)


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard_by", ["elements", "parameters"])
@pytest.mark.parametrize("make", [WithBuffers, TiedBlocks])
def test_a_model_on_the_meta_device_gets_the_values_of_a_function(world, setting, make, shard_by):
    plain = built(make)
    for module in plain.modules():
        fill_by_shape(module)
    with new_group(world) as group:
        model = ax.FSDP(
            on_meta(make), group, sharding_strategy=setting, shard_by=shard_by, param_init_fn=fill_by_shape
        )
        assert_close(model.full_state_dict(), plain.state_dict(), 0.0)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        inputs, _ = data_for(plain, 0)
        plain.eval()
        model.eval()
        torch.testing.assert_close(model(inputs), plain(inputs))
        train(model, group, steps=1)


@pytest.mark.ranks(2)
def test_a_model_on_the_meta_device_is_initialised_as_its_layers_are(world, setting):
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 300), nn.LayerNorm(300), *(nn.Linear(300, 300) for _ in range(2)))

    with new_group(world) as group:
        state = ax.FSDP(on_meta(make), group, sharding_strategy=setting).full_state_dict()
    for name, value in built(make).state_dict().items():
        assert state[name].shape == value.shape
        if "1." in name[:2]:
            assert torch.equal(state[name], value)  # ones and zeros
            continue
        bound = float(value.abs().max())
        assert 0.95 * bound < float(state[name].abs().max()) < 1.05 * bound
        assert abs(float(state[name].std()) / float(value.std()) - 1) < 0.2
        assert abs(float(state[name].mean())) < 0.2 * bound


@pytest.mark.ranks(1)
def test_a_layer_that_cannot_initialise_itself(world):
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), Blocks(1))  # with a parameter of its own, and no reset_parameters()

    message = r"a Blocks in '' is on the meta device and has no reset_parameters\(\): give param_init_fn="
    with pytest.raises(ValueError, match=message):
        ax.FSDP(on_meta(make))


@pytest.mark.ranks(2)
def test_a_model_that_is_partly_on_the_meta_device(world, setting):
    def make() -> nn.Module:
        model = built(Blocks)
        model.blocks[1] = on_meta(lambda: Residual(12))
        return model

    plain = built(Blocks)
    for module in plain.blocks[1].modules():
        fill_by_shape(module)
    with new_group(world) as group:
        model = ax.FSDP(make(), group, sharding_strategy=setting, param_init_fn=fill_by_shape)
        state = model.full_state_dict()
    assert_close(
        {name: value for name, value in state.items() if name.startswith("blocks.")},
        {name: value for name, value in plain.state_dict().items() if name.startswith("blocks.")},
        0.0,
    )
