"""Random states: the same numbers again, on the rank that drew them."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers.checkpoint_shards import fill
from helpers.compare import refused
from torch import Tensor

import axonmpi as ax
from axonmpi.checkpoint.files.tensor_file import TensorSpec
from axonmpi.checkpoint.shards.random_state import prepare_random, random_shards


@pytest.fixture(autouse=True)
def _states_as_they_were() -> Iterator[None]:
    generator = np.random.mtrand._rand._bit_generator
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_bit_generator(generator)
    np.random.set_state(states[2])


def drawn() -> list[float]:
    """Draw from all generators; of normal deviates those of Python and numpy come in twos, and one is kept."""
    numbers = [random.random(), random.gauss(0, 1), *np.random.random(2), np.random.normal()]
    return [*numbers, *torch.rand(3).tolist(), *torch.randn(3).tolist()]


@pytest.mark.parametrize("advance", [0, 1])
@pytest.mark.ranks(1)
def test_the_same_numbers_come_again(world: ax.World, advance: int) -> None:
    for _ in range(advance):
        drawn()
    shards = random_shards(world.default_group)
    assert [(shard.name, shard.shape[0], shard.dtype, shard.is_split) for shard in shards] == [
        (name, 1, torch.uint8, False) for name in ("random.torch", "random.python", "random.numpy")
    ]
    assert all(shard.pieces[0].subarray.size == shard.pieces[0].view.shape == shard.shape for shard in shards)
    expected = [drawn(), drawn()]
    tensors = {shard.name: shard.pieces[0].view.clone() for shard in shards}
    into, restore = prepare_random(world.default_group, specs_of(tensors))
    fill(into, tensors)
    assert [drawn(), drawn()] != expected
    restore()
    assert [drawn(), drawn()] == expected


def specs_of(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()}


@pytest.mark.ranks(3)
def test_each_rank_has_its_row(world: ax.World) -> None:
    """Ranks beyond those that were saved have none, and go on with what they have."""
    group = world.default_group
    shards = random_shards(group)
    assert {(shard.shape[0], shard.pieces[0].subarray.start) for shard in shards} == {(3, (group.rank, 0))}
    saved = {shard.name: torch.zeros(2, shard.shape[1], dtype=torch.uint8) for shard in shards}
    into, _ = prepare_random(group, specs_of(saved))
    assert {shard.name for shard in into} == (saved.keys() if group.rank < 2 else set())
    assert all(shard.pieces[0].subarray.start == (group.rank, 0) for shard in into)
    del saved["random.numpy"]
    assert {shard.name for shard in prepare_random(group, specs_of(saved))[0]} <= saved.keys()


@pytest.mark.ranks(1)
def test_states_of_something_else_are_refused(world: ax.World) -> None:
    group, specs = world.default_group, {"random.torch": TensorSpec("random.torch", torch.uint8, (1, 16))}
    refused(
        ValueError,
        (
            lambda: prepare_random(group, specs),
            r"random.torch: expected rows of 5056 bytes, got torch.uint8 \[1, 16\]",
        ),
    )
    np.random.set_bit_generator(np.random.PCG64(1))
    refused(ValueError, (lambda: random_shards(group), "global generator is a PCG64, expected the MT19937"))
