"""Applies the styles of a plan to modules.

Two steps. `planned` checks that a style fits a module and returns how its parameters will be cut; it changes
nothing, so that a mistake anywhere leaves the model as it was. `replacement` makes the module that takes another's
place, and `change` treats a module that stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..groups.process_group import ProcessGroup
from .hooks import enter_input, head_dropout, join_output, split_input
from .layers.dropout import ShardedDropout
from .layers.embedding import VocabParallelEmbedding
from .layers.linear import ColumnParallelLinear, RowParallelLinear
from .layers.norm import ACROSS_POSITIONS, sequence_parallel_norm, sum_over_copies
from .plan import (
    Assign,
    Column,
    Divide,
    Dropout,
    HeadDropout,
    Join,
    Region,
    Row,
    SequenceNorm,
    Split,
    Style,
    Summed,
    Vocabulary,
)
from .shards import Shard, check_divides
from .transposed import TransposedShard

REPLACING = (Column, Row, Vocabulary, Dropout)
"""Styles that put another module in a module's place."""


@dataclass(frozen=True)
class ModelOptions:
    """The options of a model, the same for all its modules.

    Attributes:
        group: The ranks that share the model.
        sequence_parallel: Whether activations between blocks are divided along the sequence.
        sequence_dim: Dimension of the sequence.
        generator: Source of random numbers for dropout; None means torch's default generator.
        splits: Whether the plan says where the sequence is divided; else embeddings divide it.
        joins: Whether the plan says where the sequence is joined; else layers for logits join it.
    """

    group: ProcessGroup
    sequence_parallel: bool
    sequence_dim: int
    generator: torch.Generator | None
    splits: bool = False
    joins: bool = False

    def options(self, *, divided: bool = True) -> dict[str, Any]:
        """Return keyword arguments of layers; `divided` says whether the sequence is, on one of their sides."""
        return {"sequence_parallel": self.sequence_parallel and divided, "sequence_dim": self.sequence_dim}


# ---- checking ---------------------------------------------------------------------------------------------------


def planned(module: nn.Module, style: Style, ranks: int) -> dict[str, Shard]:
    """Return how a module's own parameters will be cut, by name; local.

    Args:
        module: The module, before anything is changed.
        style: Its style.
        ranks: How many ranks share the model.

    Raises:
        ValueError: The style does not fit the module.
    """
    if isinstance(style, Column | Row | Vocabulary):
        return _shards(module, style, ranks)
    if isinstance(style, Dropout) and type(module) is not nn.Dropout:
        raise ValueError(f"expected an nn.Dropout, got {_kind(module)}")
    if isinstance(style, SequenceNorm | Summed):
        _check_own_forward(module)
    if isinstance(style, SequenceNorm) and isinstance(module, ACROSS_POSITIONS):
        raise ValueError(f"expected a norm that treats each position alone, got {_kind(module)}")
    if isinstance(style, HeadDropout):
        _divided(style.heads, ranks, "heads")
    if isinstance(style, Divide):
        for name in style.names:
            _divided(_attribute(module, name), ranks, name, shared=style.shared)
    if isinstance(style, Assign):
        _attribute(module, style.name)
    return {}


def _shards(module: nn.Module, style: Column | Row | Vocabulary, ranks: int) -> dict[str, Shard]:
    if isinstance(style, Vocabulary) and isinstance(module, nn.Embedding):
        _check_embedding(module)
        return {"weight": Shard.padded(0, module.num_embeddings, ranks)}
    _check_linear(module, "an nn.Embedding or nn.Linear" if isinstance(style, Vocabulary) else "an nn.Linear")
    inputs, outputs = _features(module)
    if isinstance(style, Row):
        return {"weight": _oriented(module, Shard.even(1, inputs, ranks))}
    shard = _column_shard(outputs, style, ranks) if isinstance(style, Column) else Shard.padded(0, outputs, ranks)
    own = {"weight": _oriented(module, shard)}
    return own if module.bias is None else {**own, "bias": shard}


def _column_shard(outputs: int, style: Column, ranks: int) -> Shard:
    parts, heads = style.parts, style.heads
    sizes = (outputs // parts,) * parts if isinstance(parts, int) else parts
    if sum(sizes) != outputs:
        raise ValueError(f"expected parts that are {outputs} outputs together, got parts={parts}")
    if heads is not None:
        if any(size % heads for size in sizes):
            raise ValueError(f"expected outputs that are {heads} heads, got {' + '.join(map(str, sizes))} outputs")
        if style.shared and len(sizes) == 1:
            return _head_shard(outputs, heads, ranks, style)
        _divided(heads, ranks, "heads")
    return Shard.packed(0, sizes, ranks)


def _head_shard(outputs: int, heads: int, ranks: int, style: Column) -> Shard:
    shard = Shard.heads(0, heads, outputs // heads, ranks)
    if shard.copies > 1 and style.gather_output:
        raise ValueError(f"expected divided outputs where several ranks have the same heads, got {style}")
    return shard


def _divided(value: object, ranks: int, name: str, *, shared: bool = False) -> int:
    """Return a rank's share of a number; 1 where several ranks have the same head."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a number that can be divided, got {value!r}")
    if shared and ranks % value == 0:
        return 1
    check_divides(name, value, ranks)
    return value // ranks


def _attribute(module: nn.Module, name: str) -> object:
    if not hasattr(module, name):
        raise ValueError(f"{_kind(module)} has no attribute {name!r}")
    return getattr(module, name)


def _check_linear(module: nn.Module, expected: str) -> None:
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        raise ValueError(
            "nn.MultiheadAttention does not call its layers; use tensor_parallel_attention in its place"
        )
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    if not (is_linear or _is_transposed(module)) or "weight" not in module._parameters:
        raise ValueError(f"expected {expected}, got {_kind(module)}")


def _check_embedding(module: nn.Embedding) -> None:
    if type(module).forward is not nn.Embedding.forward:
        raise ValueError(f"expected an embedding with the forward of nn.Embedding, got {_kind(module)}")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ValueError("expected an embedding without max_norm, scale_grad_by_freq and sparse")


def _is_transposed(module: nn.Module) -> bool:
    """Say whether a module is the linear layer of `transformers` that keeps its weight as [in, out]."""
    weight, outputs = getattr(module, "weight", None), getattr(module, "nf", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == outputs


def _features(module: nn.Module) -> tuple[int, int]:
    """Return how many inputs and outputs a linear layer has."""
    rows, columns = module.get_parameter("weight").shape
    return (rows, columns) if _is_transposed(module) else (columns, rows)


def _oriented(module: nn.Module, shard: Shard) -> Shard:
    return TransposedShard.of(shard) if _is_transposed(module) else shard


def _check_own_forward(module: nn.Module) -> None:
    if "forward" in vars(module):
        raise ValueError(f"expected a {_kind(module)} with the forward of its class, got one of its own")


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


# ---- doing ------------------------------------------------------------------------------------------------------


def replacement(module: nn.Module, style: Style, setting: ModelOptions, *, is_entered: bool) -> nn.Module:
    """Make the module that takes another's place, with this rank's part of its values; collective.

    Args:
        module: A module that `planned` has accepted.
        style: One of those in `REPLACING`.
        setting: Of the model.
        is_entered: Whether its input has entered the region of a module around it.
    """
    if isinstance(style, Dropout):
        assert isinstance(module, nn.Dropout)
        replicated = style.whole or not setting.sequence_parallel
        return ShardedDropout(
            module.p, setting.group, setting.sequence_dim, replicated=replicated, generator=setting.generator
        ).train(module.training)
    assert isinstance(style, Column | Row | Vocabulary)
    shards = _shards(module, style, setting.group.size)
    new = _parallel_layer(module, style, setting, is_entered)
    if _is_transposed(module):
        new.shards = shards
    return new.train(module.training)


def _parallel_layer(
    module: nn.Module, style: Column | Row | Vocabulary, setting: ModelOptions, is_entered: bool
) -> ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding:
    group = setting.group
    if isinstance(module, nn.Embedding):
        return VocabParallelEmbedding.from_embedding(module, group, **setting.options(divided=not setting.splits))
    linear = _as_linear(module)
    if isinstance(style, Row):
        return RowParallelLinear.from_linear(linear, group, **setting.options())
    if isinstance(style, Vocabulary):
        shard = Shard.padded(0, linear.out_features, group.size)
        return ColumnParallelLinear.from_linear(
            linear,
            group,
            shard=shard,
            gather_output=style.gather_output,
            **setting.options(divided=not setting.joins),
        )
    shard = _column_shard(linear.out_features, style, group.size)
    options = {"gather_output": style.gather_output, "input_is_entered": is_entered, **setting.options()}
    column = ColumnParallelLinear.from_linear(linear, group, shard=shard, **options)
    sum_over_copies(column, group, shard.copies)
    return column


def _as_linear(module: nn.Module) -> nn.Linear:
    if isinstance(module, nn.Linear):
        return module
    inputs, outputs = _features(module)
    weight, bias = module.get_parameter("weight"), module.bias
    linear = nn.Linear(inputs, outputs, bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().t(), weight.requires_grad)
    if bias is not None:
        linear.bias = module.get_parameter("bias")
    return linear


def change(module: nn.Module, style: Style, setting: ModelOptions) -> None:
    """Treat a module that stays, in place; local.

    Args:
        module: A module that `planned` has accepted.
        style: Any but those in `REPLACING`.
        setting: Of the model.
    """
    group, dim = setting.group, setting.sequence_dim
    if isinstance(style, Divide):
        for name in style.names:
            setattr(module, name, _divided(getattr(module, name), group.size, name, shared=style.shared))
    elif isinstance(style, Assign):
        setattr(module, style.name, style.value)
    elif isinstance(style, HeadDropout):
        head_dropout(module, group, style.heads, setting.generator)
    elif isinstance(style, Summed):
        sequence_parallel_norm(module, group)
    elif isinstance(style, Region) and (style.shared or setting.sequence_parallel):
        enter_input(module, group, **setting.options())
    elif not setting.sequence_parallel or group.size == 1:
        return
    elif isinstance(style, SequenceNorm):
        sequence_parallel_norm(module, group)
    elif isinstance(style, Split):
        split_input(module, group, dim)
    elif isinstance(style, Join):
        join_output(module, group, dim)
