"""The contents of a checkpoint without the values of its tensors; one rank reads them for all.

A folder without `state.json`, or a single file, was written by another tool: it has weights and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError
from .checksums import BLOCK_BYTES, Checksums, block_count, checksums_of
from .folders import find_checkpoint, partial_of
from .integrity import check_file, read_checksums
from .state_file import CHECKSUMS_FILE, read_state
from .tensor_file import TensorFile, TensorSpec, read_header, read_headers

KINDS = ("model", "optimizer", "random")
"""The kinds of files with tensors."""


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        folder: The folder of its files.
        files: The files of each kind; an empty list for a kind that it does not have.
        checksums: By file name; empty for files of other tools.
        state: Content of `state.json`; empty for files of other tools.
    """

    folder: Path
    files: Mapping[str, Sequence[TensorFile]]
    checksums: Mapping[str, Checksums] = field(default_factory=dict, repr=False)
    state: Mapping[str, Any] = field(default_factory=dict)

    def specs(self, kind: str) -> dict[str, TensorSpec]:
        """Return the tensors of a kind by name, in their order in the files."""
        return {name: entry.spec for file in self.files[kind] for name, entry in file.entries.items()}

    def of_model(self, key: str) -> Mapping[str, Any]:
        """Return a value that `state.json` has of the model, such as its aliases; empty for other tools."""
        values: Mapping[str, Any] = self.state.get("model", {}).get(key, {})
        return values


def read_contents(path: Path, kinds: Collection[str] = KINDS) -> Contents:
    """Read the contents of a checkpoint, a folder of `transformers`, or a single `.safetensors` file; local.

    All files of a checkpoint have to be there in their sizes. Everything but the values of tensors is checked.

    Args:
        path: The folder or file. A checkpoint is found also if a job was killed while it replaced it.
        kinds: The kinds of files whose headers are read.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    if path.is_file():
        return Contents(path.parent, {**dict.fromkeys(KINDS, ()), "model": [read_header(path)]})
    folder = find_checkpoint(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"{path}: expected a checkpoint or a .safetensors file there, found none{_killed(path)}"
        )
    state = read_state(folder)
    if not state:
        return Contents(folder, {**dict.fromkeys(KINDS, ()), "model": read_headers(folder, "model")})
    checksums = read_checksums(folder, state)
    for name, sums in checksums.items():
        check_file(folder / name, sums)
    files = {kind: _files_of_kind(folder, kind, checksums) if kind in kinds else [] for kind in KINDS}
    for of_kind in files.values():
        for file in of_kind:
            _check_header(folder / file.name, file, checksums[file.name])
    return Contents(folder, files, checksums, state)


def _killed(path: Path) -> str:
    partial = partial_of(path)
    return f", but {partial.name}, which a job that was killed has not finished" if partial.exists() else ""


def _files_of_kind(folder: Path, kind: str, names: Collection[str]) -> list[TensorFile]:
    own = {name for name in names if name.startswith((f"{kind}.", f"{kind}-")) and name.endswith(".safetensors")}
    if kind != "model" and not own:
        return []
    files = read_headers(folder, kind)
    if strange := sorted(own ^ {file.name for file in files}):
        raise CheckpointError(
            f"{folder / strange[0]}: {CHECKSUMS_FILE} and the other files of the checkpoint do not agree on it"
        )
    return files


def _check_header(path: Path, file: TensorFile, checksums: Checksums) -> None:
    """Raise if a block of the header has another checksum than when it was written."""
    header_end = min((entry.start for entry in file.entries.values()), default=file.size)
    with path.open("rb") as opened:
        found = checksums_of(opened.read(block_count(header_end) * BLOCK_BYTES))
    damaged = np.flatnonzero(found != checksums[: len(found)])
    if len(damaged):
        start = int(damaged[0]) * BLOCK_BYTES
        stop = start + BLOCK_BYTES
        first = next(file.touching(0, stop), None)
        named = f" and {first.spec.name!r}" if first else ""
        raise CheckpointError(
            f"{path}: its bytes {start} to {stop}, with its header{named}, are not those that were written: the "
            "file is damaged"
        )
