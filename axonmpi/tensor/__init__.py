"""Tensor parallelism: each rank of a group has a shard of a layer's parameters, and computes its part of the layer.

`tensor_parallelize` divides a model that was written for one process. The layers can be used alone, too:
`ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding`, attention, MLPs, norms, dropout and
`parallel_cross_entropy`. Outputs and gradients equal the undivided model's.

Read first: `shards.py` (the rows of a parameter on each rank), `regions.py` (the collectives between layers), then
`layers/linear.py`. `parallelize.py` divides models. The package imports `autograd`, `across_ranks`, `groups`
and packages below them, and not `ddp`, `fsdp` or `pipeline`.
"""

from __future__ import annotations

from .layers.attention import ParallelSelfAttention, tensor_parallel_attention
from .layers.dropout import ShardedDropout
from .layers.embedding import VocabParallelEmbedding
from .layers.linear import ColumnParallelLinear, RowParallelLinear
from .layers.loss import parallel_cross_entropy
from .layers.mlp import ParallelGatedMLP, ParallelMLP
from .layers.norm import sequence_parallel_norm
from .parallelize import tensor_parallelize
from .plan import (
    Assign,
    Column,
    Divide,
    Dropout,
    HeadDropout,
    Join,
    Plan,
    Region,
    Row,
    SequenceNorm,
    Split,
    Style,
    Summed,
    Tied,
    Vocabulary,
)
from .presets import preset
from .regions import enter, join_sequence, leave, split_sequence
from .shards import Shard, Sharded
from .state_dicts import copies, full_state_dict, load_full_state_dict, local_state_dict

__all__ = [
    "Assign",
    "Column",
    "ColumnParallelLinear",
    "Divide",
    "Dropout",
    "HeadDropout",
    "Join",
    "ParallelGatedMLP",
    "ParallelMLP",
    "ParallelSelfAttention",
    "Plan",
    "Region",
    "Row",
    "RowParallelLinear",
    "SequenceNorm",
    "Shard",
    "Sharded",
    "ShardedDropout",
    "Split",
    "Style",
    "Summed",
    "Tied",
    "VocabParallelEmbedding",
    "Vocabulary",
    "copies",
    "enter",
    "full_state_dict",
    "join_sequence",
    "leave",
    "load_full_state_dict",
    "local_state_dict",
    "parallel_cross_entropy",
    "preset",
    "sequence_parallel_norm",
    "split_sequence",
    "tensor_parallel_attention",
    "tensor_parallelize",
]
