"""The table of the ranks' shards and memory that is shown when a run begins.

mesh: dp 2 x pp 2 x cp 1 x tp 2 = 8 ranks, rank = (dp x 2 + pp) x 2 + tp; parameters sharded along dp (full)
pp  ranks    what each has                       parameters  weights  gradients  optimizer  activations*  all*
 0  0-1 4-5  1/2 of embedding, blocks 0 to 1        106,752      0.4        1.2        0.8           3.4   5.8
 1  2-3 6-7  1/2 of blocks 2 to 3, output layer     106,816      0.4        1.2        0.8           1.9   4.4
weights to all: memory in MiB that a rank is expected to need; * estimated, with micro-batches of 1 sequence

Ranks with the same position along pp need equally much memory, so there is a row for each position.

Parameters, gradients and the optimizer's state are counted. Activations are estimated: for each position of a block
autograd keeps these multiples of the width D, where r is `mlp_ratio`:

    along the stream     x, norm(x) before attention and before the perceptron    each 1, rmsnorm one more
    inside attention     queries, keys, values                                    3
                         rotated queries and keys, a copy of the result           2 + 1
                         the result                                               1
    inside the mlp       before and after the activation function                 2 r

The inside is divided by tp, the stream by tp with sequence parallelism only, the positions by cp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...pipeline import Schedule, simulate
from ...utils.text import aligned, counted, in_ranges
from ..config import Config
from ..model import VOCABULARY_SIZE, GPTStage
from ..parallel_model import ModelMemory, ParallelModel
from ..rank_grid import RankGrid

_UNITS = ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)
_MOST_ROWS = 8
_FLOAT = 4
_MOST_RANGES = 4
_OFFLOADED = {"params": "parameters offloaded", "full": "parameters, gradients and optimizer state offloaded"}
_HEADER = ("what each has", "parameters", "weights", "gradients", "optimizer", "activations*", "all*")


@dataclass(frozen=True)
class RankMemory:
    """One rank's shard of the model, and the memory that the rank is expected to need.

    Attributes:
        position: The rank's position along pp.
        content: Its stages, or layers, in words.
        model: Memory for parameters, gradients and optimizer state.
        activations: Estimated bytes.
    """

    position: int
    content: str
    model: ModelMemory
    activations: int

    @property
    def nbytes(self) -> list[int]:
        """Bytes of parameters, gradients, optimizer state and activations."""
        return [self.model.parameters, self.model.gradients, self.model.optimizer, self.activations]


def rank_memory(config: Config, grid: RankGrid, schedule: Schedule | None, model: ParallelModel) -> RankMemory:
    """Return the memory that this rank is expected to need; local.

    Args:
        config: All settings.
        grid: The grid of ranks.
        schedule: The schedule of the rank's pipeline, if there is one.
        model: The rank's model.
    """
    peak = 1 if schedule is None else simulate(schedule).peak_activations[grid.position]
    activations = _bytes_of_activations(config, model.stages, peak, _sequences(config, grid, schedule))
    shard = "" if grid.tp == 1 else f"1/{grid.tp} of "
    layers = "all layers" if model.stages is None else "; ".join(stage.content for stage in model.stages)
    return RankMemory(grid.position, shard + layers, model.memory(), activations)


def memory_table(config: Config, grid: RankGrid, schedule: Schedule | None, ranks: Sequence[RankMemory]) -> str:
    """Return the table of the ranks' shards and memory; local.

    Args:
        config: All settings.
        grid: The grid of ranks.
        schedule: The schedule of a pipeline, if there is one.
        ranks: The memory of each rank.
    """
    largest = max(sum(rank.nbytes) for rank in ranks)
    unit, size = next((unit for unit in reversed(_UNITS) if unit[1] <= largest), _UNITS[0])
    rows = [_row(grid, position, ranks, size) for position in range(grid.pp)]
    if len(rows) > _MOST_ROWS:
        rows[_MOST_ROWS - 2 : -1] = [["..."] * len(rows[0])]
    batches = "" if schedule is None else "micro-batches of "
    note = (
        f"weights to all: memory in {unit} that a rank is expected to need; * estimated, with "
        f"{batches}{counted(_sequences(config, grid, schedule), 'sequence')}"
    )
    return "\n".join([_mesh(config, grid), *aligned([("pp", "ranks", *_HEADER), *rows], left=(1, 2)), note])


def _mesh(config: Config, grid: RankGrid) -> str:
    shape = " x ".join(f"{axis} {size}" for axis, size in grid.shape.items())
    ranks = counted(math.prod(grid.shape.values()), "rank")
    notes = [f"mesh: {shape} = {ranks}{_order(grid)}"]
    if config.run.fsdp != "none":
        notes.append(f"parameters sharded along dp ({config.run.fsdp})")
    if config.run.cpu_offload in _OFFLOADED:
        notes.append(_OFFLOADED[config.run.cpu_offload])
    if config.mesh.sequence_parallel and grid.tp > 1:
        notes.append("sequence parallel")
    return "; ".join(notes)


def _order(grid: RankGrid) -> str:
    """Return the numbering of the ranks, if there are several axes."""
    first, *others = [axis for axis, size in grid.shape.items() if size > 1] or ["dp"]
    number = first
    for count, axis in enumerate(others, 1):
        number = f"{number} x {grid.shape[axis]} + {axis}"
        number = f"({number})" if count < len(others) else number
    return f", rank = {number}" if others else ""


def _row(grid: RankGrid, position: int, ranks: Sequence[RankMemory], unit: int) -> list[str]:
    """Return the row of a position along pp; the shards of its ranks may differ a little, the largest counts."""
    largest = max((rank for rank in ranks if rank.position == position), key=lambda rank: sum(rank.nbytes))
    memory = [f"{size / unit:,.1f}" for size in [*largest.nbytes, sum(largest.nbytes)]]
    numbers = in_ranges(grid.ranks_at(position), most=_MOST_RANGES)
    return [str(position), numbers, largest.content, f"{largest.model.numel:,}", *memory]


def _sequences(config: Config, grid: RankGrid, schedule: Schedule | None) -> int:
    """Return the number of sequences that a rank processes at once."""
    count = config.run.global_batch // grid.dp // config.run.accumulation
    return count if schedule is None else -(-count // schedule.num_microbatches)


# ---- activations ------------------------------------------------------------------------------------------------


def bytes_of_position(config: Config) -> tuple[float, float]:
    """Return the bytes that autograd keeps on a rank for one position: of a block, and of norm, output and loss."""
    model, tp = config.model, config.mesh.tp
    computed = 2 if config.run.dtype == "bfloat16" else _FLOAT
    kept_by_norm = (2 if model.norm == "rmsnorm" else 1) * _FLOAT  # its input; for rmsnorm also input / rms
    stream_shards = tp if config.mesh.sequence_parallel else 1
    inside = 3 + 1 + 2 * model.mlp_ratio + (3 if model.positions == "rotary" else 0)
    stream = 2 * (kept_by_norm + computed) / stream_shards
    block = model.width * (stream + inside * computed / tp) + _FLOAT * model.heads / tp
    output = model.width * (kept_by_norm / stream_shards + computed) + VOCABULARY_SIZE * _FLOAT / tp
    return block, output


def _bytes_of_activations(config: Config, stages: Sequence[GPTStage] | None, peak: int, sequences: int) -> int:
    """Estimate the largest memory of a rank's activations; local.

    Args:
        config: All settings.
        stages: The rank's stages; None means the whole model.
        peak: The largest number of micro-batches under way, counted for each stage.
        sequences: Sequences of a micro-batch.
    """
    blocks = config.model.layers if stages is None else sum(len(stage.blocks) for stage in stages)
    outputs = 1 if stages is None else sum(stage.head is not None for stage in stages)
    block, output = bytes_of_position(config)
    of_stage = (blocks * block + outputs * output) / (1 if stages is None else len(stages))
    return round(peak * sequences * config.model.sequence_length / config.mesh.cp * of_stage)
