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
from axonmpi.domain import Domain, DomainTensor, local_map
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
        partial(x.as_subclass, Tensor),
        *(partial(change, x) for change in (Tensor.normal_, Tensor.random_, Tensor.bernoulli_, functional.rrelu_)),
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


def test_ordinary_tensors_with_the_sizes_of_a_part_are_refused(world: ax.World) -> None:
    x, mask = cut(world), torch.ones(2, 4).bool()
    calls = partial(torch.where, mask, x, 0.0), partial(x.masked_fill, mask, 0.0), partial(torch.add, mask, x)
    refused(DomainError, *((call, r"has the whole's sizes; domain.from_local") for call in calls))
    refused(IndexError, (lambda: x[mask], r"expected a mask of torch.Size\(\[5, 4\]\)"))


def test_rows_that_are_copies_refuse_changes(world: ax.World) -> None:
    """A change would not reach the tensor itself; all else is as with an ordinary tensor."""
    x = cut(world).requires_grad_()
    with torch.no_grad():
        row, whole = x[3], torch.arange(20.0).view(5, 4)
        changes: list[Callable[[], object]] = [
            row.zero_,
            partial(row.view(2, 2)[0].fill_, 1.0),
            partial(row.__setitem__, 0, 1.0),
            partial(row.__iadd__, 1),
            partial(functional.relu, row, inplace=True),
            partial(nn.init.ones_, x.unbind()[1]),
            x.view(20)[3].detach().neg_,
            x.view(2, 10)[1, :4].zero_,
        ]
        refused(DomainError, *((change, "slice of") for change in changes))
        assert torch.equal(x.full_tensor(), whole)
        assert row.clone().add_(1).sum() == row.add(1).sum() == whole[3].sum() + 4
        stored = io.BytesIO()
        torch.save([row, copy.deepcopy(row)], stored)
        stored.seek(0)
        for loaded in torch.load(stored, weights_only=True):
            assert type(loaded) is Tensor
            assert torch.equal(loaded, whole[3])
    (x[3] * x).sum().backward()
    assert x.grad is not None
    expected = whole[3].expand(5, 4) + (torch.arange(5) == 3).view(5, 1) * whole.sum(0)
    assert torch.equal(x.grad.full_tensor(), expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_parameters_of_all_layers_have_to_be_the_same(world: ax.World, mode: Callable[[], Any]) -> None:
    x = Domain(ax.DeviceMesh({"y": world.size}), {"y": 2}).shard(torch.arange(60.0).view(2, 6, 5))
    parameter, layers = nn.Parameter(torch.ones(6, 5)), [nn.GroupNorm(2, 6), nn.BatchNorm1d(6), nn.LayerNorm(5)]
    attention = nn.MultiheadAttention(5, 1)
    for each in (parameter, *attention.parameters(), *(layer.weight for layer in layers)):
        nn.init.constant_(each, world.rank)
    calls = [*(partial(layer, x) for layer in [*layers, layers[0].eval()]), partial(torch.mul, x, parameter)]
    calls += [partial(attention, x, x, x, need_weights=False), partial(local_map, torch.add, x, parameter)]
    with mode():
        refused(DomainError, *((call, "same values on all ranks") for call in calls))


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
