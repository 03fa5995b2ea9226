"""Models of `transformers`, tiny and built without download, divided by their presets: they stay what they were."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import assert_close, assert_equal, assert_same_on_all_ranks, gradients_of, refused
from helpers.models import built
from helpers.once import once, one_thread
from helpers.transformer_parts import LENGTH, WORDS, bert, gpt2, llama, seeded
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.tensor import (
    copies,
    full_state_dict,
    load_full_state_dict,
    preset,
    tensor_parallelize,
)

LLAMA_OF_ONE_PAIR = functools.partial(llama, pairs=1, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
QWEN2 = functools.partial(llama, "Qwen2ForCausalLM", pairs=1)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama, 1 key/value head, tied, biases": LLAMA_OF_ONE_PAIR,
    "gpt2": gpt2,
    "bert": bert,
    "gpt2, not tied": functools.partial(
        gpt2, attn_implementation="eager", reorder_and_upcast_attn=True, tie_word_embeddings=False
    ),
    "gpt2 for sequences": functools.partial(gpt2, "GPT2ForSequenceClassification", num_labels=3),
    "llama without logits": functools.partial(llama, "LlamaModel"),
    "mistral": functools.partial(llama, "MistralForCausalLM", sliding_window=4),
    "qwen3": functools.partial(llama, "Qwen3ForCausalLM", pairs=1, head_dim=6),
    "bert for two tasks": functools.partial(bert, "BertForPreTraining"),
}


@once
def original(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a model none of whose values are those of an initialisation, such as zeros."""
    model = built(make)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=seeded(seed))
    return model.train()


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with one_thread:
        return copy.deepcopy(original(make))


def tokens(batch: int = 2, length: int = LENGTH, seed: int = 3) -> dict[str, Tensor]:
    """Make a batch, in one sequence of which the last positions are padding."""
    words = torch.randint(1, WORDS, (batch, length), generator=seeded(seed))
    mask = torch.ones_like(words)
    mask[-1, -2:] = 0
    return {"input_ids": words.masked_fill(mask == 0, 0), "attention_mask": mask}


def labelled(**options: int) -> dict[str, Tensor]:
    batch = tokens(**options)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def outputs(model: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the first thing that a model gives for a batch, and the gradients."""
    first = model(**tokens()).to_tuple()[0]
    first.square().mean().backward()
    return first.detach(), gradients_of(model)


@once
def alone(make: Callable[[], nn.Module]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the same of the model that is not divided."""
    return outputs(made(make))


def every_second(world: ax.World, makes: Any) -> list[tuple[Any, bool]]:
    """Return the models, with parts of the sequence for every second one; on 4 ranks these are the others."""
    return [(make, (number + world.size // 2) % 2 == 0) for number, make in enumerate(makes)]


@pytest.mark.ranks(2)
def test_outputs_gradients_and_state_are_those_of_the_whole_model(world):
    for (name, make), sequence_parallel in every_second(world, MODELS.items()):
        model = tensor_parallelize(made(make), sequence_parallel=sequence_parallel)
        assert_equal(full_state_dict(model), original(make).state_dict(), name)
        found, own = outputs(model)
        assert_close((found, full_state_dict(model, own)), alone(make), what=name)
        numbers = copies(model)
        assert_same_on_all_ranks(world, {n: grad for n, grad in own.items() if numbers[n] == world.size})


def train(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[float]:
    """Train for some steps, with an optimizer to which the size of gradients matters; return the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks(2)
def test_training_and_state_dicts_there_and_back(world):
    """Trained divided, loaded into an ordinary model, changed there, and loaded into a divided one again."""
    for make, sequence_parallel in every_second(world, (LLAMA_OF_ONE_PAIR, bert)):
        batches, whole = [labelled(seed=seed) for seed in range(2)], made(make)
        losses = train(whole, batches)
        model = tensor_parallelize(made(make), sequence_parallel=sequence_parallel)
        assert train(model, batches) == pytest.approx(losses, abs=1e-4)
        model.tie_weights()  # keeps what is tied
        state = full_state_dict(model)
        assert_close(state, whole.state_dict(), 1e-4)

        ordinary = made(make)
        ordinary.load_state_dict(state)
        with torch.no_grad():
            for parameter in ordinary.parameters():
                parameter *= 0.5
            load_full_state_dict(model, ordinary.state_dict() if world.rank == 0 else {})
            assert_equal(full_state_dict(model), ordinary.state_dict())
            assert_close(model(**tokens()).to_tuple()[0], ordinary(**tokens()).to_tuple()[0])


@pytest.mark.ranks(2)
def test_a_checkpoint_of_the_library(world, shared_tmp_path):
    """One rank's part is refused; a model that is loaded can be divided again."""
    model = tensor_parallelize(made(gpt2), sequence_parallel=True)
    save = functools.partial(model.save_pretrained, shared_tmp_path / str(world.rank))
    refused(TypeError, (save, "a rank's part of a parameter"))
    state = full_state_dict(model)
    if world.rank == 0:
        model.save_pretrained(shared_tmp_path, state_dict=state)
    ax.barrier()
    with one_thread:  # meanwhile the library builds models otherwise, on all threads
        loaded = type(model).from_pretrained(shared_tmp_path)
    assert_equal(loaded.state_dict(), original(gpt2).state_dict())
    assert_close(tensor_parallelize(loaded).train()(**tokens()).logits, alone(gpt2)[0])


@pytest.mark.ranks(2)
def test_hidden_states_are_whole_or_parts_of_the_sequence(world):
    for make in (gpt2, llama, bert):
        expected = made(make)(**tokens(), output_hidden_states=True).hidden_states
        model = tensor_parallelize(made(make), sequence_parallel=True)
        parts = model(**tokens(), output_hidden_states=True).hidden_states
        assert_close((parts[1], parts[-1]), (expected[1].chunk(2, 1)[world.rank], expected[-1]))


@pytest.mark.ranks(2)
def test_generating_text(world):
    words = tokens(length=3)["input_ids"].clamp(min=1)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(words)}
    model = tensor_parallelize(made(QWEN2)).eval()
    assert model.generate(words, **options).tolist() == made(QWEN2).eval().generate(words, **options).tolist()
    divided, even = tensor_parallelize(made(QWEN2), sequence_parallel=True).eval(), tokens()["input_ids"]
    refused(
        ValueError,
        (
            lambda: divided.generate(words, **options),
            r"expected a sequence .*multiple of the \d ranks of the group",
        ),
    )
    assert_close(divided(even).logits, made(QWEN2).eval()(even).logits)  # the error has left nothing behind


def use_checkpointing(model: nn.Module) -> None:
    """Compute the activations of blocks again in backward; the method's name depends on the version."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


@pytest.mark.ranks(2)
def test_with_activation_checkpointing(world):
    for make, sequence_parallel in every_second(world, (gpt2, LLAMA_OF_ONE_PAIR)):
        model = tensor_parallelize(made(make), sequence_parallel=sequence_parallel)
        use_checkpointing(model)
        assert_close(full_state_dict(model, outputs(model)[1]), alone(make)[1])


# ---- dropout ----------------------------------------------------------------------------------------------------

DROPPING: dict[str, Callable[[], nn.Module]] = {
    "gpt2": functools.partial(gpt2, dropout=0.3),
    "llama": functools.partial(llama, pairs=1, attention_dropout=0.3, attn_implementation="eager"),
    "bert": functools.partial(bert, dropout=0.3),
}


def dropped(model: nn.Module) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the logits of two forwards, and gradients."""
    with torch.no_grad():
        first = model(**tokens()).logits
    output = model(**labelled())
    output.loss.backward()
    return first, output.logits, full_state_dict(model, gradients_of(model))


@once
def dropped_alone(make: Callable[[], nn.Module]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return dropped(tensor_parallelize(made(make), group=ax.ProcessGroup.mock(), generator=seeded(1)))


@pytest.mark.ranks(2)
def test_what_is_dropped_does_not_depend_on_the_ranks(world):
    for (name, make), sequence_parallel in every_second(world, DROPPING.items()):
        model = tensor_parallelize(made(make), sequence_parallel=sequence_parallel, generator=seeded(1))
        first, second, _ = expected = dropped_alone(make)
        assert_close(dropped(model), expected, what=name)
        assert (first - second).abs().max() > 0.01


@pytest.mark.ranks(1)
def test_dropout_from_the_default_generator_where_activations_are_computed_again(world):
    for name in ("gpt2", "llama"):
        models, results = [tensor_parallelize(made(DROPPING[name])) for _ in range(2)], []
        use_checkpointing(models[1])
        for model in models:
            torch.manual_seed(4)
            output = model(**labelled())
            output.loss.backward()
            results.append((output.logits, full_state_dict(model, gradients_of(model)), torch.get_rng_state()))
        assert_close(results[1], results[0])


# ---- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_heads_that_do_not_divide(world):
    for make in (gpt2, llama, bert):
        model = made(make)
        refused(
            ValueError,
            (
                functools.partial(tensor_parallelize, model),
                "3 ranks of the group, got 4; use a group of 1 or 2 or 4 ranks",
            ),
        )
        assert_equal(model.state_dict(), original(make).state_dict())
    model = made(functools.partial(llama, heads=6))
    refused(
        ValueError,
        (
            lambda: tensor_parallelize(model),
            r"module 'model.layers.0.self_attn.k_proj': num_heads: expected a multiple",
        ),
    )


@pytest.mark.ranks(2)
def test_models_without_a_preset(world):
    linear, crossed = nn.Linear(2, 2), made(functools.partial(gpt2, add_cross_attention=True))
    refused(
        ValueError,
        (lambda: tensor_parallelize(linear), r"presets bert, gpt2, llama.*model.config.model_type is None"),
        (lambda: tensor_parallelize(made(gpt2), "gpt3"), r"presets bert, gpt2, llama.*got 'gpt3'"),
        (lambda: tensor_parallelize(crossed), "no lines for cross-attention"),
        (lambda: tensor_parallelize(linear, "bert"), "needs a model of transformers, got Linear without config"),
        (
            lambda: tensor_parallelize(made(gpt2), "llama"),
            r"plan\['transformer.embed_tokens'\]: no submodule has such a name",
        ),
    )


@pytest.mark.ranks(2)
def test_a_preset_is_a_plan_to_start_from(world):
    model = made(gpt2)
    tensor_parallelize(model, {**preset(model, world.size), "lm_head": "vocab:parallel"})
    logits = model(**tokens()).logits
    assert logits.shape[-1] == -(-WORDS // 2)
    assert_close(ax.all_gather(logits, dim=-1)[..., :WORDS], alone(gpt2)[0])
