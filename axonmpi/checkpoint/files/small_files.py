"""Strict readers of small files and of JSON.

Python's `json` accepts more than the standard: UTF-16, byte-order marks, a key twice, half of a surrogate pair,
NaN. Files that readers in other languages would refuse, or read differently, are refused here.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...errors import CheckpointError

MOST_BYTES = 1 << 30
"""Largest file that is read at once."""


def regular_size(path: Path) -> int:
    """Return the size of a file without opening it, since opening a pipe or a device may hang; local.

    Raises:
        CheckpointError: There is no such file, or it is no regular file.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be read: {reason}") from error
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(found.st_mode), "device")
        raise CheckpointError(f"{path}: expected a regular file, got a {kind}")
    return found.st_size


def read_small(path: Path) -> bytes:
    """Return the content of a small file; local.

    Raises:
        CheckpointError: It is no regular file, is too large, or cannot be read.
    """
    size = regular_size(path)
    if size > MOST_BYTES:
        raise CheckpointError(f"{path}: expected a file of at most {MOST_BYTES} bytes, got {size}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def check_plain_name(name: object) -> str:
    """Return the name of a file, if it has no path in it; local.

    Raises:
        ValueError: It is no text, or a path to another folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"expected the name of a file in the same folder, got {name!r}")
    return name


def strict_json(text: bytes, *, constants: bool = False) -> Any:
    """Return the value of a JSON text; local.

    Args:
        text: In UTF-8.
        constants: Accept NaN and Infinity, as Python writes them.

    Raises:
        ValueError: It is no JSON, has a key twice or a text that is not Unicode, or is nested too deeply.
    """
    try:
        found = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_repeated_keys,
            parse_float=_finite,
            parse_int=_whole,
            parse_constant=None if constants else _refuse_constant,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if b"\\u" in text:
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair cannot be encoded
    return found


def _without_repeated_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value


def _whole(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")
