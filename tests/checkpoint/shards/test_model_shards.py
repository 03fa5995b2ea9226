"""Shards of models: those of all ranks put together are the state dict of the whole model in plain torch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.checkpoint_shards import assembled, fill
from helpers.checkpoints import by_name
from helpers.compare import assert_equal, refused
from helpers.layouts import LAYOUTS, laid_out, whole_model
from helpers.models import ZOO, TiedBlocks, built, new_group
from helpers.transformer_parts import gpt2, llama
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.checkpoint.shards.model_shards import model_shards
from axonmpi.tensor import tensor_parallelize


def joined(world: ax.World, own: dict[str, Any]) -> dict[str, Any]:
    """Return what all ranks have by different names; collective."""
    everywhere = world.default_group.all_gather_object(own)
    return {name: value for of_rank in everywhere for name, value in of_rank.items()}


def check(world: ax.World, model: nn.Module, expected: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Compare the shards of all ranks with a state dict, of whose tied tensors each is there once; collective."""
    found = model_shards(model, world.default_group)
    with found.stable():
        tensors = assembled(world, found.shards)
    assert joined(world, found.aliases) == aliases
    assert_equal(by_name(tensors), {name: expected[name] for name in sorted({*expected} - {*aliases})})


def check_loading(world: ax.World, model: nn.Module, values: dict[str, Tensor]) -> None:
    """Write values to the shards of all ranks, and find them again; collective."""
    found = model_shards(model, world.default_group)
    with found.stable():
        fill(found.shards, values)
        found.loaded(found.extra)
    check(world, model, values, joined(world, found.aliases))


def changed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() + 1 for name, value in values.items()}


# ---- layouts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.ranks(4)
def test_every_layout_has_the_full_model_in_shards(world: ax.World, layout: str, tied: bool) -> None:
    laid = laid_out(layout, world, tied=tied)
    expected = whole_model(tied=tied)
    aliases = {"head.weight": "embedding.weight"} if tied else {}
    check(world, laid.model, expected.state_dict(), aliases)
    found = model_shards(laid.model, world.default_group)
    may_wait = {name for name, parameter in expected.named_parameters() if parameter.dim()}
    assert {shard.name for shard in found.shards if shard.is_split} <= may_wait
    assert found.config == (None if isinstance(laid.model, ax.Pipeline) else expected.config)
    assert not found.extra


TIES = {
    "blocks.2.up.weight": "blocks.0.up.weight",
    "blocks.2.up.bias": "blocks.0.up.bias",
    "logits.weight": "embedding.weight",
}
"""Of `TiedBlocks`."""

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ax.DDP,
    "full": ax.FSDP,
    "parameters": functools.partial(ax.FSDP, shard_by="parameters"),
    "mixed": functools.partial(ax.FSDP, mixed_precision=True),
    "files": functools.partial(ax.FSDP, cpu_offload="full"),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("name", [name for name in ZOO if name != "large"])
@pytest.mark.ranks(3)
def test_models_of_all_kinds(world: ax.World, name: str, wrap: str) -> None:
    values = built(ZOO[name]).state_dict()
    model = WRAPPERS[wrap](built(ZOO[name]))
    check(world, model, values, TIES if name == "tied_embedding" else {})
    check_loading(world, model, changed(values))


@pytest.mark.parametrize("strategy", list(ax.ShardingStrategy))
@pytest.mark.parametrize("ranks_per_node", ["", "1"])
@pytest.mark.ranks(2)
def test_a_model_computes_with_what_was_loaded(
    world: ax.World, monkeypatch: pytest.MonkeyPatch, strategy: ax.ShardingStrategy, ranks_per_node: str
) -> None:
    """Also where parameters are gathered, and were before they were loaded."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    tokens = torch.arange(8).view(2, 4)
    other = built(TiedBlocks, seed=1)
    with new_group(world) as group:
        model = ax.FSDP(built(TiedBlocks), process_group=group, sharding_strategy=strategy)
        model(tokens).sum().backward()
        shards = model_shards(model, group)
        with shards.stable():
            fill(shards.shards, other.state_dict())
            shards.loaded({})
        torch.testing.assert_close(model(tokens), other(tokens))
        with model.full_parameters():  # shards are those of the shards also where users see whole ones
            check(world, model, other.state_dict(), TIES)


# ---- tensor parallelism -----------------------------------------------------------------------------------------

DIVIDED: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama, 2 key/value heads": llama,
    "llama, 1 key/value head": functools.partial(llama, pairs=1, attention_bias=True, mlp_bias=True),
}


@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.ranks(4)
def test_models_of_transformers(world: ax.World, name: str, wrap: str) -> None:
    """Transposed and packed weights, a vocabulary that does not divide, heads that several ranks have."""
    plain, model = built(DIVIDED[name]), built(DIVIDED[name])
    mesh = ax.DeviceMesh({"dp": 1 if wrap == "plain" else 2, "tp": -1})
    tensor_parallelize(model, group=mesh.group("tp"))
    if wrap != "plain":
        model = (ax.DDP if wrap == "ddp" else ax.FSDP)(model, mesh.group("dp"))
    aliases = {"lm_head.weight": "transformer.wte.weight"} if name == "gpt2" else {}
    check(world, model, plain.state_dict(), aliases)
    check_loading(world, model, changed(plain.state_dict()))
    config = model_shards(model, world.default_group).config
    expected = {**plain.config.to_dict(), "architectures": [type(plain).__name__]}
    assert type(plain.config).from_dict(config).to_dict() == expected


# ---- pipelines --------------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """A layer with a table that all stages have, and a count of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3)})
        self.register_buffer("table", torch.arange(4.0))
        self.layers[str(number)].register_buffer("count", torch.tensor(number))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.ranks(2)
def test_stages_with_the_names_of_one_model(world: ax.World, wrapped: bool) -> None:
    """Each rank has two stages, all stages have the same buffer, the first and the last a tied parameter."""
    stages = [built(functools.partial(Counted, number), seed=number) for number in range(4)]
    stages[3].layers["3"].weight = nn.Parameter(stages[0].layers["0"].weight.detach().clone())
    expected = {name: value.clone() for stage in stages for name, value in stage.state_dict().items()}
    own: list[nn.Module] = list(stages)
    if wrapped:
        alone = ax.DeviceMesh({"pp": 2, "dp": 1}).group("dp")
        own = [ax.FSDP(stage, alone) if index % 2 == world.rank else stage for index, stage in enumerate(stages)]
    ties = [[(3, "layers.3.weight"), (0, "layers.0.weight")]]
    model = ax.Pipeline.from_modules(own, schedule="interleaved_1f1b", ties=ties)
    check(world, model, expected, {"layers.3.weight": "layers.0.weight"})
    values = changed(expected)
    check_loading(world, model, values)
    for number, stage in model.stages.items():
        assert torch.equal(dict(stage.named_buffers())["table"], values["table"])
        if number == "3":
            assert torch.equal(dict(stage.named_parameters())["layers.3.weight"], values["layers.0.weight"])


@pytest.mark.ranks(2)
def test_stages_with_names_of_their_own(world: ax.World) -> None:
    stages = [built(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), seed) for seed in range(2)]
    expected = {name: value.clone() for name, value in nn.Sequential(*stages).state_dict().items()}
    model = ax.Pipeline.from_modules(stages, ties=[[(0, "1.bias"), (1, "1.bias")]])
    expected["1.1.bias"] = expected["0.1.bias"]
    check(world, model, expected, {"1.1.bias": "0.1.bias"})


# ---- what else a state dict has ---------------------------------------------------------------------------------


class Noted(nn.Module):
    """A module with state that no file can hold."""

    def get_extra_state(self) -> Any:
        return {1, 2}


@dataclass
class Shape:
    width: int
    names: tuple[str, ...]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Shape(3, ("a", "b")), {"width": 3, "names": ["a", "b"]}),
        ({"width": 3}, {"width": 3}),
        (
            {"dtype": torch.bfloat16, "inner": Shape(1, ())},
            {"dtype": "bfloat16", "inner": {"width": 1, "names": []}},
        ),
        (Shape(3, object()), None),  # type: ignore[arg-type]
        (7, None),
        (Shape, None),
    ],
)
@pytest.mark.ranks(1)
def test_configurations(world: ax.World, config: Any, expected: Any) -> None:
    model = nn.Linear(2, 2)
    model.config = config
    for each in (model, ax.DDP(model)):
        assert model_shards(each, world.default_group).config == expected


def sparse() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.eye(2).to_sparse())
    return model


MISTAKES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device: call the model's to_empty"),
    "lazy": (lambda: nn.LazyLinear(2), "'weight' has no shape yet: run one forward first"),
    "sparse": (sparse, "'edges' is sparse"),
    "extra": (Noted, "'_extra_state' in its state dict, .* got set"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.ranks(2)
def test_what_a_file_cannot_hold_is_an_error_on_all_ranks(world: ax.World, mistake: str) -> None:
    make, message = MISTAKES[mistake]
    model = make() if world.rank else nn.Linear(2, 2)
    refused(ValueError, (lambda: model_shards(model, world.default_group), f"rank 1.*{message}|{message}"))


@pytest.mark.ranks(2)
def test_models_that_are_no_model_of_their_ranks_are_refused(world: ax.World) -> None:
    other = world.new_group([1, 0])
    layers = nn.Sequential(ax.ColumnParallelLinear(4, 4), ax.ColumnParallelLinear(4, 4, process_group=other))
    pipeline = nn.Sequential(ax.Pipeline.from_modules([nn.Linear(2, 2), nn.Linear(2, 2)]))
    refused(
        ValueError,
        (
            lambda: model_shards(layers, world.default_group),
            "expected parallel layers that all belong to one group",
        ),
        (lambda: model_shards(pipeline, world.default_group), "'0' in it is a Pipeline: give the pipeline itself"),
    )
