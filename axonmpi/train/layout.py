"""Which ranks have the model together, and which have the same part of it.

    rank = replica * pp + position           8 ranks, pp = 2

                 position 0   position 1
    replica 0    rank 0       rank 1         a pipeline: neighbours, as they talk most
    replica 1    rank 2       rank 3
    replica 2    rank 4       rank 5
    replica 3    rank 6       rank 7
                 a column averages its gradients: data parallelism

Without a pipeline pp is 1: every rank is a replica.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline import PipelineSchedule, Schedule, make_schedule
from .config import Config

__all__ = ["Layout", "plan_schedule"]

_MICRO_BATCHES_PER_RANK = 4


@dataclass(frozen=True)
class Layout:
    """Where a rank stands among all.

    Attributes:
        pp: Ranks of a pipeline.
        replicas: How often the model is there.
        rank: The rank.

    Raises:
        ValueError: From `Layout.of`: the ranks cannot be divided into pipelines.
    """

    pp: int
    replicas: int
    rank: int

    @classmethod
    def of(cls, pp: int, ranks: int, rank: int) -> Layout:
        """Lay out `ranks` ranks in pipelines of `pp`."""
        if ranks % pp:
            valid = " or ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
            raise ValueError(
                f"pp: expected {valid}, which divide the {ranks} ranks, got {pp}; or start a multiple of {pp} ranks"
            )
        return cls(pp, ranks // pp, rank)

    @property
    def replica(self) -> int:
        """Which replica this rank is of: decides the part of the batch that it computes."""
        return self.rank // self.pp

    @property
    def position(self) -> int:
        """Where this rank is in its pipeline: decides the part of the model that it has."""
        return self.rank % self.pp

    def pipeline(self, replica: int) -> range:
        """Return the ranks of a replica."""
        return range(replica * self.pp, (replica + 1) * self.pp)

    def column(self, position: int) -> range:
        """Return the ranks that have the same part of the model."""
        return range(position, self.replicas * self.pp, self.pp)


def plan_schedule(config: Config, layout: Layout) -> Schedule:
    """Return what the ranks of a pipeline do in a step; local.

    Raises:
        ValueError: There are more micro-batches than sequences.
    """
    run, wanted = config.run, config.pipeline
    sequences = run.global_batch // layout.replicas // run.accumulation
    if wanted.micro_batches > sequences:
        raise ValueError(
            f"micro_batches: expected at most global_batch / pipelines / accumulation = {run.global_batch} / "
            f"{layout.replicas} / {run.accumulation} = {sequences}, the sequences of a pipeline at a time, got "
            f"{wanted.micro_batches}: take fewer, or a larger global_batch"
        )
    count = wanted.micro_batches or min(_MICRO_BATCHES_PER_RANK * layout.pp, sequences)
    chunks = wanted.stages_per_rank(config.model.layers)
    return make_schedule(PipelineSchedule(wanted.schedule), layout.pp, count, chunks)
