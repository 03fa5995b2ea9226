"""`axonmpi checkpoint verify`: every block of every file compared with its checksum, by one process.

Files of other tools have no checksums; only their headers and sizes can be checked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ...groups.process_group import ProcessGroup
from ...utils.partition import split_range
from ...utils.text import counted, in_ranges, quoted
from ..files.checksums import BLOCK_BYTES, Checksums, block_count, crc32
from ..files.contents import KINDS
from ..files.folders import find_checkpoint
from ..files.integrity import read_checksums
from ..files.small_files import regular_size
from ..files.state_file import CHECKSUMS_FILE, STATE_FILE, read_state
from ..files.tensor_file import TensorFile, read_header, read_headers
from .checkpoint_data import Progress, format_of

_MOST_NAMES = 8
_MOST_RANGES = 6


class Damage(NamedTuple):
    """The damage of a file.

    Attributes:
        file: Its name.
        text: A description of the damage.
        tensors: Names of the tensors whose bytes are damaged, if the header is intact.
    """

    file: str
    text: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a line that names some of the tensors."""
        named = f", in {quoted(self.tensors, _MOST_NAMES)}" if self.tensors else ""
        return f"{self.file}: {self.text}{named}"


@dataclass
class Verification:
    """The result of a verification.

    Attributes:
        files: Bytes of each file of tensors, by name.
        has_checksums: All bytes of the files were checked, and not only headers and sizes.
        damages: All damages that were found.
    """

    files: dict[str, int] = field(default_factory=dict)
    has_checksums: bool = False
    damages: list[Damage] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """True if there is no damage."""
        return not self.damages

    @contextmanager
    def recording(self, folder: Path, name: str) -> Iterator[None]:
        """Record a CheckpointError of the `with` block as the damage of a file, and go on; local."""
        try:
            yield
        except CheckpointError as error:
            text = str(error).removeprefix(f"{folder / name}").removeprefix(f"{folder}").removeprefix(": ")
            self.damages.append(Damage(name, text))


def verify_checkpoint(
    path: str | os.PathLike[str], *, group: ProcessGroup | None = None, progress: Progress | None = None
) -> Verification:
    """Read all of a checkpoint, a folder of `transformers` or a `.safetensors` file, and compare its checksums.

    Args:
        path: The folder or file.
        group: Ranks that read a slice of it each; the call is then collective, and all ranks get the same result.
            None means this process alone.
        progress: Called with the bytes that this process has read, and all bytes that it reads.

    Raises:
        CheckpointError: There is neither a checkpoint nor a safetensors file.
    """
    folder = find_checkpoint(Path(os.path.abspath(os.fspath(path))))
    if (kind := format_of(folder)) not in ("checkpoint", "safetensors"):
        raise CheckpointError(f"{folder}: expected a checkpoint or safetensors files, got one of format {kind}")
    found = Verification(has_checksums=kind == "checkpoint")
    if kind == "safetensors":
        with found.recording(folder if folder.is_dir() else folder.parent, folder.name):
            files = [read_header(folder)] if folder.is_file() else read_headers(folder, "model")
            found.files = {file.name: file.size for file in files}
        return found

    checksums = _read_small_files(folder, found)
    sizes, headers = _check_headers(folder, checksums, found)
    if not found.damages:
        _check_kinds(folder, checksums, found)
    others = {path.name for path in folder.glob("*.safetensors")} - {*checksums, CHECKSUMS_FILE}
    found.damages += [Damage(name, "is not of this checkpoint") for name in sorted(others)]

    # The last block of a file that is cut off was found already.
    cut_off = {damage.file for damage in found.damages}
    blocks = [
        (name, block)
        for name, size in sizes.items()
        for block in range(min(len(checksums[name]), size // BLOCK_BYTES if name in cut_off else block_count(size)))
    ]
    for name, damaged in _damaged_blocks(folder, blocks, checksums, group, progress).items():
        found.damages.append(_damage(name, damaged, sizes[name], headers.get(name)))
    return found


# ---- small files and headers ------------------------------------------------------------------------------------


def _read_small_files(folder: Path, found: Verification) -> dict[str, Checksums]:
    """Check `state.json`, and return the checksums of files by their names."""
    state: dict[str, Any] = {}
    checksums: dict[str, Checksums] = {}
    with found.recording(folder, STATE_FILE):
        state = read_state(folder)
    with found.recording(folder, CHECKSUMS_FILE):
        checksums = read_checksums(folder, state)
    found.has_checksums = bool(checksums)
    return checksums


def _check_headers(
    folder: Path, checksums: Mapping[str, Checksums], found: Verification
) -> tuple[dict[str, int], dict[str, TensorFile]]:
    """Return the sizes of all files, and the headers of the files of tensors, by name."""
    sizes: dict[str, int] = {}
    headers: dict[str, TensorFile] = {}
    for name, sums in checksums.items():
        with found.recording(folder, name):
            sizes[name] = regular_size(folder / name)
            if name.endswith(".safetensors"):
                found.files[name] = sizes[name]
                headers[name] = read_header(folder / name)
            if block_count(sizes[name]) != len(sums):
                text = f"has {sizes[name]} bytes, and checksums of {counted(len(sums), 'block')}"
                found.damages.append(Damage(name, text))
    return sizes, headers


def _check_kinds(folder: Path, names: Collection[str], found: Verification) -> None:
    """Check that the files of each kind belong together, and that all of them have checksums."""
    for kind in KINDS:
        if kind == "model" or any(name.startswith(kind) for name in names):
            with found.recording(folder, kind):
                files = read_headers(folder, kind)
                found.damages += [Damage(file.name, "has no checksums") for file in files if file.name not in names]


# ---- blocks -----------------------------------------------------------------------------------------------------


def _damaged_blocks(
    folder: Path,
    blocks: Sequence[tuple[str, int]],
    checksums: Mapping[str, Checksums],
    group: ProcessGroup | None,
    progress: Progress | None,
) -> dict[str, list[int]]:
    """Return the numbers of the damaged blocks among `blocks`, by file."""
    ranks, rank = (1, 0) if group is None else (group.size, group.rank)
    start, stop = split_range(len(blocks), ranks, rank)
    found = []
    with _Files(folder) as files:
        for index in range(start, stop):
            name, block = blocks[index]
            if files.checksum(name, block) != checksums[name][block]:
                found.append((name, block))
            if progress is not None:
                progress((index + 1 - start) * BLOCK_BYTES, (stop - start) * BLOCK_BYTES)
    damaged: dict[str, list[int]] = {}
    for of_rank in [found] if group is None else group.all_gather_object(found):
        for name, block in of_rank:
            damaged.setdefault(name, []).append(block)
    return damaged


class _Files(ExitStack):
    """Files of a folder, each opened when a block of it is read."""

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
    names: dict[str, None] = {}
    if header is not None:
        for block in blocks:
            touched = header.touching(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
            names |= dict.fromkeys(entry.spec.name for entry in touched)
    return Damage(name, text, tuple(names))
