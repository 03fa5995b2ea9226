"""Lightning's cluster environment and strategy for ranks that MPI has started, on the CPU.

    from axonmpi.interop.lightning import MpiEnvironment, ddp_strategy

    Trainer(accelerator="cpu", strategy=ddp_strategy(), devices=ranks_of_a_node, num_nodes=nodes)

Lightning's other strategies take the same two arguments: `MpiEnvironment()` as `cluster_environment`, for each
rank's number and node, and "axonmpi" as `process_group_backend`.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy

from ..launch.start import start_world
from .autoload import NAME, register
from .environment import launch_env


class MpiEnvironment(ClusterEnvironment):
    """Lightning's view of the ranks, from MPI; made collectively over all ranks of the job.

    Raises:
        LaunchError: The processes were not started as one MPI job.
    """

    def __init__(self) -> None:
        super().__init__()
        register()
        self._variables = launch_env()
        self._topology = start_world().topology

    @staticmethod
    def detect() -> bool:
        """Return False: Lightning uses this environment only when it is passed."""
        return False

    @property
    def creates_processes_externally(self) -> bool:
        """Whether a launcher starts the processes, mpirun or srun."""
        return True

    @property
    def main_address(self) -> str:
        """Name of rank 0's node."""
        return self._variables["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """A port of rank 0's node."""
        return int(self._variables["MASTER_PORT"])

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._topology.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the number is MPI's."""

    def global_rank(self) -> int:
        """Return this rank's number."""
        return self._topology.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the number is MPI's."""

    def local_rank(self) -> int:
        """Return this rank's number on its node."""
        return self._topology.local_rank

    def node_rank(self) -> int:
        """Return this node's number."""
        return self._topology.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the trainer's `devices` and `num_nodes` against MPI's.

        Raises:
            ValueError: They differ from MPI's.
        """
        expected = (self._topology.local_size, self._topology.num_nodes)
        if (num_devices, num_nodes) != expected:
            raise ValueError(
                f"Trainer: expected devices={expected[0]}, num_nodes={expected[1]}, as MPI has started them, "
                f"got devices={num_devices}, num_nodes={num_nodes}"
            )


def ddp_strategy(**options: Any) -> DDPStrategy:
    """Return Lightning's DistributedDataParallel over MPI; collective over all ranks of the job.

    Args:
        **options: Further arguments of `lightning.pytorch.strategies.DDPStrategy`.
    """
    return DDPStrategy(cluster_environment=MpiEnvironment(), process_group_backend=NAME, **options)
