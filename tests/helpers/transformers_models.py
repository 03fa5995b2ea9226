"""Models of `transformers`, tiny and built without download."""

from __future__ import annotations

from typing import Any

from torch import nn

WORDS = 37
"""Does not divide by 2 or 4."""
LENGTH = 8


def gpt2(name: str = "GPT2LMHeadModel", dropout: float = 0.0, **options: Any) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout, **options,
    )  # fmt: skip
    return getattr(transformers, name)(config)


def llama(name: str = "LlamaForCausalLM", heads: int = 4, pairs: int = 2, **options: Any) -> nn.Module:
    """Build a Llama, or a model with the same blocks, whose heads are 4 wide."""
    import transformers

    kind = name.removesuffix("Model").removesuffix("ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=WORDS, hidden_size=4 * heads, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=pairs, intermediate_size=24, max_position_embeddings=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    return getattr(transformers, name)(config)


def bert(name: str = "BertForMaskedLM", dropout: float = 0.0, **options: Any) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **options,
    )  # fmt: skip
    return getattr(transformers, name)(config)
