"""The folder of one checkpoint on the disk: its partial and previous forms, and the rename between them.

    PATH.partial              is being written; renamed to PATH when all is on the disk
    PATH                      a complete checkpoint
    PATH.previous             the checkpoint before, while it is replaced
    .PATH.axonmpi-lock        held by the job that saves

A job that is killed leaves one of the last two checkpoints complete, and its lock. The lock tells the next save
that the other folders are left over, and the save removes them. Without a lock, folders of these names belong to
the user.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from .integrity import damage_of
from .lock import Lock, lock_of
from .state_file import STATE_FILE
from .tensor_file import TensorFile

_OWN = re.compile(
    r"(model|optimizer|random|checksums)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|state\.json|config\.json"
    r"|\.nfs.*"  # files that were deleted while a program has them open
)


def partial_of(path: Path) -> Path:
    """Return the folder in which a checkpoint is written."""
    return path.parent / f"{path.name}.partial"


def _previous_of(path: Path) -> Path:
    return path.parent / f"{path.name}.previous"


def find_checkpoint(path: Path) -> Path:
    """Return the folder of a checkpoint, `PATH.previous` if a job was killed between its two renames; local."""
    previous = _previous_of(path)
    return previous if not os.path.lexists(path) and (previous / STATE_FILE).exists() else path


@contextmanager
def locked(path: Path) -> Iterator[Lock]:
    """Lock a path against other jobs; undo an incomplete save at the end of the block; on one rank.

    Raises:
        OSError: Another job saves to it, or the lock cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(lock_of(path))
    try:
        yield lock
    finally:
        with suppress(OSError):
            _undo(path, lock)
        left = os.path.lexists(partial_of(path)) or os.path.lexists(_previous_of(path))
        lock.release(keep=lock.may_tidy and left)


def recover(path: Path) -> None:
    """Undo the save to `path` that a killed job has left incomplete; on one rank.

    Raises:
        OSError: It cannot be done, or another job saves to it.
    """
    with locked(path) as lock:
        _undo(path, lock)


def _undo(path: Path, lock: Lock) -> None:
    """Remove the folders of an incomplete save; the last complete checkpoint keeps its name."""
    if not lock.may_tidy:
        return
    partial, previous = partial_of(path), _previous_of(path)
    if os.path.lexists(previous) and not os.path.lexists(path):
        previous.rename(path)
    if os.path.lexists(partial) and not os.path.lexists(path) and not damage_of(partial):
        partial.rename(path)  # complete, but for its name
    _remove(partial)
    if os.path.lexists(previous) and (not damage_of(path) or damage_of(previous)):
        _remove(previous)


def check_own(folder: Path) -> None:
    """Raise if a folder has a file that this library does not write; local.

    Raises:
        FileExistsError: Names the file.
    """
    if foreign := sorted(path.name for path in folder.iterdir() if not _OWN.fullmatch(path.name)):
        message = f"it has {foreign[0]!r} in it, which is of no checkpoint, and would be removed: move that away"
        raise FileExistsError(errno.EEXIST, message, str(folder))


def _remove(folder: Path) -> None:
    if os.path.lexists(folder):
        check_own(folder)
        shutil.rmtree(folder)


def prepare(path: Path, files: Iterable[TensorFile], lock: Lock) -> int:
    """Make the folder and the files of tensors, with their headers and in their sizes; on one rank.

    Args:
        path: Of the checkpoint.
        files: The files of tensors.
        lock: Of the path.

    Returns:
        The open folder, by which `finish` knows it from another folder of the name.

    Raises:
        OSError: They cannot be made, or `path` is no checkpoint and must not be replaced.
    """
    _undo(path, lock)
    partial, previous = partial_of(path), _previous_of(path)
    for beside in (partial, previous):
        if os.path.lexists(beside):
            message = (
                f"it is in the way of saves to {path.name!r}, and cannot be known to be left over: move it away"
            )
            raise FileExistsError(errno.EEXIST, message, str(beside))
    if os.path.lexists(path):
        if not (path / STATE_FILE).exists():
            message = "it is there and is no checkpoint, so it is not replaced; choose another path"
            raise FileExistsError(errno.EEXIST, message, str(path))
        check_own(path)
    lock.may_tidy = True
    partial.mkdir()
    for file in files:
        with (partial / file.name).open("wb") as opened:
            opened.write(file.header)
            opened.truncate(file.size)
    return os.open(partial, os.O_RDONLY | os.O_DIRECTORY)


def finish(path: Path, opened: int, texts: Mapping[str, bytes]) -> None:
    """Write the small files, bring them to the disk, and rename the folder to `path`; on one rank.

    Args:
        path: Of the checkpoint.
        opened: The open folder that `prepare` returned.
        texts: The content of the small files, by their names.

    Raises:
        OSError: A file cannot be written.
    """
    partial, previous = partial_of(path), _previous_of(path)
    if not os.path.samestat(partial.stat(), os.fstat(opened)):
        raise FileExistsError(errno.EEXIST, "another job saves to the same path", str(partial))
    for name, text in texts.items():
        with (partial / name).open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    os.fsync(opened)
    if path.exists():
        path.rename(previous)
    partial.rename(path)
    _sync(path.parent)
    _remove(previous)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
