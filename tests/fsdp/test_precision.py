"""Mixed precision: inputs in containers, and modules that are left out."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from helpers.compare import assert_close, refused
from helpers.models import built
from torch import Tensor, nn

import axonmpi as ax

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Batch:
    inputs: Tensor
    number: int = 7
    rest: Any = None


class Takes(nn.Module):
    """Adds up what is in its argument after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(sum(floats_in([args, kwargs])))


def floats_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if dataclasses.is_dataclass(value):
        value = vars(value)
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in values for tensor in floats_in(item)]


def some() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


CONTAINERS = {
    "list": lambda: [some(), some()],
    "tuple": lambda: (some(), 3, None),
    "dict": lambda: {"a": some(), "number": 3},
    "ordered": lambda: OrderedDict(a=some(), b=some()),
    "named": lambda: Pair(some(), "text"),
    "dataclass": lambda: Batch(some(), rest=[{"deep": (some(),)}]),
    "integers": lambda: {"ids": torch.arange(3), "values": some()},
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_tensors_in_containers_are_converted(world, kind):
    plain, model, given = built(Takes), ax.FSDP(built(Takes), mixed_precision=True), CONTAINERS[kind]()
    before, expected = repr(given), in_bfloat16(plain.layer, sum(tensor.bfloat16() for tensor in floats_in(given)))
    for result in (model(given), model(batch=given)):
        assert_close(result, expected, 1e-2)
    assert repr(given) == before  # the caller's are left alone


class Norms(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), norm(), nn.Linear(6, 2)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        normed = self.norm(hidden)
        self.seen = [hidden.dtype, normed.dtype, self.norm.weight.dtype]
        return self.last(normed)


def reference(model: Norms, x: Tensor) -> Tensor:
    """Layers in bfloat16, the norm in float32."""
    normed = model.norm(in_bfloat16(model.first, x).float())
    return in_bfloat16(model.last, normed)


def in_bfloat16(layer: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("strategy", ["full", "none"])
@pytest.mark.parametrize(
    ("norm", "keep"),
    [(lambda: nn.BatchNorm1d(6), ()), (lambda: nn.LayerNorm(6), (nn.LayerNorm,))],
    ids=["batch norm", "layer norm"],
)
def test_modules_that_are_left_out_compute_in_their_own_dtype(world, norm, keep, strategy):
    plain = built(lambda: Norms(norm))
    model = ax.FSDP(
        built(lambda: Norms(norm)),
        mixed_precision=ax.MixedPrecision(keep=keep, buffer_dtype=torch.bfloat16),
        sharding_strategy=strategy,
    )
    loss, expected = model(some()).float().square().mean(), reference(plain, some()).float().square().mean()
    assert model.module.seen == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert_close(loss.detach(), expected.detach(), 1e-3)
    loss.backward()
    expected.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_close(model.full_state_dict(), plain.state_dict(), 1e-2)
    with model.full_parameters(), torch.no_grad():  # whole parameters compute without mixed precision
        assert model(some()).dtype is torch.float32


def test_what_is_left_out_is_named_by_classes():
    refused(TypeError, (lambda: ax.MixedPrecision(keep=nn.LayerNorm(3)), "keep: expected classes of modules"))
    refused(TypeError, (lambda: ax.MixedPrecision(keep=("norm",)), "keep: expected classes of modules"))


@pytest.mark.ranks(2)
def test_modules_within_those_that_are_left_out_are_left_out(world):
    class Block(nn.Sequential):
        pass

    module = nn.Sequential(nn.Linear(4, 4), Block(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    seen = []
    for layer in module[1]:
        layer.register_forward_hook(lambda layer, args, output: seen.append((args[0].dtype, layer.weight.dtype)))
    model = ax.FSDP(module, mixed_precision=ax.MixedPrecision(keep=(Block,)))
    assert model(some()).dtype is torch.bfloat16
    assert seen == [(torch.float32, torch.float32)] * 3
