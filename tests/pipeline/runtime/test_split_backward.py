"""Backward in two halves gives what backward at once gives, for graphs of every kind."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from axonmpi.pipeline.runtime.split_backward import input_gradients


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


class Kind(nn.Module):
    """Computes as a function says, with parts that it has by name; parameters are given by their shapes."""

    def __init__(self, compute: Callable[[Any, Tensor], tuple[Tensor, ...]], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(torch.randn(part)) if isinstance(part, tuple) else part)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def functions(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Weights of functions of Python, and one that such a function has made."""
    x = Doubled.apply(torch.tanh(x), m.first) @ Doubled.apply(m.made, torch.ones(4, 4))
    return (Doubled.apply(torch.tanh(x), m.second),)


def shared(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """A parameter that is used twice along the way, and once beside it."""
    return m.linear(torch.tanh(x @ m.weight)) @ m.weight.t(), (m.weight**2).sum(0)


def mixed(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Norms, an embedding of no input, a residual, a Python function, a bias that is added twice."""
    hidden = Doubled.apply(m.norm(m.first(x + m.position)), m.weight)
    return x + m.last(hidden) + m.position, hidden.sum(1)


def products(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Products with weights in every way, some of which are no parameters but made from them."""
    x = m.normed(m.plain(x[None]))[0] @ m.right
    x = torch.addmm(m.added, x, m.scaled.t(), alpha=0.5)
    x = torch.tanh(x @ m.strided) @ (m.squared * m.squared)
    x = torch.addmm(m.twice[:3], x, m.twice.tanh())
    return m.left @ x, x


def convolution(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Weights of more dimensions."""
    hidden = m.first(x[:, None])
    return (m.last(hidden[:, 0], hidden[:, 1]),)


def cast(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Weights of another dtype."""
    with torch.autocast("cpu", torch.bfloat16):
        return (m.last(torch.tanh(m.first(x))).float(),)


def layers(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Linear layers on three dimensions, one without a bias and one used twice."""
    hidden = m.last(torch.tanh(m.first(x[None])))[0]
    return m.twice(torch.tanh(m.twice(hidden))), hidden


SQUARE = (4, 4)
KINDS = {
    "functions": lambda: Kind(functions, first=(3, 4), second=(3, 4), made=SQUARE),
    "shared": lambda: Kind(shared, weight=SQUARE, linear=nn.Linear(4, 4)),
    "mixed": lambda: Kind(
        mixed,
        first=nn.Linear(4, 6),
        last=nn.Linear(6, 4, bias=False),
        norm=nn.LayerNorm(6),
        position=(4,),
        weight=(6,),
        unused=(3,),
    ),
    "checkpointed": lambda: Kind(
        lambda m, x: (checkpoint(m.inner, x, use_reentrant=False),),
        inner=nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
    ),
    "products": lambda: Kind(
        products,
        plain=nn.Linear(4, 6, bias=False),
        normed=weight_norm(nn.Linear(6, 4)),
        **dict.fromkeys(("right", "scaled", "squared", "twice"), SQUARE),
        added=(3, 4),
        left=(3, 3),
        strided=nn.Parameter(torch.randn(4, 4).t()),
    ),
    "convolution": lambda: Kind(convolution, first=nn.Conv1d(1, 2, 3, padding=1), last=nn.Bilinear(4, 4, 2)),
    "cast": lambda: Kind(cast, first=nn.Linear(4, 8), last=nn.Linear(8, 4)),
    "made of parameters alone": lambda: Kind(
        lambda m, x: (m.linear(x), m.linear.weight.exp(), m.weight * m.bias),
        linear=nn.Linear(4, 4),
        weight=SQUARE,
        bias=(4,),
    ),
    "without input": lambda: Kind(lambda m, x: (m.weight.exp(),), weight=(4,)),
    "handed on": lambda: Kind(lambda m, x: (x, m.linear(x)), linear=nn.Linear(4, 4)),
    "layers": lambda: Kind(layers, first=nn.Linear(4, 6), last=nn.Linear(6, 4, bias=False), twice=nn.Linear(4, 4)),
}


def halves(outputs: Iterable[Tensor], inputs: list[Tensor], gradients: list[Tensor]) -> None:
    """Compute in two halves what `torch.autograd.backward` computes at once."""
    edges = [get_gradient_edge(output) for output in outputs if output.requires_grad]
    input_gradients(edges, gradients, inputs).compute()


def drawn_like(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.randn(output.shape, generator=drawn) for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_both_halves_make_the_whole(kind) -> None:
    torch.manual_seed(0)
    module = KINDS[kind]()
    values = torch.randn(3, 4)
    whole, parts = values.clone().requires_grad_(), values.clone().requires_grad_()
    gradients = drawn_like(module(whole))
    for _ in range(2):  # gradients are added to those that are there
        torch.autograd.backward(module(whole), gradients)
    expected = [p.grad for p in module.parameters()]
    module.zero_grad()
    for _ in range(2):
        halves(module(parts), [parts], gradients)
    torch.testing.assert_close([p.grad for p in module.parameters()], expected, check_stride=True)
    torch.testing.assert_close(parts.grad, whole.grad)


def test_what_each_half_computes() -> None:
    """The first half leaves the gradients of matrices; all of them, if there is no input to go back to."""
    for has_input, computed in ((True, [1, 1, 1, 1]), (False, [])):
        module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))
        inputs = torch.randn(2, 4, requires_grad=has_input)
        edges = [get_gradient_edge(module(inputs))]
        weights = input_gradients(edges, [torch.ones(2, 4)], [inputs] if has_input else [])
        dims = [parameter.dim() for parameter in module.parameters() if parameter.grad is not None]
        assert (inputs.grad is not None, dims) == (has_input, computed)
        weights.compute()
        assert None not in [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv1d(1, 1, 1)], ids=["product", "again"])
def test_only_what_a_layer_was_given_is_kept_for_the_second_half(layer) -> None:
    """What autograd keeps above it, and below a product, is free after the first half; all after the second."""
    inputs = torch.randn(1, 1, 4, requires_grad=True)
    below = torch.tanh(inputs)
    given = 2 * below
    output = torch.tanh(layer(given))
    alive = [weakref.ref(tensor.untyped_storage()) for tensor in (below, given, output)]
    weights = input_gradients([get_gradient_edge(output)], [torch.ones(1, 1, 4)], [inputs])
    del below, given, output
    assert [storage() is not None for storage in alive] == [isinstance(layer, nn.Conv1d), True, False]
    assert layer.weight.grad is None
    weights.compute()
    assert [storage() for storage in alive] == [None] * 3
    assert layer.weight.grad is not None


def test_a_torch_that_does_not_show_hooks_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    x = torch.randn(2, 4, requires_grad=True)
    edge = get_gradient_edge(nn.Linear(4, 4)(x))
    with pytest.raises(RuntimeError, match=r"ZERO_BUBBLE, needs torch 2\.11 or newer, got torch 2\.10\.0"):
        input_gradients([edge], [torch.ones(2, 4)], [x])
    assert x.grad is None


def test_checkpointed_parts_are_computed_again_once() -> None:
    computed = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            computed.append(self)
            return super().forward(x)

    module = nn.Sequential(Counting(4, 4), nn.GELU(), Counting(4, 4), nn.Conv1d(2, 2, 1))
    x = torch.randn(2, 4, requires_grad=True)
    halves([checkpoint(module, x, use_reentrant=False)], [x], [torch.ones(2, 4)])
    assert len(computed) == 4
    assert None not in [parameter.grad for parameter in module.parameters()]


def test_what_was_packed_is_unpacked_once() -> None:
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.detach().clone()

    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: unpacked.append(tensor) or tensor):
        halves([module(x)], [x], [torch.ones(2, 4)])
    assert len(unpacked) == len(packed)
    assert None not in [parameter.grad for parameter in module.parameters()]


def test_hooks_of_weights_see_and_change_what_they_do_in_one_backward() -> None:
    def run(backward) -> dict[str, list[Tensor]]:
        torch.manual_seed(0)
        first, last = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        seen: dict[str, list[Tensor]] = {"changed": [], "added": []}
        first.weight.register_hook(lambda gradient: seen["changed"].append(gradient.clone()))
        first.weight.register_hook(lambda gradient: 2 * gradient)
        last.weight.register_post_accumulate_grad_hook(lambda weight: seen["added"].append(weight.grad.clone()))
        for _ in range(2):
            backward(nn.Sequential(first, nn.Tanh(), last), torch.randn(3, 4, requires_grad=True))
        return {**seen, "left": [first.weight.grad, last.weight.grad]}

    apart = run(lambda module, x: halves([module(x)], [x], [torch.ones(3, 4)]))
    torch.testing.assert_close(apart, run(lambda module, x: module(x).sum().backward()))
    assert [len(found) for found in apart.values()] == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_gradients_that_are_there_already(dtype) -> None:
    """None, a plain one, one with a history: added to as autograd does."""
    torch.manual_seed(0)
    # the second one multiplies by a weight that is not transposed
    right = Kind(lambda m, x: x @ m.weight, weight=nn.Parameter(torch.randn(6, 4, dtype=dtype)))
    layers = [nn.Linear(4, 6, dtype=dtype), right, nn.Linear(4, 3, dtype=dtype)]
    model = nn.Sequential(*layers)
    x, dy = torch.randn(5, 4, dtype=dtype), torch.randn(5, 3, dtype=dtype)
    before = [None, torch.randn(6, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype, requires_grad=True).sin()]

    def run(backward) -> tuple[list[Tensor], list[Tensor]]:
        for layer, gradient in zip(layers, before, strict=True):
            layer.weight.grad = None if gradient is None else gradient.clone()
        kept = [layer.weight.grad for layer in layers]
        backward(x.clone().requires_grad_())
        return [layer.weight.grad for layer in layers], kept

    found, kept = run(lambda x: halves([model(x)], [x], [dy]))
    expected, kept_whole = run(lambda x: model(x).backward(dy))
    assert torch.equal(found[0], expected[0])
    rounding = 8 * torch.finfo(dtype).eps  # the sum is rounded once here, and twice there
    torch.testing.assert_close(found, expected, atol=rounding, rtol=rounding)
    for now, then, whole, whole_then in zip(found, kept, expected, kept_whole, strict=True):
        expected_kind = whole is whole_then, whole.stride(), type(whole.grad_fn)
        assert (now is then, now.stride(), type(now.grad_fn)) == expected_kind


@settings(max_examples=30)
@given(st.data())
def test_random_graphs(data) -> None:
    """Values are combined at random: with parameters that may be used again, with each other, or both.

    Linear layers and products with parameters are among the ways.
    """
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    shapes = data.draw(st.lists(st.sampled_from([(3,), (1, 3)]), min_size=1, max_size=4))
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    matrices = [nn.Parameter(torch.randn(3, 3) / 3) for _ in range(data.draw(st.integers(1, 4)))]
    step = st.tuples(st.sampled_from("+*twn@lab"), st.integers(0, 99), st.integers(0, 99))
    steps = data.draw(st.lists(step, min_size=1, max_size=12))
    chosen = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))

    def compute(inputs: list[Tensor]) -> list[Tensor]:
        values = list(inputs)
        for kind, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            weight, matrix = parameters[second % len(parameters)], matrices[second % len(matrices)]
            made = {
                "+": lambda a=a, b=b: a + b,
                "*": lambda a=a, b=b: a * b,
                "t": lambda a=a: torch.tanh(a),
                "w": lambda a=a, weight=weight: a * weight + weight,
                "n": lambda weight=weight: weight * 2,
                "@": lambda a=a, matrix=matrix: a @ matrix,
                "l": lambda a=a, matrix=matrix: F.linear(a, matrix),
                "b": lambda a=a, matrix=matrix, weight=weight: F.linear(a, matrix, weight.view(-1)),
                "a": lambda a=a, b=b, matrix=matrix: torch.addmm(b.view(1, 3), a.view(1, 3), matrix.tanh()),
            }
            values.append(made[kind]())
        return [values[len(inputs) :][number % len(steps)] for number in chosen]

    values, weights = [torch.randn(1, 3, requires_grad=True) for _ in range(2)], parameters + matrices
    outputs = compute(values)
    gradients = drawn_like(tuple(outputs))
    expected = torch.autograd.grad(outputs, weights + values, gradients, allow_unused=True)
    halves(compute(values), values, gradients)
    torch.testing.assert_close([leaf.grad for leaf in weights + values], [*expected])
