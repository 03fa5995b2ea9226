"""Plans for models of the `transformers` library, which is not imported here.

A preset is a function of a model and the number of ranks that returns a plan. It serves every model around the same
blocks: `GPT2Model` as well as `GPT2LMHeadModel` or `GPT2ForSequenceClassification`.

    queries, keys, values     column     heads are divided, not cut
    output of the attention   row
    MLP                       column, then row
    embedding, logits         vocab
    norms, dropout            on slices of the sequence with sequence parallelism, from the first block to the last
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .plan import Assign, Column, HeadDropout, Plan, Style

Lines = dict[str, list[Style | str]]


def gpt2(model: nn.Module, ranks: int) -> Plan:
    """Return the plan of a GPT-2; local.

    Args:
        model: A model of `transformers` with a GPT-2 inside.
        ranks: How many ranks share it.

    Raises:
        ValueError: The heads do not divide by the ranks, or there is cross-attention.
    """
    base, heads = _base(model), _heads(model, ranks)
    lines: Lines = {
        f"{base}wte": ["vocab"],
        f"{base}drop": ["dropout:whole"],
        f"{base}h.0": ["split"],
        f"{base}h.*.ln_?": ["sequence"],
        f"{base}h.*.attn": ["divide:num_heads,split_size", HeadDropout(heads)],
        f"{base}h.*.attn.c_attn": [Column(parts=3, heads=heads)],
        f"{base}h.*.mlp.c_fc": ["column"],
        f"{base}h.*.c_proj": ["row"],
        f"{base}h.*.resid_dropout": ["dropout"],
        f"{base}h.*.mlp.dropout": ["dropout"],
        f"{base}ln_f": ["sequence", "join"],
        "lm_head": ["vocab"],
    }
    return _present(lines, model, "lm_head")


def llama(model: nn.Module, ranks: int) -> Plan:
    """Return the plan of a Llama, or of a model with the same blocks such as Mistral or Qwen; local.

    Key/value heads may be fewer than ranks.

    Args:
        model: A model of `transformers` with such a model inside.
        ranks: How many ranks share it.

    Raises:
        ValueError: The heads do not divide by the ranks.
    """
    base, heads = _base(model), _heads(model, ranks)
    pairs = getattr(_config(model), "num_key_value_heads", heads)
    lines: Lines = {
        f"{base}embed_tokens": ["vocab"],
        f"{base}layers.0": ["split"],
        f"{base}layers.*.*layernorm": ["sequence"],
        f"{base}layers.*.self_attn": [
            "region:shared",
            HeadDropout(heads),
            Assign("num_key_value_groups", heads // ranks // max(pairs // ranks, 1)),
        ],
        f"{base}layers.*.q_proj": [Column(heads=heads)],
        f"{base}layers.*.[kv]_proj": [Column(heads=pairs, shared=True)],
        f"{base}layers.*.mlp": ["region:shared"],
        f"{base}layers.*.gate_proj": ["column"],
        f"{base}layers.*.up_proj": ["column"],
        f"{base}layers.*.[qk]_norm": ["sum"],
        f"{base}layers.*.o_proj": ["row"],
        f"{base}layers.*.down_proj": ["row"],
        f"{base}norm": ["sequence", "join"],
        "lm_head": ["vocab"],
    }
    return _present(lines, model, "lm_head", f"{base}layers.*.[qk]_norm")


def bert(model: nn.Module, ranks: int) -> Plan:
    """Return the plan of a BERT; local.

    Args:
        model: A model of `transformers` with a BERT inside.
        ranks: How many ranks share it.

    Raises:
        ValueError: The heads do not divide by the ranks, or there is cross-attention.
    """
    base, heads = _base(model), _heads(model, ranks)
    layers = f"{base}encoder.layer"
    lines: Lines = {
        f"{base}embeddings.word_embeddings": ["vocab"],
        f"{base}embeddings.dropout": ["dropout:whole"],
        f"{layers}.0": ["split"],
        f"{layers}.*.attention.self": [
            "region:shared",
            "divide:num_attention_heads,all_head_size",
            HeadDropout(heads),
        ],
        f"{layers}.*.attention.self.query": [Column(heads=heads)],
        f"{layers}.*.attention.self.key": [Column(heads=heads)],
        f"{layers}.*.attention.self.value": [Column(heads=heads)],
        f"{layers}.*.intermediate.dense": ["column"],
        f"{layers}.*.output.dense": ["row"],
        f"{layers}.*.output.dropout": ["dropout"],
        f"{layers}.*.output.LayerNorm": ["sequence"],
        f"{layers}.{_config(model).num_hidden_layers - 1}": ["join"],
        "cls.predictions": ["tied"],
        "cls.predictions.decoder": ["vocab"],
    }
    return _present(lines, model, "cls.predictions", "cls.predictions.decoder")


PRESETS: dict[str, Callable[[nn.Module, int], Plan]] = {
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
}
"""By the `model_type` of a model's configuration."""


def preset(model: nn.Module, ranks: int, name: str | None = None) -> Plan:
    """Return the plan that is shipped for a model; local.

    Args:
        model: A model of `transformers`.
        ranks: How many ranks share it.
        name: Of the preset; None takes it from `model.config.model_type`.

    Raises:
        ValueError: There is no such preset, or it does not fit the model.
    """
    chosen = getattr(getattr(model, "config", None), "model_type", None) if name is None else name
    if chosen not in PRESETS:
        asked = f"model.config.model_type is {chosen!r}" if name is None else f"got {name!r}"
        raise ValueError(f"plan: expected one of the presets {', '.join(PRESETS)} or a plan of your own; {asked}")
    return PRESETS[chosen](model, ranks)


def _config(model: nn.Module) -> Any:
    if not hasattr(model, "config"):
        raise ValueError(f"plan: a preset needs a model of transformers, got {type(model).__name__} without config")
    return model.config


def _base(model: nn.Module) -> str:
    """Return the prefix of the blocks' names: a submodule of a larger model, or nothing."""
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix and hasattr(model, prefix) else ""


def _heads(model: nn.Module, ranks: int) -> int:
    config = _config(model)
    if getattr(config, "add_cross_attention", False):
        raise ValueError("plan: the presets have no lines for cross-attention; write a plan for this model")
    heads: int = config.num_attention_heads
    if heads % ranks:
        raise ValueError(
            f"plan: expected attention heads that divide by the {ranks} ranks of the group, got {heads}; use a "
            f"group of {_divisors(heads)} ranks"
        )
    return heads


def _divisors(number: int) -> str:
    return " or ".join(str(part) for part in range(1, number + 1) if number % part == 0)


def _present(lines: Lines, model: nn.Module, *optional: str) -> Plan:
    """Leave out the optional patterns that name no module of this model."""
    names = [name for name, _ in model.named_modules()]
    return {
        pattern: styles
        for pattern, styles in lines.items()
        if pattern not in optional or any(fnmatchcase(name, pattern) for name in names)
    }
