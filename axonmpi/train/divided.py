"""The model with its layers divided among the ranks of the tp axis.

    embedding          rows of the vocabulary                  a rank has some words' vectors
    query_key_value    heads ─┐
    output                    └─ one sum over the ranks        and likewise expand, contract
    head               rows of the vocabulary                  a rank has some words' logits, no rank has all

Every rank builds the whole model from the same seed and keeps its part, so that training begins with the same
values as on one rank. With sequence parallelism a rank has a part of the sequence from the first block to the
last norm, and the whole sequence again for the logits.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from ..groups.process_group import ProcessGroup
from ..tensor.layers.loss import parallel_cross_entropy
from ..tensor.parallelize import tensor_parallelize
from ..tensor.state_dicts import copies
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


def divide(model: GPT, group: ProcessGroup, *, sequence_parallel: bool) -> None:
    """Keep this rank's part of each layer; collective, in place.

    Args:
        model: The same model on every rank; its heads divide by the number of ranks.
        group: The ranks along the tp axis; nothing is done for one.
        sequence_parallel: Divide the activations between the layers as well.
    """
    if group.size > 1:
        tensor_parallelize(model, _PLAN, group, sequence_parallel=sequence_parallel)


def replicated_copies(module: nn.Module, group: ProcessGroup) -> Mapping[str, int]:
    """Return the number of ranks along the tp axis that have each parameter, by its name; local."""
    return copies(module) if group.size > 1 else {}


def summed_loss(logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    """Return the loss in nats, summed over all bytes whose target is not `IGNORED`; collective over the tp axis.

    Args:
        logits: [B, T, V] all of them, or this rank's; half precision is possible, the loss is in float32.
        targets: [B, T] bytes.
        group: The ranks that share the logits.
    """
    if group.size == 1:
        flat = logits.flatten(0, 1).float()
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return parallel_cross_entropy(
        logits, targets, group, vocabulary=VOCABULARY_SIZE, ignore_index=IGNORED, reduction="sum"
    )


def joined_logits(logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return all logits of one position, [256], given each rank's part; collective over the tp axis."""
    whole: Tensor = logits if group.size == 1 else group.all_gather(logits)
    return whole[:VOCABULARY_SIZE]
