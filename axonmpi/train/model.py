"""A byte-level GPT: a decoder-only transformer whose vocabulary is the 256 byte values.

    bytes [B, T] -> embedding [B, T, D] -> n x Block -> norm -> logits [B, T, 256]

    Block:  x + attention(norm(x)),  then  x + mlp(norm(x))

Position t sees bytes 0..t and predicts byte t + 1. B is the batch, T the sequence length, D the width,
H the number of heads and C = D / H the width of a head. Every random number comes from a `torch.Generator` of the
caller, so two models built from equal seeds are equal, in any thread and on any rank.

For a pipeline the model is cut into stages of consecutive blocks; the first stage also has the embedding, the last
stage the output layer. The code does not use the number of heads, hidden features or vocabulary rows, so that they
can be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from ..pipeline.splitting import balanced_bounds
from .config import ModelConfig

VOCABULARY_SIZE = 256
"""One token for each value of a byte."""

_INITIAL_STD = 0.02  # of GPT-2


def _linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a layer without bias or initial weights: `GPT` fills them, without torch's global generator."""
    layer: nn.Linear = skip_init(nn.Linear, in_features, out_features, bias=False)
    return layer


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width)
    return nn.LayerNorm(config.width)


def rotation_table(length: int, head_width: int) -> Tensor:
    """Return the cosines and sines of rotary positions (Su et al. 2021, arXiv:2104.09864).

    Args:
        length: Number of positions T.
        head_width: Width C of one head, even.

    Returns:
        A float32 tensor `[2, T, C/2]`: cosines, then sines.
    """
    frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.stack((angles.cos(), angles.sin())).to(torch.float32)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair of channels of `x` by the angle of its position.

    Args:
        x: `[B, H, T, C]`; channels c and c + C/2 form a pair.
        table: Cosines and sines from `rotation_table`, of at least T positions.

    Returns:
        A new tensor of the shape of `x`; its norm over the last dim is unchanged.
    """
    cosine, sine = table[:, : x.shape[-2]].to(x.dtype).unbind(0)  # [T, C/2] each
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and earlier positions.

    Args:
        config: The model's shape.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query_key_value = _linear(config.width, 3 * config.width)
        self.output = _linear(config.width, config.width)

    def forward(self, x: Tensor, table: Tensor | None) -> Tensor:
        """Mix positions.

        Args:
            x: `[B, T, D]`.
            table: The rotation table; None with learned positions.

        Returns:
            A new tensor `[B, T, D]`.
        """
        projected = self.query_key_value(x)
        split = projected.view(*projected.shape[:2], 3, -1, self.head_width)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, T, C] each
        if table is not None:
            query, key = rotate(query, table), rotate(key, table)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """One layer: attention and a two-layer perceptron, each on a normalized copy and added to the stream.

    Args:
        config: The model's shape.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = _norm(config)
        self.expand = _linear(config.width, config.mlp_ratio * config.width)
        self.contract = _linear(config.mlp_ratio * config.width, config.width)

    def forward(self, x: Tensor, table: Tensor | None) -> Tensor:
        """Return the stream `[B, T, D]` after this layer; `x` is left as it is."""
        x = x + self.attention(self.attention_norm(x), table)
        hidden = F.gelu(self.expand(self.mlp_norm(x)), approximate="tanh")
        updated: Tensor = x + self.contract(hidden)
        return updated


class GPT(nn.Module):
    """The full model.

    Args:
        config: The model's shape; also kept as `.config`.
        generator: Source of the initial weights; None means a new generator with seed 0.
    """

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = skip_init(nn.Embedding, VOCABULARY_SIZE, config.width)
        self.positions: nn.Embedding | None = None
        if config.positions == "learned":
            self.positions = skip_init(nn.Embedding, config.sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = _norm(config)
        self.head = _linear(config.width, VOCABULARY_SIZE)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        # not a buffer: it is the same on every rank, and needs no broadcast and no space in a checkpoint
        self.table: Tensor | None = None
        if self.positions is None:
            self.table = rotation_table(config.sequence_length, config.width // config.heads)
        self._initialize(generator or torch.Generator().manual_seed(0))

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        """Fill the weights as GPT-2 does: std 0.02, and less in layers that add to the residual stream."""
        residual_std = _INITIAL_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norms begin at one (weights) and zero (biases)
            std = residual_std if name.endswith(("output.weight", "contract.weight")) else _INITIAL_STD
            parameter.normal_(0.0, std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next byte at every position.

        Args:
            tokens: Byte values `[B, T]`, int64, with T at most the configured sequence length.

        Returns:
            Logits `[B, T, 256]`.

        Raises:
            ValueError: T is larger than the sequence length.
        """
        length = tokens.shape[1]
        if length > self.config.sequence_length:
            raise ValueError(
                f"expected at most sequence_length = {self.config.sequence_length} bytes, got {length}: "
                "shorten the input or build the model with a larger sequence_length"
            )
        return _compute(self, tokens)

    @torch.no_grad()
    def next_logits(self, text: Sequence[int]) -> Tensor:
        """Return the logits of the byte after `text`, [256]; only the last `sequence_length` bytes are seen."""
        window = torch.tensor([text[-self.config.sequence_length :]], device=self.embedding.weight.device)
        logits: Tensor = self(window)[0, -1]
        return logits

    def num_parameters(self) -> int:
        """Return the number of trainable elements, a tied parameter counted once."""
        return sum(parameter.numel() for parameter in self.parameters())


class GPTStage(nn.Module):
    """Consecutive blocks of a model, with the embedding before the first block and the output layer after the last.

    All modules are the model's own, not copies, and keep their names.

    Args:
        model: The full model.
        first: Number of the first block.
        stop: Number of the last block, plus one.
    """

    def __init__(self, model: GPT, first: int, stop: int) -> None:
        super().__init__()
        self.config = model.config
        begins, ends = first == 0, stop == len(model.blocks)
        self.embedding = model.embedding if begins else None
        self.positions = model.positions if begins else None
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in range(first, stop)})
        self.final_norm = model.final_norm if ends else None
        self.head = model.head if ends else None
        self.table = model.table

    def forward(self, x: Tensor) -> Tensor:
        """Take byte values `[B, T]` or the stream `[B, T, D]`; return the stream, or logits `[B, T, 256]`."""
        return _compute(self, x)

    @property
    def content(self) -> str:
        """The stage's modules, in words."""
        numbers = list(self.blocks)
        blocks = f"blocks {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"block {numbers[0]}"
        parts = ("embedding", self.embedding), (blocks, self.blocks), ("output layer", self.head)
        return ", ".join(name for name, part in parts if part is not None)


def _compute(parts: GPT | GPTStage, x: Tensor) -> Tensor:
    """Compute the modules of a model or a stage: embedding, blocks, output layer."""
    if parts.embedding is not None:
        x = parts.embedding(x)
        if parts.positions is not None:
            x = x + parts.positions(torch.arange(x.shape[1], device=x.device))
    if parts.table is not None:
        parts.table = parts.table.to(x.device)
    for block in parts.blocks.children():
        x = block(x, parts.table)
    if parts.head is not None:
        assert parts.final_norm is not None
        x = parts.head(parts.final_norm(x))
    return x


def split_stages(model: GPT, num_stages: int) -> list[GPTStage]:
    """Cut a model into stages of consecutive blocks, so that the largest stage computes as little as possible.

    Args:
        model: The full model, whose modules the stages share.
        num_stages: From 1 to the number of blocks.

    Raises:
        ValueError: There are fewer blocks than stages.
    """
    config = model.config
    if not 1 <= num_stages <= config.layers:
        raise ValueError(f"num_stages: expected 1 to {config.layers}, a block for each, got {num_stages}")
    # multiply-adds for a position; looking up an embedding takes none
    block = (4 + 2 * config.mlp_ratio) * config.width**2 + config.sequence_length * config.width
    costs: list[dict[Hashable, int]] = [{number: block} for number in range(config.layers)]
    costs[-1]["head"] = VOCABULARY_SIZE * config.width
    return [GPTStage(model, *bounds) for bounds in balanced_bounds(costs, num_stages)]


class Predictor(Protocol):
    """A model that `generate` can use."""

    def next_logits(self, text: Sequence[int]) -> Tensor:
        """Return the logits of the byte after `text`, [256]."""


@torch.no_grad()
def generate(
    model: Predictor, prompt: bytes, length: int, *, generator: torch.Generator, temperature: float = 0.8
) -> bytes:
    """Continue `prompt` one byte at a time. Local with a `GPT`; collective if the model is spread over ranks.

    Args:
        model: A trained model.
        prompt: At least one byte; only the last `sequence_length` bytes are seen.
        length: Number of bytes to add.
        generator: Source of the draws: the same state gives the same text.
        temperature: Divides the logits (dimensionless); 0 takes the likeliest byte each time.

    Returns:
        The added bytes, without the prompt.

    Raises:
        ValueError: The prompt is empty, or `length` or `temperature` is negative.
    """
    if not prompt:
        raise ValueError("expected a prompt of at least one byte, got an empty one: pass for example b'\\n'")
    if length < 0 or temperature < 0:
        raise ValueError(f"length and temperature must not be negative, got {length} and {temperature}")
    text = list(prompt)
    for _ in range(length):
        text.append(_draw(model.next_logits(text), generator, temperature))
    return bytes(text[len(prompt) :])


def _draw(logits: Tensor, generator: torch.Generator, temperature: float) -> int:
    if temperature == 0:
        return int(logits.argmax())
    chances = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    return int(torch.multinomial(chances, 1, generator=generator))
