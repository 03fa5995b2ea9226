"""Whether a checkpoint is as it was written: every block of every file against its checksum.

Files of other tools have no checksums; of them only headers and sizes can be checked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError
from ...groups.process_group import ProcessGroup
from ...utils.partition import split_range
from ...utils.text import counted, in_ranges
from ..files.checksums import BLOCK_BYTES, block_count, crc32
from ..files.contents import KINDS
from ..files.folders import find_checkpoint
from ..files.integrity import read_checksums
from ..files.small_files import regular_size
from ..files.state_file import CHECKSUMS_FILE, STATE_FILE, read_state
from ..files.tensor_file import TensorFile, read_header, read_headers
from .checkpoint_data import Progress, format_of

_MOST_NAMES = 8
_MOST_RANGES = 6

Checksums = npt.NDArray[np.uint32]


class Damage(NamedTuple):
    """What is wrong with a file.

    Attributes:
        file: Its name.
        text: What is wrong.
        tensors: Names of the tensors whose bytes are damaged, if it is known that no others are.
    """

    file: str
    text: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it as a line that names some tensors."""
        names = [*map(repr, self.tensors[:_MOST_NAMES])]
        more = len(self.tensors) - len(names)
        named = f", in {', '.join(names)}{f' and {more} more' if more else ''}" if names else ""
        return f"{self.file}: {self.text}{named}"


@dataclass
class Verification:
    """What was checked, and what is damaged.

    Attributes:
        files: Bytes of each file of tensors, by name.
        has_checksums: Whether all bytes of them were checked, and not only headers and sizes.
        damages: What is wrong.
    """

    files: dict[str, int] = field(default_factory=dict)
    has_checksums: bool = False
    damages: list[Damage] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damages


def verify_checkpoint(
    path: str | os.PathLike[str], *, group: ProcessGroup | None = None, progress: Progress | None = None
) -> Verification:
    """Read all of a checkpoint, a folder of `transformers` or a `.safetensors` file, and compare its checksums.

    Args:
        path: The folder or file.
        group: Ranks that read a share each; collective then, and all get the same result. None means this process
            alone.
        progress: Is told how many of this process's bytes are done, and of how many.

    Raises:
        CheckpointError: There is nothing of that kind.
    """
    folder = find_checkpoint(Path(os.path.abspath(os.fspath(path))))
    if (kind := format_of(folder)) not in ("checkpoint", "safetensors"):
        raise CheckpointError(f"{folder}: expected a checkpoint or safetensors files, got one of format {kind}")
    made = Verification(has_checksums=kind == "checkpoint")
    if kind == "safetensors":
        _check_foreign(folder, made)
        return made
    sums = _small_files(folder, made)
    headers = {name: header for name in sums if (header := _header(folder, name, sums[name], made)) is not None}
    if not made.damages:
        _check_index(folder, sums, made)
    others = {path.name for path in folder.glob("*.safetensors")} - {*sums, CHECKSUMS_FILE}
    made.damages += [Damage(name, "is not of this checkpoint") for name in sorted(others)]
    sizes = made.files | _small_sizes(folder, sums, made)
    for name, blocks in _damaged_blocks(folder, sizes, headers, sums, group, progress).items():
        made.damages.append(_damage(name, blocks, sizes[name], headers.get(name)))
    return made


def _check_foreign(path: Path, made: Verification) -> None:
    try:
        files = [read_header(path)] if path.is_file() else read_headers(path, "model")
    except CheckpointError as error:
        made.damages.append(_of(error, path if path.is_dir() else path.parent, path.name))
    else:
        made.files = {file.name: file.size for file in files}


# ---- small files and headers ------------------------------------------------------------------------------------


def _small_files(folder: Path, made: Verification) -> dict[str, Checksums]:
    """Check `state.json`, and return the checksums of files by their names."""
    state: dict[str, Any] = {}
    try:
        state = read_state(folder)
    except CheckpointError as error:
        made.damages.append(_of(error, folder, STATE_FILE))
    try:
        return read_checksums(folder, state)
    except CheckpointError as error:
        made.has_checksums = False
        made.damages.append(_of(error, folder, CHECKSUMS_FILE))
        return {}


def _small_sizes(folder: Path, sums: Mapping[str, Checksums], made: Verification) -> dict[str, int]:
    """Return the bytes of the files without tensors."""
    sizes = {}
    for name in sums:
        if not name.endswith(".safetensors"):
            try:
                sizes[name] = regular_size(folder / name)
            except CheckpointError as error:
                made.damages.append(_of(error, folder, name))
            else:
                made.damages += _other_size(name, sizes[name], sums[name])
    return sizes


def _other_size(name: str, size: int, sums: Checksums) -> list[Damage]:
    if block_count(size) == len(sums):
        return []
    return [Damage(name, f"has {size} bytes, and checksums of {counted(len(sums), 'block')}")]


def _header(folder: Path, name: str, sums: Checksums, made: Verification) -> TensorFile | None:
    if not name.endswith(".safetensors"):
        return None
    try:
        made.files[name] = regular_size(folder / name)
        header = read_header(folder / name)
    except CheckpointError as error:
        made.damages.append(_of(error, folder, name))
        return None
    made.damages += _other_size(name, header.size, sums)
    return header


def _check_index(folder: Path, names: Collection[str], made: Verification) -> None:
    """Check that the files of each kind belong together, and that all of them have checksums."""
    for kind in KINDS:
        if kind == "model" or any(name.startswith(kind) for name in names):
            try:
                files = read_headers(folder, kind)
            except CheckpointError as error:
                made.damages.append(_of(error, folder, kind))
            else:
                made.damages += [Damage(file.name, "has no checksums") for file in files if file.name not in names]


def _of(error: Exception, folder: Path, name: str) -> Damage:
    return Damage(name, str(error).removeprefix(f"{folder / name}").removeprefix(f"{folder}").removeprefix(": "))


# ---- blocks -----------------------------------------------------------------------------------------------------


def _damaged_blocks(
    folder: Path,
    files: Mapping[str, int],
    headers: Collection[str],
    sums: Mapping[str, Checksums],
    group: ProcessGroup | None,
    progress: Progress | None,
) -> dict[str, list[int]]:
    """Return the numbers of damaged blocks, by file; a last one that is cut off is not among them."""
    blocks = [
        (name, block)
        for name, size in files.items()
        for block in range(min(len(sums[name]), block_count(size) if name in headers else size // BLOCK_BYTES))
    ]
    ranks, rank = (1, 0) if group is None else (group.size, group.rank)
    start, stop = split_range(len(blocks), ranks, rank)
    found = []
    with _Files(folder) as opened:
        for place in range(start, stop):
            name, block = blocks[place]
            if opened.checksum(name, block) != sums[name][block]:
                found.append((name, block))
            if progress is not None:
                progress((place + 1 - start) * BLOCK_BYTES, (stop - start) * BLOCK_BYTES)
    damaged: dict[str, list[int]] = {}
    for of_rank in [found] if group is None else group.all_gather_object(found):
        for name, block in of_rank:
            damaged.setdefault(name, []).append(block)
    return damaged


class _Files(ExitStack):
    """Files of a folder, opened when they are needed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._opened: dict[str, int] = {}
        self._memory = memoryview(bytearray(BLOCK_BYTES))

    def checksum(self, name: str, block: int) -> int | None:
        """Return the checksum of a block of a file, None if it cannot be read."""
        try:
            if name not in self._opened:
                self._opened[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
                self.callback(os.close, self._opened[name])
            at = 0
            while count := os.preadv(self._opened[name], [self._memory[at:]], block * BLOCK_BYTES + at):
                at += count
        except OSError:
            return None
        return crc32(self._memory[:at])


def _damage(name: str, blocks: Sequence[int], size: int, header: TensorFile | None) -> Damage:
    shown = in_ranges(blocks, ", ", _MOST_RANGES)
    text = f"{counted(len(blocks), 'block')} of {block_count(size)} (of 1 MiB: number {shown}) damaged"
    touched = (
        entry.spec.name
        for block in blocks
        for entry in (header.touching(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES) if header else ())
    )
    return Damage(name, text, tuple(dict.fromkeys(touched)))
