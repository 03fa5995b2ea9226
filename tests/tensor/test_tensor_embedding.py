"""A divided embedding against a whole one: values, gradients, padding, first values, mistakes."""

from __future__ import annotations

import pytest
import torch
from divided import assert_close, filled, part, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import axonmpi as ax

ON_RANKS = pytest.mark.ranks(1, 2, 4)
EXAMPLES = settings(max_examples=15, deadline=None)


def whole_embedding(rows: int, width: int, padding_idx: int | None = None, dtype=torch.float64) -> nn.Embedding:
    embedding = filled(nn.Embedding(rows, width, padding_idx, device="meta", dtype=dtype))
    assert isinstance(embedding, nn.Embedding)
    return embedding


def rows_of(gradient: Tensor, world: ax.World) -> Tensor:
    """This rank's rows, with rows of zeros after the last one."""
    local = -(-len(gradient) // world.size)
    padded = torch.cat([gradient, gradient.new_zeros(local * world.size - len(gradient), gradient.shape[1])])
    return padded[world.rank * local : (world.rank + 1) * local]


@ON_RANKS
@EXAMPLES
@given(
    rows=st.integers(1, 11),
    width=st.integers(1, 4),
    shape=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    is_single=st.booleans(),
    padding=st.none() | st.integers(-11, 10),
    seed=st.integers(0, 100),
)
def test_values_and_gradients(world, rows, width, shape, dtype, is_single, padding, seed) -> None:
    padding = None if padding is None else max(-rows, min(padding, rows - 1))
    embedding = whole_embedding(rows, width, padding, torch.float32 if is_single else torch.float64)
    ids = torch.randint(rows, shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    expected = embedding(ids)
    weights = randn(*expected.shape, dtype=expected.dtype)
    (expected * weights).sum().backward()

    layer = ax.VocabParallelEmbedding.from_embedding(embedding)
    output = layer(ids)
    assert_close(output, expected)
    (output * weights).sum().backward()
    assert_close(layer.weight.grad, rows_of(embedding.weight.grad, world))
    assert torch.equal(layer.full_weight(), embedding.weight)


@ON_RANKS
def test_slices_of_a_sequence(world) -> None:
    for dim, shape in ((1, (2, 8)), (0, (4, 3)), (-2, (3, 4))):
        embedding = whole_embedding(7, 3)
        ids = torch.randint(7, shape, generator=torch.Generator().manual_seed(3))
        expected = embedding(ids)
        weights = randn(*expected.shape)
        (expected * weights).sum().backward()
        layer = ax.VocabParallelEmbedding.from_embedding(embedding, sequence_parallel=True, sequence_dim=dim)
        output = layer(ids)
        assert_close(output, part(expected, world, dim))
        (output * part(weights, world, dim)).sum().backward()
        assert_close(layer.weight.grad, rows_of(embedding.weight.grad, world))


@ON_RANKS
def test_ways_of_using(world) -> None:
    embedding = whole_embedding(7, 3)
    layer = ax.VocabParallelEmbedding.from_embedding(embedding)
    ids = torch.tensor([[1, 6], [3, 1]])
    for module in (embedding, layer):
        (module(ids) * module(ids.t())).sum().backward()
        checkpoint(module, ids, use_reentrant=False).sin().sum().backward()
    assert_close(layer.weight.grad, rows_of(embedding.weight.grad, world))
    with torch.inference_mode():
        assert_close(layer.eval()(ids), embedding(ids))
    layer.requires_grad_(False)
    assert not layer(ids).requires_grad


@ON_RANKS
def test_first_values_are_those_of_torch_under_the_same_seed(world) -> None:
    ax.barrier()
    if world.rank == 0:
        torch.manual_seed(3)
    ax.barrier()
    layers = [ax.VocabParallelEmbedding(10, 4), ax.VocabParallelEmbedding(9, 2, -2, dtype=torch.float64)]
    ax.barrier()
    whole = []
    if world.rank == 0:
        after = torch.get_rng_state()
        torch.manual_seed(3)
        whole = [nn.Embedding(10, 4).weight.detach(), nn.Embedding(9, 2, -2, dtype=torch.float64).weight.detach()]
        assert torch.equal(torch.get_rng_state(), after)
    for layer, weight in zip(layers, ax.broadcast_object(whole), strict=True):
        assert torch.equal(layer.full_weight(), weight)
        assert torch.equal(layer.weight, rows_of(weight, world))
    meta = ax.VocabParallelEmbedding(10, 4, device="meta")
    assert meta.weight.device.type == "meta"
    assert meta.weight.shape == layers[0].weight.shape


@ON_RANKS
def test_an_output_layer_may_have_the_same_weight(world) -> None:
    """Ties: rows of an embedding are the rows of a column layer, padded alike."""
    embedding = whole_embedding(7, 4)
    layer = ax.VocabParallelEmbedding.from_embedding(embedding)
    output = ax.ColumnParallelLinear(4, 7, bias=False, shard=layer.shards["weight"], dtype=torch.float64)
    output.weight = layer.weight
    ids = torch.tensor([[1, 6, 2], [3, 1, 0]])
    targets = torch.tensor([[6, 2, 2], [1, 0, 5]])
    loss = ax.parallel_cross_entropy(output(layer(ids)), targets, vocabulary=7)
    loss.backward()
    logits = embedding(ids) @ embedding.weight.t()
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    assert_close(loss, expected)
    assert_close(layer.weight.grad, rows_of(embedding.weight.grad, world))


@ON_RANKS
def test_mistakes(world) -> None:
    layer = ax.VocabParallelEmbedding.from_embedding(whole_embedding(7, 3), sequence_parallel=True)
    for ids in ([[0, 7, 1, 2]], [[-1, 0, 1, 2]]):
        with pytest.raises(ValueError, match=rf"row numbers from 0 to 6, got .* on rank {world.rank}"):
            layer(torch.tensor(ids))
    with pytest.raises(TypeError, match=r"int64 or int32, got torch.float32"):
        layer(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"sequence_dim: expected another .* got 1 for shape \[4, 3\] on rank"):
        layer(torch.zeros(4, dtype=torch.int64))
    if world.size > 1:
        with pytest.raises(ValueError, match=f"multiple of the {world.size} ranks of the group, got 3"):
            layer(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="padding_idx: expected one of 7 rows or None, got 7"):
        ax.VocabParallelEmbedding(7, 3, 7)
    with pytest.raises(ValueError, match="num_embeddings: expected at least 1, got 0"):
        ax.VocabParallelEmbedding(0, 3)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Embedding, got Linear"):
        ax.VocabParallelEmbedding.from_embedding(nn.Linear(2, 2, device="meta"))
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(ValueError, match="leave this embedding whole"):
            ax.VocabParallelEmbedding.from_embedding(nn.Embedding(7, 3, device="meta", **options))
    ax.barrier()
