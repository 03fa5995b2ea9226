"""Large linear layers: their gradients are computed in memory that the ranks share, and that is used again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from models import adamw, assert_close, built, gradients_alone, gradients_of, wrapped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi.backends.node_paths import NodePaths

BATCH = 12
WIDTH = 5
RANKS = pytest.mark.ranks(1, 2, 4)


def wide() -> nn.Module:
    """Both weights are larger than the smallest gradient that is reduced in its own memory."""
    return nn.Sequential(nn.Linear(WIDTH, 520), nn.Tanh(), nn.Linear(520, 520, bias=False), nn.Tanh(), last())


def last() -> nn.Module:
    return nn.Linear(520, 260)


def inputs_of(step: int, rank: int = 0, size: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator).chunk(size)[rank]


def own_loss(model: nn.Module, world: ax.World, step: int = 0) -> Tensor:
    return model(inputs_of(step, world.rank, world.size)).square().mean()


def joined_loss(step: int = 0) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(inputs_of(step)).square().mean()


def check_gradients(model: ax.DDP, expected: dict[str, Tensor | None]) -> None:
    assert_close(gradients_of(model.module), expected)


def large_gradients(model: ax.DDP) -> list[Tensor]:
    return [model.module[position].weight.grad for position in (2, 4)]


def places(model: ax.DDP) -> list[int]:
    return [gradient.data_ptr() for gradient in large_gradients(model)]


# ---- where gradients lie ----------------------------------------------------------------------------------------


@RANKS
def test_memory_is_used_again_and_no_new_one_is_found(world):
    model = wrapped(world, built(wide), overlaps=False)
    seen = []
    for step in range(4):
        model.zero_grad()
        own_loss(model, world, step).backward()
        check_gradients(model, gradients_alone(model.module, joined_loss(step)))
        seen.append(places(model))
    assert seen[0] == seen[1] == seen[2] == seen[3]


@pytest.mark.ranks(2, 4)
def test_gradients_lie_in_memory_that_the_ranks_share(world):
    model = wrapped(world, built(wide), overlaps=False)
    own_loss(model, world).backward()
    paths = getattr(world.default_group.backend, "_paths", None)
    if isinstance(paths, NodePaths):  # else these ranks have no memory to share
        assert all(paths.address(gradient) for gradient in large_gradients(model))
    assert len(set(places(model))) == 2


@RANKS
@pytest.mark.parametrize("holders", ["all", "last"])
def test_gradients_that_somebody_keeps_stay_as_they_are(world, holders):
    model = wrapped(world, built(wide))
    kept = []
    for step in range(3):
        model.zero_grad()
        own_loss(model, world, step).backward()
        expected = gradients_alone(model.module, joined_loss(step))
        check_gradients(model, expected)
        if holders == "all" or world.rank == world.size - 1:
            kept.append((large_gradients(model), [expected["2.weight"], expected["4.weight"]]))
    for gradients, expected in kept:
        for gradient, value in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, value, atol=1e-5, rtol=1e-5)


@pytest.mark.ranks(2)
def test_a_view_of_a_gradient_keeps_its_memory_too(world):
    model = wrapped(world, built(wide))
    own_loss(model, world, 0).backward()
    row = model.module[2].weight.grad[7]
    before = row.clone()
    model.zero_grad()
    own_loss(model, world, 1).backward()
    assert torch.equal(row, before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": False}, {"reduce_dtype": torch.bfloat16}], ids=str)
def test_gradients_in_buckets(world, options):
    model = wrapped(world, built(wide), **options)
    for step in range(3):
        model.zero_grad()
        own_loss(model, world, step).backward()
        tolerance = 1e-2 if "reduce_dtype" in options else 1e-5
        expected = gradients_alone(model.module, joined_loss(step))
        assert_close(gradients_of(model.module), expected, tolerance)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_with_accumulation(world, set_to_none):
    model, alone = wrapped(world, built(wide)), built(wide)
    optimizer, optimizer_alone = adamw(model), adamw(alone)
    for step in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer_alone.zero_grad()
        with model.no_sync():
            own_loss(model, world, 2 * step).backward()
        own_loss(model, world, 2 * step + 1).backward()
        (joined_loss(2 * step)(alone) + joined_loss(2 * step + 1)(alone)).backward()
        check_gradients(model, gradients_of(alone))
        optimizer.step()
        optimizer_alone.step()
    # An optimizer divides by square roots of gradients, so small ones may move a parameter by a part of the rate.
    assert_close(model.module.state_dict(), alone.state_dict(), 1e-3)


# ---- layers and backwards of all kinds --------------------------------------------------------------------------


class TwiceUsed(nn.Module):
    """One large weight that is used twice in a forward, once on three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 520)
        self.large = nn.Linear(520, 520)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.large(torch.tanh(self.first(x)))
        return self.large(torch.tanh(hidden).unsqueeze(1)).squeeze(1)


class Transposed(nn.Linear):
    """Computes in a way of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight * 2


def frozen() -> nn.Module:
    model = wide()
    model[2].requires_grad_(False)
    return model


def strided() -> nn.Module:
    model = wide()
    model[2].weight = nn.Parameter(model[2].weight.detach().t())
    return model


def tied() -> nn.Module:
    model = wide()
    model[4] = nn.Linear(520, 520, bias=False)
    model[4].weight = model[2].weight
    return model


def of_its_own() -> nn.Module:
    model = wide()
    model[2] = Transposed(520, 520, bias=False)
    return model


class Doubled(nn.Module):
    """A large layer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 520)
        self.large = nn.Linear(520, 260, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(torch.tanh(self.first(x)).double()).float()


class InPlace(nn.Module):
    """Changes what layers return, and what they were given, in place."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 520)
        self.frozen = nn.Linear(520, 520).requires_grad_(trained)
        self.large = nn.Linear(520, 520)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).unflatten(0, (-1, 1)) * 1
        again = self.frozen(hidden).relu_()
        if not self.frozen.weight.requires_grad:
            hidden += 1  # which no gradient needs
        return self.large(again).relu_().flatten(0, 1)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 260)
        self.large = nn.Linear(260, 260, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(torch.complex(self.first(x), torch.ones(()))).abs()


class WithAttention(nn.Module):
    """torch's attention, which reads the weights of its layers and does not call them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 368)
        self.mix = nn.MultiheadAttention(368, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).unsqueeze(1)
        return self.mix(hidden, hidden, hidden)[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "make",
    [
        *(TwiceUsed, frozen, strided, tied, of_its_own, Doubled, Complex, WithAttention),
        *(pytest.param(lambda trained=t: InPlace(trained), id=f"in place {t}") for t in (True, False)),
    ],
)
def test_layers(world, make):
    model = wrapped(world, built(make))
    for step in range(3):
        model.zero_grad()
        own_loss(model, world, step).backward()
        check_gradients(model, gradients_alone(model.module, joined_loss(step)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 520)
        self.middle = nn.Sequential(nn.Linear(520, 520), nn.Tanh(), nn.Linear(520, 520))
        self.last = last()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.middle, torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        return self.last(hidden)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(world, reentrant):
    model = wrapped(world, built(lambda: Checkpointed(reentrant)), overlaps=False)
    for step in range(3):
        model.zero_grad()
        own_loss(model, world, step).backward()
        check_gradients(model, gradients_alone(model.module, joined_loss(step)))


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # asked for by the compiler
@pytest.mark.parametrize("where", ["inside", "outside", "layer"])
def test_compiled(world, where):
    module = built(wide)
    if where == "layer":
        module[2].compile(backend="aot_eager")
    inside = torch.compile(module, backend="aot_eager") if where == "inside" else module
    model = wrapped(world, inside, overlaps=False)
    program = torch.compile(model, backend="aot_eager") if where == "outside" else model
    for step in range(3):
        model.zero_grad()
        own_loss(program, world, step).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        expected = gradients_alone(built(wide), joined_loss(step)).values()
        for gradient, value in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, value, atol=1e-5, rtol=1e-5)


@pytest.mark.ranks(2)
def test_autocast(world):
    model = wrapped(world, built(wide))
    alone = copy.deepcopy(model.module)
    for one, loss in ((model, own_loss(model, world)), (alone, None)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(inputs_of(0, world.rank, world.size)).float().square().mean()
        loss.backward()
    for parameter in alone.parameters():
        ax.all_reduce_mean(parameter.grad)
    check_gradients(model, gradients_of(alone))


@pytest.mark.ranks(2)
def test_gradients_of_gradients(world):
    def penalty(model: nn.Module, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        output = model(inputs).square().sum(1)
        (slope,) = torch.autograd.grad(output.mean(), inputs, create_graph=True)
        return output.mean() + slope.square().sum(1).mean() * len(inputs) ** 2

    model = wrapped(world, built(wide))
    own = inputs_of(0, world.rank, world.size)
    penalty(model, own).backward()
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    penalty(alone, own).backward()
    for parameter in alone.parameters():
        ax.all_reduce_mean(parameter.grad)
    check_gradients(model, gradients_of(alone))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("of", ["inputs", "parameters", "weight"])
def test_gradients_that_are_only_returned(world, of):
    model = wrapped(world, built(wide))
    found = []
    for step in range(2):
        for one in (model, model.module):
            inputs = inputs_of(step).requires_grad_()
            wanted = {
                "inputs": [inputs],
                "parameters": list(model.parameters()),
                "weight": [model.module[2].weight],
            }
            found.append(torch.autograd.grad(one(inputs).square().mean(), wanted[of]))
    for ours, plain in (found[:2], found[2:]):
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other)
    own_loss(model, world).backward()
    check_gradients(model, gradients_alone(model.module, joined_loss()))


@pytest.mark.ranks(2)
def test_a_weight_that_changes_between_forward_and_backward(world):
    model = wrapped(world, nn.Sequential(nn.Linear(WIDTH, 30000)))
    inputs = inputs_of(0, world.rank, world.size)
    loss = model(inputs).sum()
    with torch.no_grad():
        model.module[0].weight += 1  # the gradient does not depend on it
    loss.backward()
    expected = ax.all_gather(inputs).sum(0) / world.size
    torch.testing.assert_close(model.module[0].weight.grad, expected.expand(30000, -1), atol=1e-5, rtol=1e-5)


@pytest.mark.ranks(2)
def test_many_backwards_at_once(world):
    model = wrapped(world, built(wide))
    weight, found = model.module[2].weight, []
    for one in (model, model.module):
        rows = one(inputs_of(0)).square().sum(1)[:3]
        found.append(torch.autograd.grad(rows, [weight], torch.eye(3), is_grads_batched=True)[0])
    torch.testing.assert_close(*found)


@pytest.mark.ranks(1)
def test_modes_that_change_functions(world):
    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is nn.functional.linear else result

    model = wrapped(world, built(wide))
    with Doubling():
        own_loss(model, world).backward()
        expected = gradients_alone(model.module, joined_loss())
    check_gradients(model, expected)


@pytest.mark.ranks(1)
def test_sparse_inputs(world):
    model = wrapped(world, nn.Sequential(nn.Linear(520, 260)))
    dense = torch.randn(4, 520).relu()
    torch.testing.assert_close(model(dense.to_sparse()), model.module(dense))
    model(dense.to_sparse()).sum().backward()
    expected = dense.sum(0).expand(260, -1)
    torch.testing.assert_close(model.module[0].weight.grad, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.ranks(1, 2)
def test_torch_that_does_not_tell_about_checkpointing(world, monkeypatch):
    monkeypatch.setattr("axonmpi.wrapping.linear._top_hooks", None)  # before 2.8
    model = wrapped(world, built(wide))
    own_loss(model, world).backward()
    check_gradients(model, gradients_alone(model.module, joined_loss()))


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # used by torch itself
def test_transforms_of_functions(world):
    model = wrapped(world, built(wide))
    inputs, direction = inputs_of(0), inputs_of(1)
    _, slope = torch.func.jvp(model, (inputs,), (direction,))
    torch.testing.assert_close(slope, torch.func.jvp(model.module, (inputs,), (direction,))[1])
    torch.testing.assert_close(torch.func.vmap(model)(inputs), model.module(inputs))
    parameters = {f"module.{name}": parameter for name, parameter in model.module.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (inputs,)).square().mean()

    found = torch.func.grad(loss)(parameters)
    expected = gradients_alone(model.module, joined_loss())
    for name, value in expected.items():
        torch.testing.assert_close(found[f"module.{name}"], value, atol=1e-6, rtol=1e-4)


# ---- the module itself ------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_the_module_is_left_as_it_was(world):
    model = wrapped(world, built(wide))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(3, WIDTH + 1))
    own_loss(model, world).backward()
    assert all("forward" not in part.__dict__ for part in model.modules())
    restored = pickle.loads(pickle.dumps(model.module))
    torch.testing.assert_close(restored(inputs_of(0)), model.module(inputs_of(0)))


@pytest.mark.ranks(1)
def test_a_forward_that_somebody_has_replaced_is_left_alone(world):
    model = wrapped(world, built(wide))
    layer = model.module[2]
    layer.forward = lambda x: nn.Linear.forward(layer, x) * 3
    torch.testing.assert_close(model(inputs_of(0)), model.module(inputs_of(0)))
    assert "forward" in layer.__dict__


@pytest.mark.ranks(1)
def test_a_forward_that_is_set_meanwhile_stays(world):
    model = wrapped(world, built(wide))
    layer = model.module[2]

    def three_times(x: Tensor) -> Tensor:
        return nn.Linear.forward(layer, x) * 3

    handle = model.module[0].register_forward_hook(lambda *_: setattr(layer, "forward", three_times))
    model(inputs_of(0))
    handle.remove()
    assert layer.__dict__["forward"] is three_times
    layer.__class__ = Transposed
    del layer.forward
    torch.testing.assert_close(model(inputs_of(0)), model.module(inputs_of(0)))


@pytest.mark.ranks(2)
def test_wrapped_again(world):
    module = built(wide)
    for step in range(3):
        model = wrapped(world, module)
        model.zero_grad()
        own_loss(model, world, step).backward()
        check_gradients(model, gradients_alone(module, joined_loss(step)))
        model = None
