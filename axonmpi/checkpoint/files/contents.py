"""What is in a checkpoint but the values of its tensors: small files and headers, which one rank reads for all.

A folder without `state.json`, or a single file, is another tool's: it has weights, and nothing else is known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError
from .checksums import BLOCK_BYTES, block_count, crc32
from .folders import find_checkpoint, partial_of
from .integrity import check_file, read_checksums
from .state_file import CHECKSUMS_FILE, read_state
from .tensor_file import TensorFile, TensorSpec, read_header, read_headers

KINDS = ("model", "optimizer", "random")
"""What a checkpoint has files of tensors of."""


@dataclass(frozen=True)
class Contents:
    """What is in a checkpoint.

    Attributes:
        folder: Where its files are.
        files: The files of each kind; none of a kind that it does not have.
        checksums: Of the blocks of each file, uint32 [blocks]; empty for files of other tools.
        state: What `state.json` has; empty for files of other tools.
    """

    folder: Path
    files: Mapping[str, Sequence[TensorFile]]
    checksums: Mapping[str, npt.NDArray[np.uint32]] = field(default_factory=dict, repr=False)
    state: Mapping[str, Any] = field(default_factory=dict)

    def specs(self, kind: str) -> dict[str, TensorSpec]:
        """Return the tensors of a kind by name, in their order in the files."""
        return {name: entry.spec for file in self.files[kind] for name, entry in file.entries.items()}


def read_contents(path: Path, kinds: Collection[str] = KINDS) -> Contents:
    """Read what is in a checkpoint, in a folder of `transformers`, or in a single `.safetensors` file; local.

    Of a checkpoint all files have to be there in their sizes. All but the values of tensors is read and checked.

    Args:
        path: The folder or file. A checkpoint is found also if a job was killed while it replaced it.
        kinds: The files of tensors whose headers are read.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    if path.is_file():
        return Contents(path.parent, {kind: [read_header(path)] if kind == "model" else [] for kind in KINDS})
    folder = find_checkpoint(path)
    if not folder.is_dir():
        partial = partial_of(path)
        unfinished = (
            f", but {partial.name}, which a job that was killed has not finished" if partial.exists() else ""
        )
        raise CheckpointError(f"{path}: expected a checkpoint or a .safetensors file there, found none{unfinished}")
    state = read_state(folder)
    if not state:
        return Contents(folder, {kind: read_headers(folder, kind) if kind == "model" else [] for kind in KINDS})
    checksums = read_checksums(folder, state)
    for name, sums in checksums.items():
        check_file(folder / name, sums)
    files = {kind: _files_in(folder, kind, checksums) if kind in kinds else [] for kind in KINDS}
    for file in (file for of_kind in files.values() for file in of_kind):
        _check_header(folder / file.name, file, checksums[file.name])
    return Contents(folder, files, checksums, state)


def _files_in(folder: Path, kind: str, names: Collection[str]) -> list[TensorFile]:
    own = {name for name in names if name.startswith((f"{kind}.", f"{kind}-")) and name.endswith(".safetensors")}
    if kind != "model" and not own:
        return []
    files = read_headers(folder, kind)
    if strange := sorted(own ^ {file.name for file in files}):
        raise CheckpointError(
            f"{folder / strange[0]}: {CHECKSUMS_FILE} and the other files of the checkpoint do not agree on it"
        )
    return files


def _check_header(path: Path, file: TensorFile, checksums: npt.NDArray[np.uint32]) -> None:
    end = min((entry.start for entry in file.entries.values()), default=file.size)
    with path.open("rb") as opened:
        for block, checksum in enumerate(checksums[: block_count(end)]):
            if crc32(opened.read(BLOCK_BYTES)) != checksum:
                names = [*map(repr, (entry.spec.name for entry in file.touching(0, (block + 1) * BLOCK_BYTES)))]
                raise CheckpointError(
                    f"{path}: its bytes {block * BLOCK_BYTES} to {(block + 1) * BLOCK_BYTES}, with its header"
                    f"{' and ' + names[0] if names else ''}, are not those that were written: the file is damaged"
                )
