#!/usr/bin/env python3
"""Models of `transformers`, unchanged, on samples that are cut over ranks: values are those of one process.

    tests/others/run domain [--ranks 2,3,4] [NAME ...]

Images are cut along rows, or along rows and columns, and texts along tokens. Outputs, losses and all gradients of
small models with drawn weights are compared within 1e-8 (float64), in evaluation and in training without dropout.
It needs `pip install transformers`; the exit code is 0 if all models pass.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers as hf
from helpers.compare import assert_close
from helpers.cut_tensors import randn
from helpers.tried import try_each
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.domain import DomainTensor
from axonmpi.launch.launcher_variables import detect_launchers
from axonmpi.testing import launch

TOLERANCE = 1e-8
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
TEXTS = "llama", "gpt2"
TEXT = {"vocab_size": 31, "use_cache": False}
CHOSEN: Mapping[str, Callable[[], tuple[nn.Module, list[int]]]] = {
    "convnext": lambda: (
        hf.ConvNextForImageClassification(hf.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 2, 1])),
        [2, 3, 76, 68],
    ),
    "swin": lambda: (
        hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=(40, 56), embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=3, drop_path_rate=0.0
            )
        ),
        [2, 3, 40, 56],
    ),
    "segformer": lambda: (
        hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(
                hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2],
                decoder_hidden_size=16, drop_path_rate=0.0, classifier_dropout_prob=0.0, **NO_DROPOUT,
            )
        ),
        [2, 3, 72, 64],
    ),
    "vit": lambda: (
        hf.ViTForImageClassification(
            hf.ViTConfig(
                image_size=(40, 48), patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                intermediate_size=32,
            )
        ),
        [2, 3, 40, 48],
    ),
    "llama": lambda: (
        hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, **TEXT,
            )
        ),
        [2, 19],
    ),
    "gpt2": lambda: (
        hf.GPT2LMHeadModel(
            hf.GPT2Config(
                n_embd=16, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                bos_token_id=0, eos_token_id=0, **TEXT,
            )
        ),
        [2, 19],
    ),
}  # fmt: skip
"""A model and the shape of its input."""


def values(model: nn.Module, name: str, inputs: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole output and all gradients; of a text also its loss; collective if inputs are cut."""
    model.zero_grad()
    if name in TEXTS:
        logits = model(input_ids=inputs).logits
        with torch.no_grad():
            yield "own loss", model(input_ids=inputs, labels=inputs).loss  # transformers computes it in float32
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
    else:
        logits = model(pixel_values=inputs).logits
        total = (logits * randn(1, *logits.shape)).sum()
    total.backward()
    yield "logits", logits.full_tensor() if isinstance(logits, DomainTensor) else logits
    yield "loss", total
    yield from (
        (f"gradient of {name}", p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None
    )


def compare(name: str, dims: dict[str, int], shape: dict[str, int], training: bool) -> None:
    """Compare a model on cut inputs with itself on whole ones; collective."""
    torch.manual_seed(0)
    model, size = CHOSEN[name]()
    model = model.double().train(training)
    for number, parameter in enumerate(model.parameters()):  # biases and tables begin with zeros
        parameter.data += randn(number, *parameter.shape) / 10
    inputs = randn(2, *size)
    if name in TEXTS:
        inputs = torch.randint(31, size, generator=torch.Generator().manual_seed(2))
    expected = dict(values(model, name, inputs))
    found = dict(values(model, name, ax.Domain(ax.DeviceMesh(shape), dims).shard(inputs)))
    if name in TEXTS:
        assert_close(found.pop("own loss"), expected.pop("own loss"), 1e-6, name)
    assert_close(found, expected, TOLERANCE, name)


def on_ranks(name: str) -> None:
    """Compare a model in each layout of these ranks."""
    ranks = ax.init_process_group().size
    layouts = [{"y": 1}] if name in TEXTS else [{"y": 2}, {"y": 3}]
    if ranks == 4 and name not in TEXTS:
        layouts.append({"y": 2, "x": 3})
    for dims in layouts:
        shape = {"y": ranks} if len(dims) == 1 else {"y": 2, "x": 2}
        for training in (False, True):
            compare(name, dims, shape, training)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(CHOSEN)}")
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks (default: 2,3,4)")
    options = parser.parse_args()
    start = partial(launch, timeout=300, env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    jobs: dict[str, Callable[[], Any]] = {
        f"{name} on {ranks} ranks": partial(start, int(ranks), os.path.abspath(__file__), name)
        for name in options.names or CHOSEN
        for ranks in options.ranks.split(",")
    }
    return try_each(jobs)


if __name__ == "__main__":
    if detect_launchers():
        on_ranks(sys.argv[1])
    else:
        sys.exit(main())
