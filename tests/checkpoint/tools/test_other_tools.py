"""Checkpoints in other tools: `transformers`, the `safetensors` package, torch's own reader."""

import functools

import pytest
import torch
from helpers.checkpoints import by_name
from helpers.compare import assert_equal
from helpers.models import built
from helpers.once import one_thread
from helpers.transformer_parts import WORDS, gpt2, llama
from safetensors.torch import load_file
from torch import nn

import axonmpi as ax
from axonmpi.tensor import full_state_dict, preset, tensor_parallelize


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("layout", ["tp", "fsdp", "fsdp_tp"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_transformers_loads_a_model_that_was_trained_in_shards(make, layout, world, shared_tmp_path):
    mesh = ax.DeviceMesh({"dp": {"tp": 1, "fsdp": world.size, "fsdp_tp": 2}[layout], "tp": -1}, world)
    model = built(make)
    if layout != "fsdp":
        tensor_parallelize(model, preset(model, mesh.size("tp")), mesh.group("tp"))
    trained = model if layout == "tp" else ax.FSDP(model, mesh.group("dp"))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    words = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        logits = trained(input_ids=words).logits
        nn.functional.cross_entropy(logits[..., :WORDS].flatten(0, 1), words.flatten()).backward()
        optimizer.step()
    ax.save_checkpoint(shared_tmp_path / "it", trained, optimizer, step=2)
    expected = None if layout == "tp" else trained.full_state_dict()
    expected = expected if layout == "fsdp" else full_state_dict(model, expected)
    with one_thread, torch.no_grad():
        plain = built(make)
        loaded = type(plain).from_pretrained(shared_tmp_path / "it")
        plain.load_state_dict(expected)
        assert_equal(loaded(input_ids=words).logits, plain.eval()(input_ids=words).logits)
    assert_equal(by_name(loaded.state_dict()), by_name(expected))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("max_file_size", [1 << 30, 4000])
def test_the_package_and_torch_read_the_files(max_file_size, world, shared_tmp_path):
    model = ax.FSDP(built(functools.partial(nn.Linear, 100, 9)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 100)).sum().backward()
    optimizer.step()
    ax.save_checkpoint(shared_tmp_path / "it", model, optimizer, max_file_size=max_file_size)
    weight = model.full_state_dict()["weight"]
    average = model.full_optimizer_state_dict(optimizer)["state"]["weight"]["exp_avg"]
    files = sorted((shared_tmp_path / "it").glob("*.safetensors"))
    assert (len(files) > 4) == (max_file_size == 4000)
    names = {name for file in files for name in load_file(file)}
    assert {"weight", "bias", "weight.exp_avg", "bias.exp_avg_sq", "weight.step"} <= names
    import torch.distributed.checkpoint as dcp  # a second for each process that only collects tests

    with one_thread:
        found = {"weight": torch.zeros_like(weight), "weight.exp_avg": torch.zeros_like(average)}
        with pytest.warns(UserWarning, match="load in a single process"):
            dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(shared_tmp_path / "it")), no_dist=True)
    assert_equal(found, {"weight": weight, "weight.exp_avg": average})
