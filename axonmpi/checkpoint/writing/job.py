"""The steps of a save on all ranks, in order: sizes, bytes, `fsync`, checksums, rename.

rank 0      makes the folder, and the files in their sizes
all         write their bytes, bring them to the disk, and exchange errors and checksums
rank 0      writes the checksums and the small files, and renames the folder
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from ...errors import CheckpointError
from ..files.checksums import Checksums, checksums_of, combined
from ..files.folders import finish, locked, partial_of, prepare
from ..files.state_file import CHECKSUMS_FILE, STATE_FILE, sealed
from ..files.tensor_file import TensorFile, TensorSpec, lay_out
from ..rank_errors import RankErrors
from ..ranks import CheckpointRanks
from .local_plan import LocalPlan
from .output import Output
from .short_runs import write_short_runs


class Job(NamedTuple):
    """A checkpoint to write.

    Attributes:
        path: Of its folder, the same on all ranks.
        files: Its files of tensors, the same on all ranks.
        plan: The bytes that this rank writes.
        nbytes: Their number.
        texts: Content of the small files by name; on rank 0.
    """

    path: Path
    files: Sequence[TensorFile]
    plan: LocalPlan
    nbytes: int
    texts: Mapping[str, bytes]


def write_checkpoint(job: Job, ranks: CheckpointRanks, copy: Callable[[], None] = lambda: None) -> None:
    """Write a checkpoint; collective.

    Args:
        job: The checkpoint.
        ranks: All ranks that write.
        copy: Called first: copies the values that this rank writes.

    Raises:
        CheckpointError: It cannot be written; on all ranks. An earlier checkpoint at `path` is still there.
    """
    errors = RankErrors(job.path)
    prefix = f"{job.path}: the checkpoint was not written: "
    is_first = ranks.all.rank == 0
    with errors.recorded():
        copy()
    with ExitStack() as stack:
        opened = 0
        if is_first:
            with errors.recorded():
                lock = stack.enter_context(locked(job.path))
                opened = prepare(job.path, job.files, lock)
                stack.callback(os.close, opened)
        headers = hashlib.sha256(b"".join(file.header for file in job.files)).hexdigest()
        answers = errors.raise_on_all(ranks.all, (headers, job.nbytes), prefix)
        if problem := _incomplete(job, answers):
            raise CheckpointError(prefix + problem)
        terms = errors.raise_on_all(ranks.all, _write(job, ranks, errors), prefix)
        if is_first:
            checksums = {
                file.name: combined(file.size, of_ranks)
                for file, of_ranks in zip(job.files, zip(*terms, strict=True), strict=True)
            }
            with errors.recorded():
                finish(job.path, opened, _with_checksums(job.texts, checksums))
            stack.close()  # before the other ranks go on, which may then look into the folder
        errors.raise_on_all(ranks.all, None, prefix)


def _incomplete(job: Job, answers: Sequence[tuple[str, int]]) -> str:
    """Return an error if headers differ or bytes are missing or written twice; else an empty text."""
    expected = sum(entry.spec.nbytes for file in job.files for entry in file.entries.values())
    found = sum(nbytes for _, nbytes in answers)
    if len({headers for headers, _ in answers}) > 1:
        return "the ranks have made different headers for its files"
    if found == expected:
        return ""
    return (
        f"the ranks have {found} bytes of tensors of {expected} bytes: shards are missing or overlap; give the "
        "group of all ranks that have shards of the model, and equal shards only to ranks with the same model"
    )


def _write(job: Job, ranks: CheckpointRanks, errors: RankErrors) -> list[Checksums]:
    """Write this rank's bytes, and return its terms of the checksums of each file; collective."""
    output = Output(partial_of(job.path), job.files, ranks.all.backend, ranks.nodes, errors)
    if ranks.all.rank == 0:
        for sums, file in zip(output.sums, job.files, strict=True):
            sums.add(0, memoryview(file.header))
    with errors.recorded():
        for file_slice in job.plan.slices:
            output.write_slice(file_slice)
    write_short_runs(job.plan.short_runs, output, ranks)
    output.exchange_edges()
    output.sync()
    output.close()
    return [sums.terms() for sums in output.sums]


def _with_checksums(texts: Mapping[str, bytes], checksums: Mapping[str, Checksums]) -> dict[str, bytes]:
    """Return the content of the small files by name, with `checksums.safetensors` and a sealed `state.json`."""
    of_texts = {name: checksums_of(text) for name, text in texts.items() if name != STATE_FILE}
    of_all = {**checksums, **of_texts}
    specs = [TensorSpec(name, torch.uint32, values.shape) for name, values in of_all.items()]
    (file,) = lay_out(CHECKSUMS_FILE.removesuffix(".safetensors"), specs, {}, 1 << 62)
    content = file.header + b"".join(of_all[name].astype("<u4").tobytes() for name in file.entries)
    return {**texts, CHECKSUMS_FILE: content, STATE_FILE: sealed(texts[STATE_FILE], content)}
