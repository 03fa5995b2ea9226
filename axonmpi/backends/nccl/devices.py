"""The GPU of a rank: the visible GPU whose index is the local rank, if no other rank uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import NcclError
from ...launch.topology import Topology
from ...launch.user_variables import gpu_variables, shares_gpus
from ...utils.device import gpu_count, gpu_identity
from ...utils.text import counted, lines_of_ranks, ranks_by_text
from . import library

_SHARING_SINCE = (2, 30, 0)
"""The first NCCL in which two ranks of a communicator may use one GPU."""


@dataclass(frozen=True)
class ChosenDevice:
    """A rank's GPU.

    Attributes:
        index: Its number among those visible to this process.
        identity: Which one it is, whatever processes see.
        library_version: NCCL's, on this rank.
    """

    index: int
    identity: str
    library_version: tuple[int, int, int]


def may_share() -> bool:
    """Return True if the user and NCCL's version allow several ranks on one GPU; local."""
    return shares_gpus() and library.nccl_version() >= _SHARING_SINCE


def choose_device(topology: Topology) -> ChosenDevice:
    """Return the GPU of this rank; local.

    A process that sees one GPU, as under Slurm with a GPU for each task, uses that; else each uses the GPU whose
    index is its local rank.

    Raises:
        NcclError: There is no CUDA, no NCCL, or fewer GPUs than ranks on this node.
    """
    count = gpu_count()
    if not count:
        built = (
            f"torch {torch.version.__version__} is built without CUDA" if torch.version.cuda is None else _visible()
        )
        raise NcclError(
            f"no GPU: {built}\nInstall a torch with CUDA, ask for GPUs (srun --gpus-per-node), or use "
            "init_process_group('mpi') on the CPU"
        )
    version = library.nccl_version()
    number = topology.local_rank
    if number >= count and count > 1 and not may_share():
        raise NcclError(
            f"{topology.local_size} ranks on this node, rank {number} of them has no GPU: {_visible()}\n"
            "Start one rank a GPU: srun --ntasks-per-node, mpirun --map-by ppr:N:node"
        )
    index = number % count
    try:
        identity = gpu_identity(index)
    except RuntimeError as error:  # torch's, if CUDA does not start
        raise NcclError(f"GPU {index} cannot be used: {error}; look at nvidia-smi, and at its driver") from error
    return ChosenDevice(index, identity, version)


def _visible() -> str:
    variables = gpu_variables()
    return f"this process sees {counted(gpu_count(), 'GPU')}" + (f", with {variables}" if variables else "")


def check_choices(chosen: Sequence[ChosenDevice]) -> None:
    """Raise if two ranks have one GPU, unless they may, or ranks have different versions of NCCL; local.

    Args:
        chosen: Of each rank, in rank order: the same on all ranks, which all raise then.

    Raises:
        NcclError: Names the ranks.
    """
    versions = _ranks_by([f"has NCCL {'.'.join(map(str, each.library_version))}" for each in chosen])
    if len(versions) > 1:
        raise NcclError(
            f"ranks have different versions of NCCL:\n  {lines_of_ranks(versions)}\n"
            "Install one version everywhere; look for others on LD_LIBRARY_PATH"
        )
    shared = [entry for entry in _ranks_by([f"use GPU {each.identity}" for each in chosen]) if len(entry[1]) > 1]
    if shared and not may_share():
        raise NcclError(
            f"several ranks use one GPU:\n  {lines_of_ranks(shared)}\nStart one rank a GPU, or let each process "
            "see its own (CUDA_VISIBLE_DEVICES); NCCL 2.30 shares with NCCL_MULTI_RANK_GPU_ENABLE=1"
        )


def _ranks_by(texts: Sequence[str]) -> list[tuple[str, list[int]]]:
    return list(ranks_by_text(dict(enumerate(texts))).items())
