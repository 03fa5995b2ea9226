"""Checks and changes of one module, as its style in a plan says.

1. `check_style` raises unless the style fits the module, and returns the shards of its parameters. It changes
   nothing, so a mistake anywhere in a plan leaves the model as it was.
2. `parallel_module` makes the layer that replaces a module; `change_module` changes a module in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..groups.process_group import ProcessGroup
from .hooks import change_input, head_dropout, join_output
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
from .regions import enter, split_sequence
from .shards import Shard, check_divides

REPLACING = (Column, Row, Vocabulary, Dropout)
"""Styles that replace the module by another one."""


@dataclass(frozen=True)
class ModelOptions:
    """The arguments of `tensor_parallelize` that all modules of a model share.

    Attributes:
        group: The ranks that share the model.
        sequence_parallel: Whether activations between blocks are sharded along the sequence.
        sequence_dim: Dimension of the sequence.
        generator: Source of random numbers for dropout; None means torch's default generator.
        splits: Whether the plan has a `"split"`; without one, embeddings shard the sequence.
        joins: Whether the plan has a `"join"`; without one, layers for logits gather the sequence.
    """

    group: ProcessGroup
    sequence_parallel: bool
    sequence_dim: int
    generator: torch.Generator | None
    splits: bool = False
    joins: bool = False

    def of_layer(self, *, sharded: bool = True) -> dict[str, Any]:
        """Return keyword arguments of a layer; `sharded`: its input or output may be a shard of the sequence."""
        return {"sequence_parallel": self.sequence_parallel and sharded, "sequence_dim": self.sequence_dim}


# ---- checking ---------------------------------------------------------------------------------------------------


def check_style(module: nn.Module, style: Style, ranks: int) -> dict[str, Shard]:
    """Return the shards of a module's own parameters, by name; local.

    Args:
        module: The module, before anything is changed.
        style: Its style.
        ranks: Number of ranks that share the model.

    Raises:
        ValueError: The style does not fit the module.
    """
    if isinstance(style, Column | Row | Vocabulary):
        return _shards(module, style, ranks)
    if isinstance(style, Dropout) and type(module) is not nn.Dropout:
        raise ValueError(f"expected an nn.Dropout, got {_kind(module)}")
    if isinstance(style, SequenceNorm | Summed) and "forward" in vars(module):
        raise ValueError(f"expected a {_kind(module)} with the forward of its class, got one of its own")
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
    is_transposed = _is_transposed(module)
    _check_linear(module, "an nn.Embedding or nn.Linear" if isinstance(style, Vocabulary) else "an nn.Linear")
    outputs, inputs = module.get_parameter("weight").shape
    if is_transposed:
        outputs, inputs = inputs, outputs
    if isinstance(style, Row):
        shard = Shard.even(1, inputs, ranks)
    elif isinstance(style, Column):
        shard = _column_shard(outputs, style, ranks)
    else:
        shard = Shard.padded(0, outputs, ranks)
    weight = {"weight": replace(shard, is_transposed=is_transposed)}
    return weight if module.bias is None or isinstance(style, Row) else {**weight, "bias": shard}


def _column_shard(outputs: int, style: Column, ranks: int) -> Shard:
    parts, heads = style.parts, style.heads
    sizes = (outputs // parts,) * parts if isinstance(parts, int) else parts
    if sum(sizes) != outputs:
        raise ValueError(f"expected parts that are {outputs} outputs together, got parts={parts}")
    if heads is None:
        return Shard.packed(0, sizes, ranks)
    if any(size % heads for size in sizes):
        raise ValueError(f"expected outputs that are {heads} heads, got {' + '.join(map(str, sizes))} outputs")
    if not style.shared or len(sizes) > 1:
        _divided(heads, ranks, "heads")
        return Shard.packed(0, sizes, ranks)
    shard = Shard.heads(0, heads, outputs // heads, ranks)
    if shard.copies > 1 and style.gather_output:
        raise ValueError(f"expected divided outputs where several ranks have the same heads, got {style}")
    return shard


def _attribute(module: nn.Module, name: str) -> object:
    if not hasattr(module, name):
        raise ValueError(f"{_kind(module)} has no attribute {name!r}")
    return getattr(module, name)


def _divided(value: object, ranks: int, name: str, *, shared: bool = False) -> int:
    """Return a rank's share of an attribute; 1 if several ranks share each head."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a number that can be divided, got {value!r}")
    if shared and ranks % value == 0:
        return 1
    check_divides(name, value, ranks)
    return value // ranks


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
    """Return True for the linear layer of `transformers` that keeps its weight as [in, out]."""
    weight, outputs = getattr(module, "weight", None), getattr(module, "nf", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == outputs


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


# ---- changing ---------------------------------------------------------------------------------------------------


def parallel_module(
    module: nn.Module, style: Style, shards: Mapping[str, Shard], options: ModelOptions, *, is_entered: bool
) -> nn.Module:
    """Make the layer that replaces a module, with this rank's shards of its values; collective.

    Args:
        module: The module.
        style: An instance of one of `REPLACING`.
        shards: The result of `check_style`.
        options: Of the model.
        is_entered: Whether the input has entered the region of a module around this one.
    """
    group = options.group
    if isinstance(style, Dropout):
        assert isinstance(module, nn.Dropout)
        replicated = style.whole or not options.sequence_parallel
        return ShardedDropout(
            module.p, group, options.sequence_dim, replicated=replicated, generator=options.generator
        ).train(module.training)
    if isinstance(module, nn.Embedding):
        layer = options.of_layer(sharded=not options.splits)
        return VocabParallelEmbedding.from_embedding(module, group, **layer).train(module.training)
    linear, shard = _as_linear(module), replace(shards["weight"], is_transposed=False)
    new: ColumnParallelLinear | RowParallelLinear
    if isinstance(style, Row):
        new = RowParallelLinear.from_linear(linear, group, shard=shard, **options.of_layer())
    else:
        assert isinstance(style, Column | Vocabulary)
        joins_sequence = isinstance(style, Vocabulary) and options.joins
        new = ColumnParallelLinear.from_linear(
            linear,
            group,
            shard=shard,
            gather_output=style.gather_output,
            input_is_entered=is_entered,
            **options.of_layer(sharded=not joins_sequence),
        )
        sum_over_copies(new, group, shard.copies)
    new.shards = dict(shards)
    return new.train(module.training)


def _as_linear(module: nn.Module) -> nn.Linear:
    if isinstance(module, nn.Linear):
        return module
    weight = module.get_parameter("weight")
    inputs, outputs = weight.shape
    linear = nn.Linear(inputs, outputs, module.bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().t(), weight.requires_grad)
    if module.bias is not None:
        linear.bias = module.get_parameter("bias")
    return linear


def change_module(module: nn.Module, style: Style, options: ModelOptions) -> None:
    """Change a module in place; local.

    Args:
        module: A module that `check_style` has accepted.
        style: Any style but `REPLACING`.
        options: Of the model.
    """
    group, dim = options.group, options.sequence_dim
    if isinstance(style, Divide):
        for name in style.names:
            setattr(module, name, _divided(getattr(module, name), group.size, name, shared=style.shared))
    elif isinstance(style, Assign):
        setattr(module, style.name, style.value)
    elif isinstance(style, HeadDropout):
        head_dropout(module, group, style.heads, options.generator)
    elif isinstance(style, Summed):
        sequence_parallel_norm(module, group)
    elif isinstance(style, Region) and (style.shared or options.sequence_parallel):
        change_input(module, lambda hidden: enter(hidden, group, **options.of_layer()))
    elif not options.sequence_parallel or group.size == 1:
        return
    elif isinstance(style, SequenceNorm):
        sequence_parallel_norm(module, group)
    elif isinstance(style, Split):
        change_input(module, lambda hidden: split_sequence(hidden, group, dim))
    elif isinstance(style, Join):
        join_output(module, group, dim)
