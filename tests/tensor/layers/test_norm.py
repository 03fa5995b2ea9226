"""Norms that compute on parts of a sequence: gradients are summed, and nothing else about the module changes."""

import copy
from functools import partial

import pytest
import torch
from helpers.compare import assert_close, refused
from helpers.models import built
from helpers.steps import again
from helpers.transformer_parts import Sent, floats, part, randn
from torch import Tensor, nn

from axonmpi import ParallelMLP, sequence_parallel_norm
from axonmpi.testing import run_ranks

WIDTH = 6


class Scale(nn.Module):
    """A norm of somebody's own, which uses one parameter twice, one of another dtype and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(WIDTH)
        self.same = self.inner.weight
        self.exact, self.unused = nn.Parameter(torch.ones(WIDTH).double()), nn.Parameter(torch.ones(2))
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x: Tensor, *, plus: float = 0.0) -> tuple[Tensor, float]:
        return self.factor * self.inner(x) * self.same * self.exact.float() + plus, plus


def random_norm(make) -> nn.Module:
    """Make a norm whose parameters are not just ones and zeros."""
    norm = built(make)
    for seed, parameter in enumerate(norm.parameters()):
        with torch.no_grad():
            parameter.copy_(floats(*parameter.shape, seed=seed))
    return norm


def first(output: Tensor | tuple[Tensor, float]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def train(norm: nn.Module, x: Tensor, weights: Tensor, run=lambda norm, x: norm(x)) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the input."""
    x = x.clone().requires_grad_()
    output = first(run(norm, x))
    (output * weights).sum().backward()
    return output, x.grad


NORMS = pytest.mark.parametrize(
    "make", [lambda: nn.LayerNorm(WIDTH), lambda: nn.RMSNorm(WIDTH), Scale], ids=["layer", "rms", "own"]
)


@pytest.mark.ranks(1, 2)
@NORMS
def test_outputs_and_gradients_are_those_of_the_whole_sequence(world, make):
    whole = random_norm(make)
    norm = sequence_parallel_norm(copy.deepcopy(whole))
    x, weights = floats(3, 8, WIDTH), floats(3, 8, WIDTH, seed=9)
    for run in (
        lambda norm, x: norm(x),
        lambda norm, x: again(norm, x, False),
        lambda norm, x: again(norm, x, True),
    ):
        expected = [part(of_all, world) for of_all in train(whole, x, weights)]
        assert_close(train(norm, part(x, world), part(weights, world), run), expected)
        for parameter, other in zip(norm.parameters(), whole.parameters(), strict=True):
            unused = other.grad is None and parameter.grad is not None
            # accumulated over the three runs
            assert_close(parameter.grad, torch.zeros_like(parameter) if unused else other.grad)


@pytest.mark.ranks(2)
@NORMS
def test_the_module_is_otherwise_what_it_was(world, make):
    norm = random_norm(make)
    before, parameters, seen = copy.deepcopy(norm), list(norm.parameters()), []
    norm.register_forward_hook(lambda *_: seen.append(1))
    assert sequence_parallel_norm(norm, world.default_group) is norm
    assert (isinstance(norm, type(before)), repr(norm)) == (True, repr(before))
    norm(floats(2, 4, WIDTH))
    assert (seen, list(norm.state_dict())) == ([1], list(before.state_dict()))
    norm.load_state_dict(before.state_dict())
    assert type(sequence_parallel_norm(random_norm(make))) is type(norm)
    refused(TypeError, (partial(norm, floats(1, 2, WIDTH), more=1), "more"))
    assert all(a is b for a, b in zip(norm.parameters(), parameters, strict=True))
    if make is Scale:
        assert norm(floats(1, 2, WIDTH), plus=3.0)[1] == 3.0


@pytest.mark.not_over_double("looks at the mock's log of operations")
def test_what_is_sent():
    def body(world, make, trained: bool = True, inference: bool = False) -> dict[str, int]:
        norm, sent = sequence_parallel_norm(make().requires_grad_(trained)), Sent(world)
        with torch.inference_mode(inference):
            output = first(norm(floats(2, 4, WIDTH).requires_grad_()))
        if not inference:
            output.sum().backward()
        return sent.take()

    for make, count in ((lambda: nn.LayerNorm(WIDTH), 1), (Scale, 2)):  # one for each dtype
        assert run_ranks(2, body, make) == [{"all_reduce": count}] * 2
        assert run_ranks(2, body, make, False) == run_ranks(2, body, make, True, True) == [{}] * 2


@pytest.mark.ranks(2)
def test_gradients_of_gradients(world):
    whole, x, found = random_norm(lambda: nn.LayerNorm(WIDTH)).double(), randn(3, 8, WIDTH), []
    for norm, own in ((whole, x), (sequence_parallel_norm(copy.deepcopy(whole)), part(x, world))):
        leaf = own.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(norm(leaf).pow(3).sum(), norm.weight, create_graph=True)
        gradient.square().sum().backward()
        found.append(leaf.grad)
    assert_close(found[1], part(found[0], world))


@pytest.mark.ranks(2)
def test_a_frozen_parameter_gets_no_gradient(world):
    norm = sequence_parallel_norm(random_norm(lambda: nn.LayerNorm(WIDTH)))
    norm.bias.requires_grad_(False)
    alone, x = nn.LayerNorm(WIDTH), torch.arange(WIDTH).float().expand(1, 3, WIDTH)
    for module in (norm, alone):
        module(x).sum().backward()
    assert_close([norm.bias.grad, norm.weight.grad], [None, 2 * alone.weight.grad])


@pytest.mark.ranks(2)
def test_mistakes(world):
    norm, replaced = sequence_parallel_norm(nn.LayerNorm(WIDTH)), nn.LayerNorm(WIDTH)
    replaced.forward = lambda x: x
    refused(
        TypeError,
        (partial(sequence_parallel_norm, torch.ones(2)), r"module: expected a torch\.nn\.Module, got Tensor"),
    )
    for module, message in [
        (norm, "the gradients of LayerNorm are summed over the ranks already"),
        (nn.Sequential(norm), "the gradients of '0' are summed over the ranks already"),
        (replaced, "expected the forward of its class, that of LayerNorm was replaced on the instance"),
        (nn.BatchNorm1d(WIDTH), "expected one that treats each position alone, BatchNorm1d does not"),
        (nn.Sequential(nn.GroupNorm(1, WIDTH)), "treats each position alone, '0' does not"),
        (ParallelMLP(WIDTH, 2), "expected the same parameters on all ranks, those of 'up' are divided"),
    ]:
        refused(ValueError, (partial(sequence_parallel_norm, module), message))
