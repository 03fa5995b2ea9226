"""The model with its layers sharded along the tp axis.

    embedding          rows of the vocabulary                  a rank has some words' vectors
    query_key_value    heads ─┐
    output                    └─ one sum over the ranks        and likewise expand, contract
    head               rows of the vocabulary                  a rank has some words' logits, no rank has all

Every rank builds the full model from the same seed and keeps its shards, so that training begins with the same
values as on one rank. With sequence parallelism a rank has a slice of the sequence from the first block to the
last norm, and the full sequence again for the logits.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..groups.process_group import ProcessGroup
from ..tensor.layers.loss import parallel_cross_entropy
from ..tensor.parallelize import tensor_parallelize
from .batches import IGNORED
from .model import GPT, VOCABULARY_SIZE

_PLAN = {
    "embedding": "vocab",
    "blocks.0": "split",
    "blocks.*.*_norm": "sequence",
    "blocks.*.query_key_value": "column:3",
    "blocks.*.output": "row",
    "blocks.*.expand": "column",
    "blocks.*.contract": "row",
    "final_norm": ["sequence", "join"],
    "head": "vocab:parallel",
}


def shard_layers(model: GPT, group: ProcessGroup, *, sequence_parallel: bool) -> None:
    """Keep this rank's shard of each layer; collective, in place.

    Args:
        model: The same on every rank; its heads divide by the number of ranks.
        group: The ranks along the tp axis; a group of one rank changes nothing.
        sequence_parallel: Shard the activations between the layers as well.
    """
    if group.size > 1:
        tensor_parallelize(model, _PLAN, group, sequence_parallel=sequence_parallel)


def summed_loss(logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    """Return the loss in nats, summed over all bytes whose target is not `IGNORED`; collective over the tp axis.

    Args:
        logits: [B, T, V], of any dtype; V is 256, or this rank's rows of the vocabulary. The loss is in float32.
        targets: [B, T] bytes.
        group: The ranks along the tp axis.
    """
    if group.size == 1:
        flat = logits.flatten(0, 1).float()
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return parallel_cross_entropy(
        logits, targets, group, vocabulary=VOCABULARY_SIZE, ignore_index=IGNORED, reduction="sum"
    )


def full_logits(logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return the logits of one position, [256], from each rank's shard; collective over the tp axis."""
    gathered: Tensor = logits if group.size == 1 else group.all_gather(logits)
    return gathered[:VOCABULARY_SIZE]
