"""State dicts of divided models: whole, of one rank, and back."""

import pytest
import torch
from helpers.compare import assert_close, assert_equal, gradients_of, refused
from helpers.models import built
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.tensor import (
    copies,
    full_state_dict,
    load_full_state_dict,
    local_state_dict,
    tensor_parallelize,
)

WORDS = 5


class Conv1D(nn.Module):
    """A linear layer with its weight as [in, out], as `transformers` has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Model(nn.Module):
    """Layers that are cut along each dimension, padded, transposed and not at all; a buffer and more state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4)
        self.norm = nn.BatchNorm1d(4)
        self.up, self.down = Conv1D(8, 4), Conv1D(4, 8)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.note = "new"

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.embedding(words))
        return self.second(torch.tanh(self.first(self.down(torch.tanh(self.up(x))))))

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


PLAN = {"embedding": "vocab", "up": "column", "down": "row", "first": "column", "second": "row"}


def divided(seed: int = 0) -> nn.Module:
    return tensor_parallelize(built(Model, seed), PLAN)


@pytest.mark.ranks(1, 2)
def test_the_whole_state_and_this_ranks_part(world):
    whole, model = built(Model), divided()
    whole.note = model.note = "old"
    assert_equal(full_state_dict(model), whole.state_dict())
    assert_equal(full_state_dict(model, rank0_only=True), whole.state_dict() if world.rank == 0 else {})
    assert_equal(local_state_dict(model, whole.state_dict()), model.state_dict())
    assert [list(model.up.weight.shape), list(model.down.weight.shape)] == [
        [8 // world.size, 4],
        [4, 8 // world.size],
    ]
    other = built(Model, 1)
    other.load_state_dict(full_state_dict(model))
    assert_equal(other.state_dict(), whole.state_dict())
    model.load_state_dict(local_state_dict(model, built(Model, 2).state_dict()))
    assert_equal(full_state_dict(model), built(Model, 2).state_dict())


@pytest.mark.ranks(2)
def test_transposed_layers_are_what_they_were(world):
    model, whole = (built(Model).double().eval() for _ in range(2))
    model.up.weight.requires_grad_(False)
    tensor_parallelize(model, PLAN)
    dtypes, modes = {p.dtype for p in model.parameters()}, {part.training for part in model.modules()}
    assert (dtypes, modes) == ({torch.float64}, {False})
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["up.weight"]
    words = torch.tensor([0, 4, 2])
    assert_close(model(words), whole(words))


@pytest.mark.ranks(2)
def test_outputs_of_transposed_layers_are_gathered(world):
    whole, model = built(Model), tensor_parallelize(built(Model), {"up": "column:gather"})
    outputs = [one(torch.tensor([0, 4, 2])) for one in (whole, model)]
    assert_close(*outputs)
    torch.autograd.backward([output.square().sum() for output in outputs])
    assert_close(full_state_dict(model, gradients_of(model)), gradients_of(whole))


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_loading_a_whole_state_from_rank_0(world):
    source, model = built(Model, 1).double(), divided()
    source.note, source.norm.running_mean[:] = "other", 3.0
    load_full_state_dict(model, source.state_dict() if world.rank == 0 else None)
    assert_equal(full_state_dict(model), source.float().state_dict())
    assert (model.note, model.up.weight.dtype) == ("other", torch.float32)


@pytest.mark.ranks(2)
def test_a_part_of_a_state_and_names_that_are_not_known(world):
    whole, model = built(Model, 1), divided()
    state = {name: value for name, value in whole.state_dict().items() if not name.startswith("up")}
    state["head.weight"] = torch.ones(2)
    refused(
        ValueError,
        (
            lambda: load_full_state_dict(model, state),
            r"^state_dict does not fit .*missing: up.weight, up.bias; unexpected: head.weight$",
        ),
    )
    assert_equal(full_state_dict(model), built(Model).state_dict())
    load_full_state_dict(model, state, strict=False)
    del state["head.weight"]
    assert_equal(full_state_dict(model), built(Model).state_dict() | state)


@pytest.mark.ranks(2)
def test_what_is_not_whole_is_not_loaded(world):
    model = divided()
    shapes = {"up.weight": torch.ones(8, 4), "norm.bias": torch.ones(3), "embedding.weight": torch.ones(6, 4)}
    wrong = {**built(Model).state_dict(), **shapes}
    misfits = r"wrong shapes: embedding.weight: expected \[5, 4\], got .*; norm.bias: .*; up.weight: "
    no_tensor = {**wrong, "up.weight": 3} if world.rank == 0 else None
    no_state = None if world.rank == 0 else {}
    refused(
        ValueError,
        (lambda: load_full_state_dict(model, wrong), rf"{misfits}expected \[4, 8\], got \[8, 4\]"),
        (lambda: load_full_state_dict(model, no_tensor), rf"{misfits}expected \[4, 8\], got int"),
        (
            lambda: load_full_state_dict(model, no_state),
            "^state_dict: expected a mapping .* on rank 0, got NoneType",
        ),
        (
            lambda: local_state_dict(model, wrong),
            r"embedding.weight: expected size 5 along dim 0, got shape \[6, 4\]; up.weight",
        ),
    )
    assert_equal(full_state_dict(model), built(Model).state_dict())


@pytest.mark.ranks(2)
def test_gradients_and_what_an_optimizer_keeps(world):
    words = torch.tensor([0, 1, 2, 3, 4, 1])
    whole, model, averages = built(Model), divided(), []
    for one in (whole, model):
        one.second.bias.requires_grad_(False)
        one(words).square().sum().backward()
        optimizer = torch.optim.AdamW(one.parameters())
        optimizer.step()
        trained = {name: p for name, p in one.named_parameters() if p.requires_grad}
        averages.append({name: optimizer.state[p]["exp_avg"] for name, p in trained.items()})
    found = full_state_dict(model, gradients_of(model))
    assert found["second.bias"] is None
    assert_close(found, gradients_of(whole))
    assert_close(full_state_dict(model, averages[1]), averages[0])
    assert_equal(local_state_dict(model, full_state_dict(model, averages[1])), averages[1])


@pytest.mark.ranks(2)
def test_states_that_do_not_fit_together(world):
    model = divided()
    state = model.state_dict()
    others = {name: value for name, value in state.items() if world.rank == 0 or name != "up.bias"}
    order = dict(reversed(state.items())) if world.rank else state
    shape = {**state, "up.bias": torch.ones(8)} if world.rank else state
    refused(
        ValueError,
        (lambda: full_state_dict(model, others), r"same names .* on all ranks; .*\n  rank 0: up.bias\n  rank 1: "),
        (
            lambda: full_state_dict(model, order),
            r"same order on all ranks; .*\n  rank 0: embedding.weight\n  rank 1: ",
        ),
        (
            lambda: full_state_dict(model, shape),
            r"^rank 1: state: up.bias: expected size 4 along dim 0, got shape \[8\]$",
        ),
    )
    assert full_state_dict(model, {}) == {}


@pytest.mark.ranks(2)
def test_names_of_wrapped_models(world):
    """Wrappers that do not show in names are looked through; a submodule that is called `module` is none."""
    model = divided()
    assert_equal(full_state_dict(ax.DDP(model, process_group=ax.ProcessGroup.mock())), built(Model).state_dict())
    nested, whole = (nn.ModuleDict({"module": built(Model)}) for _ in range(2))
    tensor_parallelize(nested, {f"module.{name}": style for name, style in PLAN.items()})
    assert_equal(full_state_dict(nested), whole.state_dict())
    assert list(copies(nested)) == [name for name, _ in whole.named_parameters()]
    made = nn.Sequential(ax.ColumnParallelLinear(4, 8), nn.Tanh(), ax.RowParallelLinear(8, 4))
    assert copies(made) == {"0.weight": 1, "0.bias": 1, "2.weight": 1, "2.bias": 2}


@pytest.mark.ranks(2)
def test_models_without_parallel_layers_or_of_several_groups(world):
    layers = [ax.ColumnParallelLinear(4, 4), ax.ColumnParallelLinear(4, 4, ax.ProcessGroup.mock())]
    refused(
        ValueError,
        (lambda: full_state_dict(nn.Linear(2, 2)), "expected a model with parallel layers, Linear has none"),
        (lambda: copies(nn.Sequential(*layers)), "parallel layers that all belong to one group"),
    )
    refused(TypeError, (lambda: copies({}), "expected a torch.nn.Module, got dict"))
