"""The network: shapes, what sees what, initial weights, sampling."""

import functools
import math

import pytest
import torch
from helpers.compare import assert_equal, refused
from torch.nn import functional as F

from axonmpi.train import GPT, ModelConfig, generate
from axonmpi.train.model import rotate, rotation_table, split_stages

VARIANTS = [  # every two of these together
    {"positions": "rotary", "norm": "rmsnorm", "tied_embeddings": True},
    {"positions": "rotary", "norm": "layernorm", "tied_embeddings": False},
    {"positions": "learned", "norm": "rmsnorm", "tied_embeddings": False},
    {"positions": "learned", "norm": "layernorm", "tied_embeddings": True},
]


def small(seed=0, **settings):
    config = ModelConfig(**{"layers": 2, "width": 16, "heads": 2, "sequence_length": 12, **settings})
    return GPT(config, generator=torch.Generator().manual_seed(seed))


def some_bytes(batch, length):
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("settings", VARIANTS)
def test_a_byte_changes_its_own_and_later_predictions_only_and_all_parameters_learn(settings):
    model, tokens = small(**settings), some_bytes(3, 12)
    before = model(tokens)
    assert before.shape == (3, 12, 256)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    after = model(changed)
    assert torch.equal(after[:, :7], before[:, :7])
    assert (after[:, 7:] - before[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-6
    F.cross_entropy(after.flatten(0, 1), tokens.flatten()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_number_of_parameters():
    width, positions = 16, 12
    blocks = 2 * (12 * width**2 + 2 * width)
    rotary, learned, untied = small(), small(positions="learned"), small(tied_embeddings=False)
    expected = blocks + 256 * width + width
    numbers = [model.num_parameters() for model in (rotary, learned, untied)]
    assert numbers == [expected, expected + positions * width, expected + 256 * width]
    assert list(rotary.buffers()) == []


def test_equal_seeds_make_equal_models_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    first, second, other = (small(seed, norm="layernorm") for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(first.state_dict(), second.state_dict())
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_initial_weights_are_those_of_gpt2():
    model = GPT(ModelConfig(layers=8, width=64, heads=4, positions="learned"))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        std = 0.02 / math.sqrt(2 * 8) if name.endswith(("attention.output.weight", "contract.weight")) else 0.02
        assert parameter.std().item() == pytest.approx(std, rel=0.05), name
        assert parameter.mean().item() == pytest.approx(0, abs=0.1 * std), name


def test_attention_through_rotation_depends_on_distance_only():
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(2))
    table = rotation_table(32, 8)
    queries, keys = (rotate(x.expand(1, 1, 32, 8), table)[0, 0] for x in (query, key))
    scores = queries @ keys.T
    for distance in (0, 1, 9):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert (scores[9, 0] - scores[1, 0]).abs() > 1e-3
    assert torch.allclose(queries.norm(dim=-1), query.norm().expand(32), atol=1e-5)


def test_order_matters_with_either_kind_of_positions():
    for positions in ("rotary", "learned"):
        one, swapped = small(positions=positions)(torch.tensor([[1, 2, 3, 9], [2, 1, 3, 9]]))[:, -1]
        assert (one - swapped).abs().max() > 1e-6


def test_a_sequence_that_is_too_long_is_refused():
    assert small()(some_bytes(1, 12)).shape == (1, 12, 256)
    refused(ValueError, (lambda: small()(some_bytes(1, 13)), "at most sequence_length = 12 bytes, got 13"))


def test_stages_in_a_row_are_the_model():
    tokens = some_bytes(2, 12)
    for settings in VARIANTS:
        model = small(layers=5, **settings)
        whole = dict(model.named_parameters(remove_duplicate=False))
        for num_stages in range(1, 6):
            stages, x = split_stages(model, num_stages), tokens
            for stage in stages:
                x = stage(x)
            assert torch.equal(x, model(tokens)), (settings, num_stages)
            parts = [named for stage in stages for named in stage.named_parameters(remove_duplicate=False)]
            assert [name for name, _ in parts] == list(whole)
            assert all(parameter is whole[name] for name, parameter in parts)


def test_stages_are_of_like_work():
    def cuts(num_stages, **settings):
        return [len(stage.blocks) for stage in split_stages(small(**settings), num_stages)]

    assert cuts(4, layers=4) == [1, 1, 1, 1]
    # the embedding takes no time, and the output layer a third of a block
    wide = [cuts(number, layers=layers, width=64) for number, layers in ((2, 4), (2, 5), (3, 8))]
    assert wide == [[2, 2], [3, 2], [3, 3, 2]]
    assert cuts(2, layers=4, width=16, mlp_ratio=1) == [3, 1]  # here it takes more than a block
    contents = ["embedding, blocks 0 to 1, output layer", "embedding, block 0", "block 1, output layer"]
    assert [stage.content for number in (1, 2) for stage in split_stages(small(), number)] == contents
    message = "num_stages: expected 1 to 2, a block for each, got "
    refused(
        ValueError,
        (lambda: split_stages(small(), 0), f"{message}0"),
        (lambda: split_stages(small(), 3), f"{message}3"),
    )


def test_sampling_follows_its_seed_or_takes_the_likeliest_byte():
    def sampled(seed, temperature=1.0):
        generator = torch.Generator().manual_seed(seed)
        return generate(model, b"abc", 30, generator=generator, temperature=temperature)

    model, state = small(), torch.get_rng_state()
    assert len(sampled(1)) == 30
    assert sampled(1) == sampled(1) != sampled(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert sampled(1, 0.0) == sampled(2, 0.0)
    assert sampled(1, 0.0)[0] == model(torch.tensor([list(b"abc")]))[0, -1].argmax().item()


def test_sampling_refuses_what_it_cannot_do():
    call = functools.partial(generate, small(), generator=torch.Generator())
    refused(
        ValueError,
        (lambda: call(b"", 3), "prompt of at least one byte"),
        (lambda: call(b"a", -1), "must not be negative"),
        (lambda: call(b"a", 1, temperature=-1.0), "must not be negative"),
    )
