"""Tensors that nobody takes for the whole: refused on all ranks, as functions without a rule are, or right."""

import copy
import inspect
import io
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from helpers.compare import refused
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import get_testing_overrides, resolve_name

import axonmpi as ax
from axonmpi.domain import Domain, DomainTensor
from axonmpi.domain.domain_tensor import RULES
from axonmpi.errors import DomainError
from axonmpi.pipeline.runtime.payload import pack

pytestmark = pytest.mark.ranks(2)


class Own(torch.autograd.Function):
    """Somebody's function, which sees parts in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def cut(world: ax.World) -> DomainTensor:
    return Domain(ax.DeviceMesh({"y": world.size}), {"y": 0}).shard(torch.arange(20.0).view(5, 4))


def functions_without_a_rule() -> dict[Callable[..., Any], int]:
    """Return functions of torch, and how many arguments each needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated ones
        overridable = get_testing_overrides()
    found = {}
    for function, stub in overridable.items():
        if function not in RULES and "distributed" not in (getattr(function, "__module__", None) or ""):
            parameters = inspect.signature(stub).parameters.values()
            found[function] = sum(
                one.default is one.empty and one.kind is not one.VAR_KEYWORD for one in parameters
            )
    return found


def outcome(function: Callable[..., Any], count: int, x: Tensor) -> object:
    """Return the result of a call with arguments that torch accepts, or its error; None if nothing is accepted."""
    for others in product((0, x, [1], [x], 1.0), repeat=min(max(count - 1, 0), 3)):
        try:
            return function(x, *others)
        except (TypeError, AttributeError):
            continue
        except Exception as error:
            return error
    return None


def test_functions_without_a_rule_are_refused(world: ax.World) -> None:
    x = cut(world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {function: outcome(function, count, x) for function, count in functions_without_a_rule().items()}
    tried = {function: result for function, result in found.items() if result is not None}
    assert len(tried) > 400
    others = {resolve_name(one) for one, result in tried.items() if not isinstance(result, DomainError)}
    # Torch refuses the one itself, and does not ask before the other, which lets go of the part.
    assert others <= {"torch.Tensor.record_stream", "torch.Tensor.set_"}


def test_recurrent_layers_transforms_and_copies_are_refused(world: ax.World) -> None:
    x = cut(world)
    layers = nn.LSTM(4, 3), nn.GRU(4, 3), nn.RNN(4, 3), nn.LSTMCell(4, 3), nn.GRUCell(4, 3)
    calls: list[Callable[[], object]] = [
        *(partial(layer, x) for layer in layers),
        partial(copy.deepcopy, x),
        partial(torch.save, {"state": [x]}, io.BytesIO()),
        partial(torch.vmap(lambda row: row * 2), x),
        partial(torch.vmap(lambda a, b: a + b, in_dims=(None, 0)), x, torch.ones(3, 5, 4)),
        lambda: torch.func.grad(lambda a: (a * x).sum())(torch.ones(5, 4)),
        partial(torch.add, x, 1, out=torch.empty(5, 4)),
        partial(torch.empty(5, 4).copy_, x),
        partial(x.backward, torch.ones(5, 4)),
        partial(pack, {"output": [x]}),
    ]
    refused(DomainError, *((call, ": expected|expected ordinary tensors") for call in calls))
    # The collectives of this package take ordinary tensors alone.
    sent = partial(ax.autograd.gather, x), partial(ax.autograd.fetch, x, 0, 1), partial(ax.all_gather, x)
    refused(TypeError, *((call, "expected an ordinary tensor, got a DomainTensor") for call in sent))


def test_results_of_a_foreign_function_are_refused_wherever_they_stand(world: ax.World) -> None:
    x = cut(world).requires_grad_()
    y = Own.apply(x)
    refused(
        DomainError,
        (lambda: functional.linear(input=y, weight=torch.ones(4, 4)), "autograd.Function"),
        (lambda: torch.cat([x, y]), "autograd.Function"),
        (lambda: torch.stack([y]), "autograd.Function"),
        (lambda: functional.scaled_dot_product_attention(x, x, value=y), "autograd.Function"),
    )
    with torch.no_grad():
        assert torch.equal(Own.apply(x).full_tensor(), x.full_tensor())


def test_parameters_that_differ_over_the_ranks_are_refused_at_first_use(world: ax.World) -> None:
    x, layers = cut(world), [nn.Linear(4, 4) for _ in range(2)]
    for layer, value in zip(layers, (1.0, world.rank), strict=True):
        nn.init.constant_(layer.weight, 2.0)
        nn.init.constant_(layer.bias, value)
    layers[0](x).sum().backward()
    refused(DomainError, (partial(layers[1], x), r"same values on all ranks .* shapes \[\[4\]\]"))
    with torch.no_grad():
        layers[1].bias.fill_(0)
    assert layers[1](x).shape == (5, 4)
