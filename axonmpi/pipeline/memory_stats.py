"""How many activations a pipeline holds (without torch)."""

from __future__ import annotations

from .schedule.schedules import PipelineSchedule, make_schedule
from .schedule.simulator import simulate

__all__ = ["PipelineMemoryStats"]


class PipelineMemoryStats:
    """The most activations that any rank holds, in micro-batches of one stage; found by simulation."""

    @staticmethod
    def gpipe_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Return the peak of GPipe with one stage on each rank: that is num_microbatches.

        Raises:
            ValueError: A number is below 1.
        """
        return _peak(PipelineSchedule.GPIPE, num_stages, num_microbatches)

    @staticmethod
    def one_f_one_b_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Return the peak of 1F1B with one stage on each rank: that is min(num_stages, num_microbatches).

        Raises:
            ValueError: A number is below 1.
        """
        return _peak(PipelineSchedule.ONE_F_ONE_B, num_stages, num_microbatches)


def _peak(kind: PipelineSchedule, num_stages: int, num_microbatches: int) -> int:
    return max(simulate(make_schedule(kind, num_stages, num_microbatches)).peak_activations)
