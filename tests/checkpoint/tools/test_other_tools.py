"""What other tools make of a checkpoint: `transformers`, the `safetensors` package, torch's own reader."""

import functools
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.models import built
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

import axonmpi as ax
from axonmpi.tensor import full_state_dict, preset, tensor_parallelize

WORDS = 37
_loading = threading.Lock()


def gpt2():
    import transformers

    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama}


def shared_folder(world, tmp_path):
    return Path(ax.broadcast_object(str(tmp_path), 0, world.default_group))


def divided(make, layout, world):
    """Return the model to train, and how to have it whole."""
    model = built(make)
    if layout == "tp":
        tensor_parallelize(model, preset(model, world.size), world.default_group)
        return model, lambda: full_state_dict(model)
    if layout == "fsdp":
        made = ax.FSDP(model, world.default_group)
        return made, made.full_state_dict
    mesh = ax.DeviceMesh({"dp": 2, "tp": world.size // 2}, world)
    tensor_parallelize(model, preset(model, world.size // 2), mesh.group("tp"))
    both = ax.FSDP(model, mesh.group("dp"))
    return both, lambda: full_state_dict(model, both.full_state_dict())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("layout", ["tp", "fsdp", "fsdp_tp"])
@pytest.mark.parametrize("kind", MODELS)
def test_transformers_loads_what_was_trained_in_parts(kind, layout, world, tmp_path):
    folder = shared_folder(world, tmp_path)
    model, whole = divided(MODELS[kind], layout, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(input_ids=words).logits
        nn.functional.cross_entropy(logits[..., :WORDS].flatten(0, 1), words.flatten()).backward()
        optimizer.step()
    ax.save_checkpoint(folder / "it", model, optimizer, step=2, group=world.default_group)
    expected = whole()
    with _loading, torch.no_grad():
        loaded = type(built(MODELS[kind])).from_pretrained(folder / "it")
        plain = built(MODELS[kind])
        plain.load_state_dict(expected)
        assert torch.equal(loaded(input_ids=words).logits, plain.eval()(input_ids=words).logits)
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("max_file_size", [1 << 30, 4000])
def test_the_package_and_torch_read_the_files(max_file_size, world, tmp_path):
    folder = shared_folder(world, tmp_path)
    model = ax.FSDP(built(functools.partial(nn.Linear, 100, 9)), world.default_group)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 100)).sum().backward()
    optimizer.step()
    settings = {"max_file_size": max_file_size, "group": world.default_group}
    ax.save_checkpoint(folder / "it", model, optimizer, **settings)
    weight = model.full_state_dict()["weight"]
    average = model.full_optimizer_state_dict(optimizer)["state"]["weight"]["exp_avg"]
    files = sorted((folder / "it").glob("*.safetensors"))
    assert (len(files) > 4) == (max_file_size == 4000)
    names = set()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    assert {"weight", "bias", "weight.exp_avg", "bias.exp_avg_sq", "weight.step"} <= names
    with _loading:
        found = {"weight": torch.zeros_like(weight), "weight.exp_avg": torch.zeros_like(average)}
        with pytest.warns(UserWarning, match="load in a single process"):
            dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder / "it")), no_dist=True)
    assert torch.equal(found["weight"], weight)
    assert torch.equal(found["weight.exp_avg"], average)
