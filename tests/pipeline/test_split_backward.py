"""Backward in two halves gives what backward at once gives, for graphs of every kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from axonmpi.pipeline.split_backward import input_gradients


class Doubled(torch.autograd.Function):
    """A function of Python, with a parameter, that counts what it computes."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return 2 * gradient * weight, 2 * gradient * x


class Shared(nn.Module):
    """Uses a parameter twice along the way, and once beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.tanh(x @ self.weight)
        x = self.linear(x) @ self.weight.t()
        return x, (self.weight**2).sum(0)


class Mixed(nn.Module):
    """Norms, an embedding of no input, a residual, a Python function, a bias that is added twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.norm = nn.LayerNorm(6)
        self.position = nn.Parameter(torch.randn(4))
        self.weight = nn.Parameter(torch.randn(6))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.norm(self.first(x + self.position))
        hidden = Doubled.apply(hidden, self.weight)
        return x + self.last(hidden) + self.position, hidden.sum(1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (checkpoint(self.inner, x, use_reentrant=False),)


class WithoutInput(nn.Module):
    """Nothing that is returned depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.weight.exp(),)


class Passing(nn.Module):
    """Hands its input on, beside something made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, self.linear(x)


def halves(module: nn.Module, inputs: list[Tensor], gradients: list[Tensor]) -> None:
    """Compute in two halves what `torch.autograd.backward` computes at once."""
    outputs = [output for output in module(*inputs) if output.requires_grad]
    weights = input_gradients([get_gradient_edge(output) for output in outputs], gradients, inputs)
    del outputs
    weights.compute()


def drawn_like(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.randn(output.shape, generator=drawn) for output in outputs]


@pytest.mark.parametrize("kind", [Shared, Mixed, Checkpointed, WithoutInput, Passing])
def test_both_halves_make_the_whole(kind) -> None:
    torch.manual_seed(0)
    module = kind()
    values = torch.randn(3, 4)
    whole, parts = values.clone().requires_grad_(), values.clone().requires_grad_()
    gradients = drawn_like(module(whole))
    for _ in range(2):  # gradients are added to those that are there
        torch.autograd.backward(module(whole), gradients)
    expected = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    for _ in range(2):
        halves(module, [parts], gradients)
    torch.testing.assert_close([p.grad for p in module.parameters()], expected)
    torch.testing.assert_close(parts.grad, whole.grad)


def test_the_first_half_computes_no_gradient_of_a_weight() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))
    inputs = torch.randn(2, 4, requires_grad=True)
    output = module(inputs)
    weights = input_gradients([get_gradient_edge(output)], [torch.ones(2, 4)], [inputs])
    assert inputs.grad is not None
    computed = [parameter.dim() for parameter in module.parameters() if parameter.grad is not None]
    assert computed == [1, 1, 1, 1]
    weights.compute()
    assert None not in [parameter.grad for parameter in module.parameters()]


def test_without_inputs_all_is_left_to_the_second_half() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    weights = input_gradients([get_gradient_edge(module(torch.randn(2, 4)))], [torch.ones(2, 4)], [])
    assert [parameter.grad for parameter in module.parameters()] == [None] * 4
    weights.compute()
    assert None not in [parameter.grad for parameter in module.parameters()]


def test_nothing_of_the_graph_is_kept_after_the_second_half() -> None:
    alive: list[int] = []

    class Counted:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    inputs = torch.randn(2, 4, requires_grad=True)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with torch.autograd.graph.saved_tensors_hooks(Counted, lambda counted: counted.tensor):
        output = module(inputs)
    weights = input_gradients([get_gradient_edge(output)], [torch.ones(2, 4)], [inputs])
    del output
    assert alive
    weights.compute()
    assert not alive


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_graphs(data) -> None:
    """Values are combined at random: with parameters that may be used again, with each other, or both."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    shapes = data.draw(st.lists(st.sampled_from([(3,), (1, 3)]), min_size=1, max_size=4))
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    steps = data.draw(
        st.lists(
            st.tuples(st.sampled_from("+*twn"), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=12
        )
    )
    chosen = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))

    def compute(inputs: list[Tensor]) -> list[Tensor]:
        values = list(inputs)
        for kind, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            weight = parameters[second % len(parameters)]
            made = {
                "+": lambda a=a, b=b: a + b,
                "*": lambda a=a, b=b: a * b,
                "t": lambda a=a: torch.tanh(a),
                "w": lambda a=a, weight=weight: a * weight + weight,
                "n": lambda weight=weight: weight * 2,
            }
            values.append(made[kind]())
        return [values[len(inputs) :][number % len(steps)] for number in chosen]

    values = [torch.randn(1, 3) for _ in range(2)]
    whole = [value.clone().requires_grad_() for value in values]
    outputs = compute(whole)
    gradients = drawn_like(tuple(outputs))
    torch.autograd.backward(outputs, gradients)
    expected = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    parts = [value.clone().requires_grad_() for value in values]
    weights = input_gradients([get_gradient_edge(output) for output in compute(parts)], gradients, parts)
    weights.compute()
    torch.testing.assert_close([parameter.grad for parameter in parameters], expected)
    torch.testing.assert_close([part.grad for part in parts], [value.grad for value in whole])
