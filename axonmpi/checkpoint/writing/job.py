"""Writing a checkpoint: all ranks together, and it is whole or not there.

rank 0      makes the folder and the files, in their sizes
all         write what they have, bring it to the disk, and tell what went wrong
rank 0      writes the checksums and the small files, and renames the folder
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ...errors import CheckpointError
from ...launch.settings import writes_by_mpi
from ...utils.text import text_of_problems
from ..files.checksums import BlockSums, combined
from ..files.folders import finish, locked, partial_of, prepare
from ..files.state_file import CHECKSUMS_FILE, STATE_FILE, sealed
from ..files.tensor_file import TensorFile, TensorSpec, lay_out
from ..ranks import CheckpointRanks
from .local_plan import LocalPlan
from .output import Output, Trouble
from .short_runs import write_short_runs

T = TypeVar("T")


class Job(NamedTuple):
    """A checkpoint to write.

    Attributes:
        path: Of its folder, the same on all ranks.
        files: Its files of tensors, the same on all ranks.
        share: What this rank writes.
        nbytes: Bytes of it.
        texts: The content of its small files by name; on rank 0.
    """

    path: Path
    files: Sequence[TensorFile]
    share: LocalPlan
    nbytes: int
    texts: Mapping[str, bytes]


def write_checkpoint(job: Job, ranks: CheckpointRanks, copy: Callable[[], None] = lambda: None) -> None:
    """Write a checkpoint; collective.

    Args:
        job: What to write.
        ranks: Who writes.
        copy: Called first: makes what this rank writes.

    Raises:
        CheckpointError: It cannot be written; on all ranks, and what `path` was is still there.
    """
    trouble = Trouble()
    is_first = ranks.all.rank == 0
    with trouble.noting(job.path):
        copy()
    with ExitStack() as stack:
        opened = 0
        if is_first:
            with trouble.noting(job.path):
                lock = stack.enter_context(locked(job.path))
                opened = prepare(job.path, job.files, lock)
                stack.callback(os.close, opened)
        _check_complete(job, _check(job, ranks, trouble, (_digest(job.files), job.nbytes)), trouble)
        shares = _write(job, ranks, trouble)
        told = _check(job, ranks, trouble, shares)
        if is_first:
            sums = {
                file.name: combined(file.size, list(of_ranks))
                for file, of_ranks in zip(job.files, zip(*told, strict=True), strict=True)
            }
            with trouble.noting(job.path):
                finish(job.path, opened, _small_files(job.texts, sums))
            stack.close()  # before the others go on: then nothing is there but the checkpoint
        _check(job, ranks, trouble, None)


def _digest(files: Sequence[TensorFile]) -> str:
    return hashlib.sha256(b"".join(file.header for file in files)).hexdigest()


def _check_complete(job: Job, told: Sequence[tuple[str, int]], trouble: Trouble) -> None:
    """Note, on all ranks alike, if headers differ, or if ranks have more or less of the tensors than there is."""
    expected = sum(entry.spec.nbytes for file in job.files for entry in file.entries.values())
    found = sum(nbytes for _, nbytes in told)
    if len({digest for digest, _ in told}) > 1:
        trouble.text = "the ranks have made different headers for its files"
    elif found != expected:
        trouble.text = (
            f"the ranks have {found} bytes of tensors of {expected} bytes: shards are missing or overlap; give the "
            "group of all ranks that have shards of the model, and equal shards only to ranks with the same model"
        )


def _write(job: Job, ranks: CheckpointRanks, trouble: Trouble) -> list[npt.NDArray[np.uint32]]:
    """Write this rank's share, and return its share of the checksums of each file; collective."""
    backend = ranks.all.backend
    output = Output(partial_of(job.path), job.files, backend, ranks.nodes, trouble, with_mpi=writes_by_mpi())
    if backend.rank == 0:
        for number, file in enumerate(job.files):
            output.sums[number].add(0, memoryview(file.header))
    with output.noting():
        for file_slice in job.share.slices:
            output.write_slice(file_slice)
    write_short_runs(job.share.short_runs, output, ranks)
    output.exchange_edges()
    output.sync()
    output.close()
    return [sums.shares() for sums in output.sums]


def _check(job: Job, ranks: CheckpointRanks, trouble: Trouble, own: T) -> list[T]:
    """Return what all ranks have, or raise on all if one of them is in trouble; collective."""
    told = ranks.all.all_gather_object((trouble.text, own))
    if text := text_of_problems([problem for problem, _ in told]):
        raise CheckpointError(f"{job.path}: the checkpoint was not written: {text}")
    return [value for _, value in told]


def _small_files(texts: Mapping[str, bytes], sums: Mapping[str, npt.NDArray[np.uint32]]) -> dict[str, bytes]:
    """Return the content of the small files by name, with the checksums of all files."""
    sums = {**sums, **{name: _sums_of(text) for name, text in texts.items() if name != STATE_FILE}}
    checksums = _checksums(sums)
    return {**texts, CHECKSUMS_FILE: checksums, STATE_FILE: sealed(texts[STATE_FILE], checksums)}


def _sums_of(text: bytes) -> npt.NDArray[np.uint32]:
    sums = BlockSums(len(text))
    sums.add(0, memoryview(text))
    return combined(len(text), [sums.shares()])


def _checksums(sums: Mapping[str, npt.NDArray[np.uint32]]) -> bytes:
    """Return a file of tensors of the blocks' checksums, one for each file."""
    specs = [TensorSpec(name, torch.uint32, values.shape) for name, values in sums.items()]
    (file,) = lay_out(CHECKSUMS_FILE.removesuffix(".safetensors"), specs, {}, 1 << 62)
    return file.header + b"".join(sums[name].astype("<u4").tobytes() for name in file.entries)
