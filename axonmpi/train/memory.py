"""What a rank is expected to hold in memory while it trains.

Parameters, gradients and the optimizer's state are counted. Activations are estimated. For each position of a block
autograd keeps so many numbers, in multiples of the width D, where r is `mlp_ratio`:

    along the stream     x, norm(x) before attention and before the perceptron    each 1, rmsnorm one more
    inside attention     queries, keys, values                                    3
                         rotated queries and keys, a copy of the result           2 + 1
                         the result                                               1
    inside the mlp       before and after the activation function                 2 r

What is inside is divided by tp, what is along the stream by tp with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

from .config import Config
from .model import VOCABULARY_SIZE, GPTStage

__all__ = ["bytes_at_output", "bytes_in_block", "bytes_of_activations"]

_FLOAT = 4


def bytes_in_block(config: Config) -> float:
    """Return what autograd keeps on a rank for one position of one block."""
    model, tp = config.model, config.mesh.tp
    computed = 2 if config.run.dtype == "bfloat16" else _FLOAT
    inside = 3 + 1 + 2 * model.mlp_ratio + (3 if model.positions == "rotary" else 0)
    stream = 2 * (_kept_by_norm(config) + computed) / _sequence_parts(config)
    return model.width * (stream + inside * computed / tp) + _FLOAT * model.heads / tp


def bytes_at_output(config: Config) -> float:
    """Return what autograd keeps on a rank for one position of the last norm, the output layer and the loss."""
    computed = 2 if config.run.dtype == "bfloat16" else _FLOAT
    stream = config.model.width * (_kept_by_norm(config) / _sequence_parts(config) + computed)
    return stream + VOCABULARY_SIZE * _FLOAT / config.mesh.tp


def bytes_of_activations(config: Config, stages: Sequence[GPTStage] | None, peak: int, sequences: int) -> int:
    """Estimate what a rank keeps of its activations at most.

    Args:
        config: All settings.
        stages: Those of the rank; None means the whole model.
        peak: How many micro-batches it has under way at most, counted for each stage.
        sequences: Of a micro-batch.
    """
    blocks = config.model.layers if stages is None else sum(len(stage.blocks) for stage in stages)
    outputs = 1 if stages is None else sum(stage.head is not None for stage in stages)
    position = blocks * bytes_in_block(config) + outputs * bytes_at_output(config)
    of_stage = position / (1 if stages is None else len(stages))
    return round(peak * sequences * config.model.sequence_length * of_stage)


def _kept_by_norm(config: Config) -> int:
    """Return the bytes of its input, and for rmsnorm of the input divided by its root mean square."""
    return (2 if config.model.norm == "rmsnorm" else 1) * _FLOAT


def _sequence_parts(config: Config) -> int:
    return config.mesh.tp if config.mesh.sequence_parallel else 1
