"""Which submodules are gathered as one, where parameters lie, and models that begin on the meta device."""

import zlib

import pytest
import torch
from helpers.compare import assert_close
from helpers.models import Blocks, Residual, TiedBlocks, batch_norm, batch_of, built
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.testing import run_ranks

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


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("make", "units", "expected"),
    [
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
        (
            Blocks,
            lambda module: isinstance(module, nn.Linear) and module.bias is None,
            [f"{n}.down" for n in BLOCKS],
        ),
        (Blocks, lambda name, module: name.endswith("3"), ["blocks.3"]),
        (Blocks, lambda module: False, []),
        (Blocks, nn.Module, None),
    ],
)
def test_choosing_units(world, make, units, expected):
    if expected is None:  # everything below that has parameters of its own, and what is nested in it
        names = [
            name
            for name, module in make().named_modules()
            if next(module.parameters(recurse=False), None) is not None
        ]
        expected = [name for name in names if name and (units is nn.Module or name.startswith("blocks."))]
    assert ax.FSDP(make(), units=units).unit_names == ["", *expected]


# ---- layout -----------------------------------------------------------------------------------------------------

NUMELS = st.lists(st.integers(0, 200), min_size=1, max_size=8).filter(any)
LINE = 64
"""Bytes; where memory that torch allocates begins."""


@settings(max_examples=25)
@given(units=st.lists(NUMELS, min_size=1, max_size=3), ranks=st.integers(1, 5), whole=st.booleans())
def test_each_element_is_on_one_rank_and_the_loads_are_balanced(units, ranks, whole):
    wholes = [torch.arange(numel, dtype=torch.float32) for numels in units for numel in numels]

    def parts(world: ax.World) -> list[Tensor]:
        lists = (nn.ParameterList(torch.arange(numel, dtype=torch.float32) for numel in numels) for numels in units)
        shard_by = "parameters" if whole else "elements"
        model = ax.FSDP(nn.Sequential(*lists), units=nn.ParameterList, shard_by=shard_by)
        assert all(part.data_ptr() % LINE == 0 for part in model.parameters() if part.numel())
        return [part.as_subclass(Tensor).detach().clone() for part in model.parameters()]

    of_ranks = run_ranks(ranks, parts)
    for index, expected in enumerate(wholes):
        pieces = [own[index] for own in of_ranks]
        assert torch.equal(torch.cat(pieces), expected)
        assert not whole or all(len(piece) in (0, len(expected)) for piece in pieces)
    loads = [sum(map(len, own)) for own in of_ranks]
    if whole:
        assert max(loads) - min(loads) <= max(map(max, units))
    else:
        padded = sum(numel + 16 for numels in units for numel in numels)
        assert max(loads) <= padded / ranks + 16 * len(units)


# ---- models that begin on the meta device -----------------------------------------------------------------------


def fill_by_shape(module: nn.Module) -> None:
    """Known values for each kind of parameter and buffer."""
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {list(tensor.shape)}".encode()))
        with torch.no_grad():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.3 * (name == "weight"))


def with_buffers() -> nn.Module:
    model = batch_norm()
    model.register_buffer("shift", torch.full((5,), 3.0))
    return model


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


def partly_on_meta() -> nn.Module:
    model = built(Blocks)
    model.blocks[1] = on_meta(lambda: Residual(12))
    return model


def filled(model: nn.Module) -> nn.Module:
    return model.apply(fill_by_shape)


def partly_filled() -> nn.Module:
    model = Blocks()
    filled(model.blocks[1])
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "expected", "shard_by"),
    [
        (lambda: on_meta(with_buffers), lambda: filled(with_buffers()), "elements"),
        (lambda: on_meta(TiedBlocks), lambda: filled(TiedBlocks()), "parameters"),
        (partly_on_meta, partly_filled, "elements"),
    ],
    ids=["buffers", "tied", "partly"],
)
def test_a_model_on_the_meta_device_gets_the_values_of_a_function(wrap, make, expected, shard_by):
    plain = built(expected)
    model = wrap(make(), shard_by=shard_by, param_init_fn=fill_by_shape)
    assert_close(model.full_state_dict(), plain.state_dict(), 0.0)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    inputs, _ = batch_of(plain, 0)
    torch.testing.assert_close(model.eval()(inputs), plain.eval()(inputs))
    model(inputs).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("setting", ["one_node", "apart"], indirect=True)
def test_a_model_on_the_meta_device_is_initialised_as_its_layers_are(wrap):
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 300), nn.LayerNorm(300), *(nn.Linear(300, 300) for _ in range(2)))

    state = wrap(on_meta(make)).full_state_dict()
    for name, value in built(make).state_dict().items():
        assert state[name].shape == value.shape
        if name.startswith("1."):
            assert torch.equal(state[name], value)  # ones and zeros
            continue
        bound = float(value.abs().max())
        assert float(state[name].abs().max()) == pytest.approx(bound, rel=0.05)
        assert float(state[name].std()) == pytest.approx(float(value.std()), rel=0.2)
        assert abs(float(state[name].mean())) < 0.2 * bound


@pytest.mark.ranks(1)
def test_a_layer_that_cannot_initialise_itself(world):
    message = r"a Blocks in '' is on the meta device and has no reset_parameters\(\): give param_init_fn="
    with pytest.raises(ValueError, match=message):  # it has a parameter of its own
        ax.FSDP(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Blocks(1))))
