"""The grid of the ranks along the axes dp, pp, cp and tp, computed and checked before anything is sent.

    rank = (replica * pp + position) * tp + shard          8 ranks, dp = pp = tp = 2

                 position 0        position 1
                 shard 0  shard 1  shard 0  shard 1
    replica 0    rank 0   rank 1   rank 2   rank 3         tp: neighbours shard every layer, as they talk most
    replica 1    rank 4   rank 5   rank 6   rank 7         pp: ranks 0 and 2 are a pipeline, 1 and 3 another
                 a column averages its gradients           dp

With cp there is neither pp nor tp: neighbours have blocks of the same sequences, and rank = replica * cp + block.

It is the shape of a `DeviceMesh` with these axes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..mesh import nearest_shapes
from ..pipeline import PipelineSchedule, Schedule, make_schedule
from .config import Config

_MICRO_BATCHES_PER_RANK = 4
_SUGGESTIONS = 6


@dataclass(frozen=True)
class RankGrid:
    """The sizes of the axes, and the position of this rank.

    Attributes:
        dp: Number of replicas of the model.
        pp: Number of ranks that a replica's stages are on.
        cp: Number of ranks that a replica's sequences are cut over.
        tp: Number of ranks that a stage's layers are sharded on.
        rank: This rank.
    """

    dp: int
    pp: int
    cp: int
    tp: int
    rank: int

    @classmethod
    def of(cls, config: Config, ranks: int, rank: int) -> RankGrid:
        """Return the grid of `ranks` ranks for these settings; local.

        Raises:
            ValueError: dp x cp x tp x pp is not the number of ranks.
        """
        pp, cp, tp = config.pipeline.pp, config.mesh.cp, config.mesh.tp
        dp = config.mesh.dp or max(ranks // (pp * cp * tp), 1)
        if dp * pp * cp * tp != ranks:
            raise ValueError(_wrong_product(config, ranks))
        return cls(dp, pp, cp, tp, rank)

    @property
    def shape(self) -> dict[str, int]:
        """The shape of the mesh."""
        return {"dp": self.dp, "pp": self.pp, "cp": self.cp, "tp": self.tp}

    @property
    def replica(self) -> int:
        """Number of this rank's replica, which decides its slice of the batch."""
        return self.rank // (self.pp * self.cp * self.tp)

    @property
    def position(self) -> int:
        """Position of this rank in its pipeline, which decides its stages of the model."""
        return self.rank // (self.cp * self.tp) % self.pp

    def ranks_at(self, position: int) -> list[int]:
        """Return the ranks of all replicas at a position of the pipeline."""
        shards = self.cp * self.tp
        return [rank for rank in range(self.dp * self.pp * shards) if rank // shards % self.pp == position]


def plan_schedule(config: Config, grid: RankGrid) -> Schedule:
    """Return the schedule of a step for the ranks of a pipeline; local.

    Raises:
        ValueError: There are more micro-batches than sequences.
    """
    run, wanted = config.run, config.pipeline
    sequences = run.global_batch // grid.dp // run.accumulation
    if wanted.micro_batches > sequences:
        raise ValueError(
            f"micro_batches: expected at most global_batch / dp / accumulation = {run.global_batch} / "
            f"{grid.dp} / {run.accumulation} = {sequences}, the sequences of a pipeline at a time, got "
            f"{wanted.micro_batches}: take fewer, or a larger global_batch"
        )
    count = wanted.micro_batches or min(_MICRO_BATCHES_PER_RANK * grid.pp, sequences)
    chunks = wanted.stages_per_rank(config.model.layers)
    return make_schedule(PipelineSchedule(wanted.schedule), grid.pp, count, chunks)


def check_nodes(grid: RankGrid, nodes: Sequence[int]) -> None:
    """Raise unless groups along dp and cp have equally many ranks on each node, for hybrid sharding; local.

    Args:
        grid: The grid, of any of the ranks.
        nodes: The node of each rank.

    Raises:
        ValueError: One node has more ranks of a group than another node.
    """
    stride = grid.pp * grid.tp
    for first in range(stride):
        group = range(first, grid.dp * grid.cp * stride, stride)
        sizes = Counter(nodes[rank] for rank in group)
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"fsdp: hybrid needs as many replicas on each node, got {list(sizes.values())} for ranks "
                f"{', '.join(map(str, group))}: start the job with as many ranks on each node, or take full"
            )


# ---- wrong numbers ----------------------------------------------------------------------------------------------


def _wrong_product(config: Config, ranks: int) -> str:
    axes = {"dp": config.mesh.dp, "tp": config.mesh.tp, "pp": config.pipeline.pp}
    if config.mesh.cp > 1:
        axes = {"dp": config.mesh.dp, "cp": config.mesh.cp}
    sizes = {axis: size for axis, size in axes.items() if size}
    product = math.prod(sizes.values())
    equation = f"{' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))} = {product}"
    wrong = f"but there {'is 1 rank' if ranks == 1 else f'are {ranks} ranks'}"
    if not axes["dp"] and ranks > product:
        wrong = f"which does not divide the {ranks} ranks"
    other = f"start {product} ranks" if axes["dp"] else f"start a multiple of {product} ranks"
    if ranks == 1:
        other += f", as mpirun -n {product} does"
    shapes = nearest_shapes({axis: size or -1 for axis, size in axes.items()}, ranks, None)
    fitting = [" x ".join(map(str, shape.values())) for shape in shapes if _fits(config, shape)]
    example = f"take for example {' x '.join(axes)} = {' or '.join(fitting[:_SUGGESTIONS])}, or " if fitting else ""
    return f"{equation}, {wrong}: {example}{other}"


def _fits(config: Config, shape: dict[str, int]) -> bool:
    """Return True if the settings fit another shape of the mesh."""
    try:
        config.replace(**shape)
    except ValueError:
        return False
    batches = shape["dp"] * config.run.accumulation
    sequences, rest = divmod(config.run.global_batch, batches)
    return not rest and config.pipeline.micro_batches <= sequences
