"""The number of activations that a pipeline holds (without torch)."""

from __future__ import annotations

from .schedule.schedules import make_schedule
from .schedule.simulator import simulate


class PipelineMemoryStats:
    """The peak number of activations on any rank, in micro-batches of one stage, by simulation."""

    @staticmethod
    def gpipe_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Return the peak of GPipe with one stage on each rank: num_microbatches.

        Raises:
            ValueError: A number is below 1.
        """
        return max(simulate(make_schedule("gpipe", num_stages, num_microbatches)).peak_activations)

    @staticmethod
    def one_f_one_b_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Return the peak of 1F1B with one stage on each rank: min(num_stages, num_microbatches).

        Raises:
            ValueError: A number is below 1.
        """
        return max(simulate(make_schedule("1f1b", num_stages, num_microbatches)).peak_activations)
