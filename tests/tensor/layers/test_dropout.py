"""Dropout of divided tensors: one mask at any width, which only the default generator's state decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi import ProcessGroup, ShardedDropout


def own(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whole_mask(shape: tuple[int, ...], dim: int, p: float = 0.3, blocks: int = 192, seed: int = 3) -> Tensor:
    """What one rank with the whole tensor multiplies with."""
    return ShardedDropout(p, ProcessGroup.mock(), dim, blocks, generator=own(seed))(torch.ones(shape))


def in_turn(world, act: Callable[[], Any]) -> Any:
    """Act on one rank after the other: mock ranks have one default generator, whose state is kept here."""
    for turn in range(world.size):
        if turn == world.rank:
            with torch.random.fork_rng(devices=[]):
                result = act()
        ax.barrier()
    return result


@pytest.mark.ranks(2, 4)
def test_parts_together_are_the_whole_at_any_width(world):
    for shape, dim, blocks in [((3, 8, 5), 1, 192), ((3, 12, 5), -2, 4), ((4, 68), 1, 192), ((8, 2, 3), 0, 8)]:
        whole = whole_mask(shape, dim, blocks=blocks)
        drawn = own()
        ones = torch.ones(shape).chunk(world.size, dim)[world.rank]
        part = ShardedDropout(0.3, None, dim, blocks, generator=drawn)(ones)
        assert torch.equal(part, whole.chunk(world.size, dim)[world.rank])
        replicated = ShardedDropout(0.3, None, dim, blocks, replicated=True, generator=own())
        assert torch.equal(replicated(torch.ones(shape)), whole)
        states = ax.all_gather(drawn.get_state()[None])
        assert torch.equal(states, drawn.get_state().expand_as(states))  # all have drawn alike


@pytest.mark.ranks(3)
def test_any_other_width_has_masks_of_its_own_that_differ(world):
    for length in (5, 64):
        part = ShardedDropout(0.5, None, 0, blocks=4, generator=own())(torch.ones(length, 40))
        parts = ax.all_gather(part).chunk(3)
        assert not any(torch.equal(parts[a], parts[b]) for a, b in [(0, 1), (0, 2), (1, 2)])
        kept = sum(map(torch.count_nonzero, parts)) / (3 * 40 * length)
        assert abs(kept - 0.5) < 5 * 0.5 / math.sqrt(3 * 40 * length)


@settings(max_examples=10)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    width=st.sampled_from([1, 2, 3, 4, 6]),
    blocks=st.sampled_from([1, 2, 12, 192]),
    p=st.floats(0.05, 0.95),
    data=st.data(),
)
def test_values_and_gradients_are_those_of_dropout(shape, width, blocks, p, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= width
    x = torch.randn(shape, generator=own(1), dtype=torch.float64).requires_grad_()
    dropout = ShardedDropout(p, ProcessGroup.mock(), dim, blocks, generator=own())
    y = dropout(x)
    kept = y != 0
    torch.testing.assert_close(y, torch.where(kept, x / (1 - p), 0.0))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(kept, 1 / (1 - p), 0.0).double())
    assert dropout.eval()(x) is x


def test_masks_are_random_in_every_direction():
    p, shape = 0.3, (32, 48, 40)
    kept = (whole_mask(shape, 1, p) != 0).double()
    for dims in [(0, 1), (0, 2), (1, 2), (0, 1, 2)]:
        count = math.prod(shape[dim] for dim in dims)
        spread = math.sqrt(p * (1 - p) / count)
        assert (kept.mean(dims) - (1 - p)).abs().max() < 5 * spread
    rows = kept.transpose(0, 1).flatten(1) - (1 - p)  # blocks are as unlike as chance has it
    likeness = torch.corrcoef(rows) - torch.eye(len(rows))
    assert likeness.abs().max() < 6 / math.sqrt(rows.shape[1])


def test_draws_differ_and_depend_on_one_number_each():
    first, second = own(), own()
    dropout = ShardedDropout(0.5, ProcessGroup.mock(), generator=first)
    x = torch.ones(4, 64, 3)
    a, b = dropout(x), dropout(x)
    assert not torch.equal(a, b)
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_(generator=second)
    assert torch.equal(first.get_state(), second.get_state())


def test_extremes_and_dtypes():
    x = torch.randn(2, 8)
    group, state = ProcessGroup.mock(), torch.get_rng_state()
    assert ShardedDropout(0.0, group)(x) is x
    assert ShardedDropout(0.9, group).eval()(x) is x
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    assert not ShardedDropout(1.0, group, generator=own())(x).any()
    assert ShardedDropout(0.5, group, generator=own())(x[:, :0]).shape == (2, 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        y = ShardedDropout(0.25, group, generator=own())(torch.ones(3, 64, 2, dtype=dtype))
        assert y.dtype == dtype
        assert torch.equal(y != 0, whole_mask((3, 64, 2), 1, 0.25) != 0)  # the mask is the same in all dtypes
    meta = ShardedDropout(0.5, group, generator=own())(torch.ones(2, 4, device="meta"))
    assert meta.is_meta
    assert meta.shape == (2, 4)
    assert repr(ShardedDropout(0.1, group)) == "ShardedDropout(p=0.1, dim=1, sharded)"


@pytest.mark.ranks(2)
def test_the_default_generator_and_replicated_dropout_beside_it(world):
    x = torch.ones(3, 8, 5)
    replicated, sharded = nn.Dropout(0.4), ShardedDropout(0.4, None, 1)

    def act() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(5)
        before = replicated(x)
        part = sharded(x.chunk(world.size, 1)[world.rank])
        return before, part, replicated(x), torch.get_rng_state()

    before, part, after, state = in_turn(world, act)
    for same in (before, after, state):
        assert torch.equal(ax.broadcast_object(same), same)
    whole = ax.all_gather(part, dim=1)
    assert 0 < torch.count_nonzero(whole) < whole.numel()

    def act_alone() -> Tensor:
        torch.manual_seed(5)
        replicated(x)
        return ShardedDropout(0.4, ProcessGroup.mock(), 1)(x)

    assert torch.equal(whole, in_turn(world, act_alone))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_brings_the_same_mask_back(world, reentrant):
    sharded, replicated = ShardedDropout(0.5, None, 1), nn.Dropout(0.3)
    x = torch.rand(2, 16, 6, generator=own(world.rank)) + 1

    def act() -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        leaf = x.clone().requires_grad_()
        y = checkpoint(lambda t: (replicated(sharded(t)) ** 2).sum(-1), leaf, use_reentrant=reentrant)
        torch.rand(3)  # others draw before backward
        y.sum().backward()
        return y.detach(), leaf.grad

    y, gradient = in_turn(world, act)
    # y = sum of (scale x)^2 has the gradient 2 scale^2 x, so that x . gradient = 2 y only with the forward's masks
    torch.testing.assert_close((x * gradient).sum(-1), 2 * y)
    assert torch.count_nonzero(gradient) < gradient.numel()


def test_mistakes():
    for options, message in (
        ({"p": 1.5}, "p: expected the chance of an element to become zero, from 0 to 1, got 1.5"),
        ({"p": -0.1}, "p: expected"),
        ({"blocks": 0}, "blocks: expected at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ShardedDropout(process_group=ProcessGroup.mock(), **options)
    with pytest.raises(IndexError):
        ShardedDropout(0.5, ProcessGroup.mock(), dim=3)(torch.ones(2, 2))
