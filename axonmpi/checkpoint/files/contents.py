"""What is in a checkpoint but the values of its tensors: small files and headers, which one rank reads for all.

A folder without `state.json`, or a single file, is another tool's: it has weights, and nothing else is known.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError
from .checksums import BLOCK_BYTES, block_count, crc32
from .folders import STATE_FILE, find_checkpoint, partial_of
from .tensor_file import TensorFile, TensorSpec, read_header, read_headers

__all__ = ["FORMAT", "KINDS", "VERSION", "Contents", "read_contents", "read_state"]

FORMAT, VERSION = "axonmpi checkpoint", 1
KINDS = ("model", "optimizer", "random")
"""What a checkpoint has files of tensors of."""
_CHECKSUMS = "checksums.safetensors"


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
    chosen = [kind for kind in kinds if state or kind == "model"]
    files = {kind: _files_in(folder, kind) if kind in chosen else [] for kind in KINDS}
    checksums = _checksums_in(folder, [file for of_kind in files.values() for file in of_kind]) if state else {}
    return Contents(folder, files, checksums, state)


def _files_in(folder: Path, kind: str) -> list[TensorFile]:
    names = (f"{kind}.safetensors", f"{kind}.safetensors.index.json")
    if kind != "model" and not any((folder / name).exists() for name in names):
        return []
    return read_headers(folder, kind)


def read_state(folder: Path) -> dict[str, Any]:
    """Read `state.json`, empty if there is none; local.

    Raises:
        CheckpointError: It is damaged, or of a newer version.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return {}
    try:
        state: dict[str, Any] = json.loads(path.read_text("utf-8"))
        known, version = state["format"], state["version"]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: expected the state of a checkpoint, it is damaged: {error}") from None
    if known != FORMAT or not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{path}: expected {FORMAT!r} of version {VERSION} at the most, got {known!r} of version {version!r}; "
            "a newer axonmpi may read it"
        )
    return state


# ---- checksums --------------------------------------------------------------------------------------------------


def _checksums_in(folder: Path, files: Sequence[TensorFile]) -> dict[str, npt.NDArray[np.uint32]]:
    """Return the checksums of files, by which their headers are checked here."""
    path = folder / _CHECKSUMS
    known = read_header(path).entries
    data = path.read_bytes()
    checksums = {}
    for file in files:
        entry = known.get(file.name)
        if entry is None or entry.spec.nbytes != 4 * block_count(file.size):
            raise CheckpointError(f"{path}: has not the checksums of {file.name} with {file.size} bytes")
        checksums[file.name] = np.frombuffer(data[entry.start : entry.stop], dtype="<u4")
        _check_header(folder / file.name, file, checksums[file.name])
    return checksums


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
