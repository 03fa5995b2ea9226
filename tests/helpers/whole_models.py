"""Blocks of a transformer in plain torch on one process, which divided ones are compared with, and their data.

torch's default generator belongs to the process and mock ranks are its threads: models are built under a lock, or
on all ranks together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax

_drawing = threading.RLock()
_Made = TypeVar("_Made", bound=nn.Module)


def refused(kind: type[Exception], *mistakes: tuple[Callable[[], object], str]) -> None:
    """Make mistakes, each of which raises an error that says what is wrong."""
    for call, message in mistakes:
        with pytest.raises(kind, match=message):
            call()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def built(make: Callable[[], _Made], seed: int = 0) -> _Made:
    """Build a module that no other rank takes part in, with the same initial values everywhere."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def together(make: Callable[[], _Made], seed: int = 0) -> _Made:
    """Build a module on all ranks; collective."""
    state = torch.get_rng_state()
    ax.barrier()
    torch.manual_seed(seed)
    made = make()
    ax.barrier()
    torch.set_rng_state(state)
    return made


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def part(tensor: Tensor, world: ax.World, dim: int = 1) -> Tensor:
    """Return this rank's slice."""
    return tensor.chunk(world.size, dim)[world.rank]


def rows_of_heads(parts: Sequence[int], width: int, rank: int, ranks: int) -> Tensor:
    """Which rows a rank has of a matrix of several parts, each with so many heads, maybe fewer than ranks."""
    rows, start = [], 0
    for heads in parts:
        own = range(rank * heads // ranks, max((rank + 1) * heads // ranks, rank * heads // ranks + 1))
        rows += [torch.arange(start + head * width, start + (head + 1) * width) for head in own]
        start += heads * width
    return torch.cat(rows)


# ---- blocks -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention, head by head."""

    def __init__(self, hidden: int, heads: int, pairs: int, width: int, *, bias=True, causal=True, rotary=False):
        super().__init__()
        self.sizes = heads, pairs, width
        self.causal, self.rotary = causal, rotary
        if heads == pairs:
            self.query_key_value = nn.Linear(hidden, 3 * heads * width, bias)
        else:
            self.query = nn.Linear(hidden, heads * width, bias)
            self.key_value = nn.Linear(hidden, 2 * pairs * width, bias)
        self.output = nn.Linear(heads * width, hidden, bias)

    def forward(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        """Return [B, T, D]; attention weights are multiplied with `masks` [B, H, T, T]."""
        heads, pairs, width = self.sizes
        if heads == pairs:
            query, key, value = self.query_key_value(x).chunk(3, -1)
        else:
            query, (key, value) = self.query(x), self.key_value(x).chunk(2, -1)
        seen = []
        for head in range(heads):
            pair = head // (heads // pairs)
            own = [query[..., head * width : (head + 1) * width]]
            own += [projected[..., pair * width : (pair + 1) * width] for projected in (key, value)]
            q, k, v = ([turned(t) for t in own[:2]] + own[2:]) if self.rotary else own
            if masks is None:
                seen.append(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal))
            else:
                scores = q @ k.mT / width**0.5
                later = torch.arange(x.shape[1])[:, None] < torch.arange(x.shape[1])
                scores = scores.masked_fill(later, float("-inf")) if self.causal else scores
                seen.append((scores.softmax(-1) * masks[:, head]) @ v)
        return self.output(torch.cat(seen, -1))


def turned(x: Tensor) -> Tensor:
    """Rotate by positions, with complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2]).double()[:, None] / 10_000 ** (torch.arange(half).double() / half)
    turns = torch.polar(torch.ones_like(angles), angles)
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double()) * turns
    return torch.cat((numbers.real, numbers.imag), -1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, hidden: int, between: int, activation=F.gelu, bias: bool = True):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, between, bias), nn.Linear(between, hidden, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, between: int, activation=F.silu, bias: bool = False):
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * between, bias), nn.Linear(between, hidden, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.activation(gate) * up)


# ---- comparing --------------------------------------------------------------------------------------------------


def assert_close(found: Tensor | None, expected: Tensor | None, what: str = "") -> None:
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


def compare(world, block, whole, own, *, x: Tensor, divided: bool, **options) -> None:
    """Compare output, input gradient, values and gradients of parameters of a block with those of the whole one.

    `own` returns this rank's part of a parameter with a name; `divided` says whether ranks have parts of the
    sequence; the options are of the whole block's forward.
    """
    weights = randn(*x.shape, seed=2, dtype=x.dtype)
    inputs = [(part(x, world) if divided else x).clone().requires_grad_(), x.clone().requires_grad_()]
    found, expected = block(inputs[0]), whole(inputs[1], **options)
    assert_close(found, part(expected, world) if divided else expected, "output")
    (found * (part(weights, world) if divided else weights)).sum().backward()
    (expected * weights).sum().backward()
    gradient = inputs[1].grad
    assert_close(inputs[0].grad, part(gradient, world) if divided else gradient, "gradient of the input")
    names = dict(whole.named_parameters())
    assert list(names) == [name for name, _ in block.named_parameters()]
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter, own(name, names[name])), name
        assert_close(parameter.grad, own(name, names[name].grad), name)
