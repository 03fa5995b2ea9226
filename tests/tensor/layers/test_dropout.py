"""Dropout of divided tensors: one mask at any width, which only the default generator's state decides."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.compare import assert_close, assert_equal, assert_precise, assert_same_on_all_ranks, refused
from helpers.transformer_parts import part, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi import ProcessGroup, ShardedDropout


def whole_mask(shape: tuple[int, ...], dim: int, p: float = 0.3, blocks: int = 192, seed: int = 3) -> Tensor:
    """What one rank with the whole tensor multiplies with."""
    return ShardedDropout(p, ProcessGroup.mock(), dim, blocks, generator=seeded(seed))(torch.ones(shape))


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
        drawn, ones = seeded(3), torch.ones(shape)
        sharded = ShardedDropout(0.3, None, dim, blocks, generator=drawn)
        replicated = ShardedDropout(0.3, None, dim, blocks, replicated=True, generator=seeded(3))
        assert_equal([sharded(part(ones, world, dim)), replicated(ones)], [part(whole, world, dim), whole])
        assert_same_on_all_ranks(world, drawn.get_state())  # all have drawn alike


@pytest.mark.ranks(3)
def test_any_other_width_has_masks_of_its_own_that_differ(world):
    for length in (5, 64):
        own = ShardedDropout(0.5, None, 0, blocks=4, generator=seeded(3))(torch.ones(length, 40))
        parts = ax.all_gather(own).chunk(3)
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
    x = torch.randn(shape, generator=seeded(1), dtype=torch.float64).requires_grad_()
    dropout = ShardedDropout(p, ProcessGroup.mock(), dim, blocks, generator=seeded(3))
    y = dropout(x)
    y.sum().backward()
    factors = (y != 0).double() / (1 - p)
    assert_precise([y, x.grad], [x * factors, factors])
    assert dropout.eval()(x) is x


def test_masks_are_random_in_every_direction():
    p, shape = 0.3, (32, 48, 40)
    kept = (whole_mask(shape, 1, p) != 0).double()
    for dims in [(0, 1), (0, 2), (1, 2), (0, 1, 2)]:
        spread = math.sqrt(p * (1 - p) / math.prod(shape[dim] for dim in dims))
        assert (kept.mean(dims) - (1 - p)).abs().max() < 5 * spread
    rows = kept.transpose(0, 1).flatten(1) - (1 - p)  # blocks are as unlike as chance has it
    likeness = torch.corrcoef(rows) - torch.eye(len(rows))
    assert likeness.abs().max() < 6 / math.sqrt(rows.shape[1])


def test_draws_differ_and_depend_on_one_number_each():
    first, second = seeded(3), seeded(3)
    dropout = ShardedDropout(0.5, ProcessGroup.mock(), generator=first)
    a, b = (dropout(torch.ones(4, 64, 3)) for _ in range(2))
    assert not torch.equal(a, b)
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_(generator=second)
    assert torch.equal(first.get_state(), second.get_state())


def test_extremes_and_dtypes():
    x = torch.randn(2, 8)
    group, state = ProcessGroup.mock(), torch.get_rng_state()
    for without in (ShardedDropout(0.0, group), ShardedDropout(0.9, group).eval()):
        assert without(x) is x
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    assert not ShardedDropout(1.0, group, generator=seeded(3))(x).any()
    assert ShardedDropout(0.5, group, generator=seeded(3))(x[:, :0]).shape == (2, 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        y = ShardedDropout(0.25, group, generator=seeded(3))(torch.ones(3, 64, 2, dtype=dtype))
        # the mask is the same in all dtypes
        assert_equal((y.dtype, y != 0), (dtype, whole_mask((3, 64, 2), 1, 0.25) != 0))
    meta = ShardedDropout(0.5, group, generator=seeded(3))(torch.ones(2, 4, device="meta"))
    assert (meta.is_meta, meta.shape) == (True, (2, 4))
    assert repr(ShardedDropout(0.1, group)) == "ShardedDropout(p=0.1, dim=1, sharded)"


@pytest.mark.ranks(2)
def test_the_default_generator_and_replicated_dropout_beside_it(world):
    x = torch.ones(3, 8, 5)
    replicated, sharded = nn.Dropout(0.4), ShardedDropout(0.4, None, 1)

    def act() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(5)
        return replicated(x), sharded(part(x, world)), replicated(x), torch.get_rng_state()

    before, own, after, state = in_turn(world, act)
    assert_same_on_all_ranks(world, (before, after, state))
    whole = ax.all_gather(own, dim=1)
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
    x = torch.rand(2, 16, 6, generator=seeded(world.rank)) + 1

    def act() -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        leaf = x.clone().requires_grad_()
        y = checkpoint(lambda t: (replicated(sharded(t)) ** 2).sum(-1), leaf, use_reentrant=reentrant)
        torch.rand(3)  # others draw before backward
        y.sum().backward()
        return y.detach(), leaf.grad

    y, gradient = in_turn(world, act)
    # y = sum of (scale x)^2 has the gradient 2 scale^2 x, so that x . gradient = 2 y only with the forward's masks
    assert_close((x * gradient).sum(-1), 2 * y)
    assert torch.count_nonzero(gradient) < gradient.numel()


def test_mistakes():
    make = partial(ShardedDropout, process_group=ProcessGroup.mock())
    refused(
        ValueError,
        (partial(make, p=1.5), "p: expected the chance of an element to become zero, from 0 to 1, got 1.5"),
        (partial(make, p=-0.1), "p: expected"),
        (partial(make, blocks=0), "blocks: expected at least 1, got 0"),
    )
    refused(IndexError, (partial(make(0.5, dim=3), torch.ones(2, 2)), "Dimension out of range"))
