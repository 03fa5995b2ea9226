"""A divided embedding against a whole one: values, gradients, padding, ties, mistakes."""

import pytest
import torch
from helpers.compare import assert_equal, assert_precise, refused
from helpers.models import built
from helpers.settings import each_pair
from helpers.steps import again
from helpers.transformer_parts import part, randn, seeded
from torch import Tensor, nn

import axonmpi as ax


def whole_embedding(rows: int, width: int, padding_idx: int | None = None, dtype=torch.float64) -> nn.Embedding:
    return built(lambda: nn.Embedding(rows, width, padding_idx, dtype=dtype))


def rows_of(gradient: Tensor, world: ax.World) -> Tensor:
    """This rank's rows, with rows of zeros after the last one."""
    local = -(-len(gradient) // world.size)
    padded = torch.cat([gradient, gradient.new_zeros(local * world.size - len(gradient), gradient.shape[1])])
    return padded[world.rank * local : (world.rank + 1) * local]


from_embedding = ax.VocabParallelEmbedding.from_embedding


@pytest.mark.ranks(1, 4)
@each_pair(
    rows=(1, 3, 7),
    shape=((), (4,), (3, 4), (0, 4)),
    ids=(torch.int64, torch.int32),
    dtype=(torch.float32, torch.float64),
    padding=(None, 0, -1),
    sequence_dim=(None, 0, -2),
)
def test_values_and_gradients(world, rows, shape, ids, dtype, padding, sequence_dim) -> None:
    """A length of 4 is a sequence, which may be divided."""
    dims = range(-1 - len(shape), len(shape))
    dim = sequence_dim if sequence_dim in dims and (*shape, 0)[sequence_dim] == 4 else None
    embedding = whole_embedding(rows, 3, padding, dtype)
    words = torch.randint(rows, shape, dtype=ids, generator=seeded(1))
    expected = embedding(words)
    weights = randn(*expected.shape, dtype=dtype)
    (expected * weights).sum().backward()

    layer = from_embedding(embedding, **({} if dim is None else {"sequence_parallel": True, "sequence_dim": dim}))
    output = layer(words)
    (output * part(weights, world, dim)).sum().backward()
    wanted = [part(expected, world, dim), rows_of(embedding.weight.grad, world)]
    assert_precise([output, layer.weight.grad], wanted)
    assert_equal(layer.full_weight(), embedding.weight)


@pytest.mark.ranks(2)
def test_ways_of_using(world) -> None:
    embedding = whole_embedding(7, 3)
    layer = from_embedding(embedding)
    ids = torch.tensor([[1, 6], [3, 1]])
    for module in (embedding, layer):
        (module(ids) * module(ids.t())).sum().backward()
        again(module, ids, False).sin().sum().backward()
    assert_precise(layer.weight.grad, rows_of(embedding.weight.grad, world))
    with torch.inference_mode():
        assert_precise(layer.eval()(ids), embedding(ids))
    layer.requires_grad_(False)
    assert not layer(ids).requires_grad


@pytest.mark.ranks(2)
def test_an_output_layer_may_have_the_same_weight(world) -> None:
    """Ties: rows of an embedding are the rows of a column layer, padded alike."""
    embedding = whole_embedding(7, 4)
    layer = from_embedding(embedding)
    output = ax.ColumnParallelLinear(4, 7, bias=False, shard=layer.shards["weight"], dtype=torch.float64)
    output.weight = layer.weight
    ids, targets = torch.tensor([[1, 6, 2], [3, 1, 0]]), torch.tensor([[6, 2, 2], [1, 0, 5]])
    loss = ax.parallel_cross_entropy(output(layer(ids)), targets, vocabulary=7)
    logits = embedding(ids) @ embedding.weight.t()
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.autograd.backward([loss, expected])
    assert_precise([loss, layer.weight.grad], [expected, rows_of(embedding.weight.grad, world)])


@pytest.mark.ranks(2)
def test_mistakes(world) -> None:
    layer = from_embedding(whole_embedding(7, 3), sequence_parallel=True)
    no_row = rf"row numbers from 0 to 6, got .* on rank {world.rank}"
    refused(
        ValueError,
        (lambda: layer(torch.tensor([[0, 7, 1, 2]])), no_row),
        (lambda: layer(torch.tensor([[-1, 0, 1, 2]])), no_row),
        (lambda: layer(torch.arange(4)), r"sequence_dim: expected another .* got 1 for shape \[4, 3\] on rank"),
        (lambda: layer(torch.zeros(1, 3).long()), "multiple of the 2 ranks of the group, got 3"),
        (lambda: ax.VocabParallelEmbedding(7, 3, 7), "padding_idx: expected one of 7 rows or None, got 7"),
        (lambda: ax.VocabParallelEmbedding(0, 3), "num_embeddings: expected at least 1, got 0"),
        *(
            (lambda option=option: from_embedding(nn.Embedding(7, 3, **option)), "leave this embedding whole")
            for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True})
        ),
    )
    refused(
        TypeError,
        (lambda: layer(torch.zeros(1, 4)), r"int64 or int32, got torch.float32"),
        (lambda: from_embedding(nn.Linear(2, 2)), r"expected a torch.nn.Embedding, got Linear"),
    )
    ax.barrier()
