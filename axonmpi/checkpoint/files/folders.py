"""The folder of a checkpoint: it is whole, or it is not there.

    PATH.partial     is being written; renamed to PATH when all is on the disk
    PATH             a whole checkpoint
    PATH.previous    what PATH was, while it is replaced

A job that is killed leaves one of the last two whole. The next start removes the others.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from .tensor_file import TensorFile

__all__ = ["STATE_FILE", "find_checkpoint", "finish", "partial_of", "prepare", "recover"]

STATE_FILE = "state.json"


def partial_of(path: Path) -> Path:
    """Return the folder in which a checkpoint is written."""
    return path.with_name(path.name + ".partial")


def _previous_of(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def find_checkpoint(path: Path) -> Path:
    """Return where a checkpoint is, also if a job was killed while it replaced it; local."""
    previous = _previous_of(path)
    return previous if not path.exists() and (previous / STATE_FILE).exists() else path


def recover(path: Path) -> None:
    """Undo what is left of a save to `path` that did not come to its end; on one rank.

    Raises:
        OSError: It cannot be done.
    """
    _remove(partial_of(path))
    previous = _previous_of(path)
    if path.exists():
        _remove(previous)
    elif (previous / STATE_FILE).exists():
        previous.rename(path)


def _foreign(folder: Path) -> list[str]:
    """Return what is in a folder that no checkpoint has; `.nfs` are deleted files that a program has open."""
    names = [path.name for path in folder.iterdir() if path.suffix not in (".safetensors", ".json")]
    return [name for name in names if not name.startswith(".nfs")]


def _check_own(folder: Path) -> None:
    if foreign := _foreign(folder):
        message = f"it has {foreign[0]!r} in it, which is of no checkpoint, and would be removed: move that away"
        raise FileExistsError(errno.EEXIST, message, str(folder))


def _remove(folder: Path) -> None:
    if folder.exists():
        _check_own(folder)
        shutil.rmtree(folder)


def prepare(path: Path, files: Iterable[TensorFile]) -> int:
    """Make the folder and the files of tensors, in their sizes; on one rank.

    Returns:
        The open folder, for `finish`: no other folder can be taken for it.

    Raises:
        OSError: They cannot be made, or `path` is there and is no checkpoint.
    """
    recover(path)
    if path.exists() and not (path / STATE_FILE).exists():
        raise FileExistsError(
            17, "it is there and is no checkpoint, so it is not replaced; choose another path", str(path)
        )
    if path.exists():
        _check_own(path)
    partial = partial_of(path)
    partial.mkdir(parents=True)
    for file in files:
        with (partial / file.name).open("wb") as opened:
            opened.write(file.header)
            opened.truncate(file.size)
    return os.open(partial, os.O_RDONLY | os.O_DIRECTORY)


def finish(path: Path, opened: int, texts: Mapping[str, bytes]) -> None:
    """Write the small files, and let the folder have its name when all of it is on the disk; on one rank.

    Args:
        path: Of the checkpoint.
        opened: What `prepare` returned.
        texts: The content of the small files, by their names.

    Raises:
        OSError: Something cannot be written.
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
