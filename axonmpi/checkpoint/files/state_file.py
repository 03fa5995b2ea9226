"""The file `state.json`: the values of a checkpoint that are no tensors, sealed by checksums.

    {
      "format": "axonmpi checkpoint",
      "version": 2,
      ...
      "checksums": "0f3a5c11",      CRC-32 of checksums.safetensors, which has the CRC-32 of all other files
      "checksum": "9be07d42"        CRC-32 of all bytes above, up to the comma before this line
    }

A damaged file, or a file of another checkpoint, breaks this chain. Version 1 has neither of the two lines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .checksums import crc32
from .small_files import read_small, strict_json
from .values import decoded

FORMAT, VERSION = "axonmpi checkpoint", 2
STATE_FILE = "state.json"
CHECKSUMS_FILE = "checksums.safetensors"
_SEAL = b',\n  "checksum": "%08x"\n}\n'
_SEAL_BYTES = len(_SEAL % 0)
_SEALED = ("checksums", "checksum")
_STATEFUL = ("scheduler", "scaler", "sampler")
_KEYS = ("format", "version", "step", "epoch", "layout", "versions", *_STATEFUL, "extra", "model", "optimizer")
_BESIDE = (CHECKSUMS_FILE, "optimizer.safetensors", "random.safetensors")
_MOST = 1 << 63


def sealed(text: bytes, checksums: bytes) -> bytes:
    """Return the text of `state.json` with its last two lines; local.

    Args:
        text: The JSON without them.
        checksums: Content of `checksums.safetensors`.
    """
    body = text.rstrip().removesuffix(b"}").rstrip() + b',\n  "checksums": "%08x"' % crc32(checksums)
    return body + _SEAL % crc32(body)


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of `state.json`, empty if another tool has written the folder; local.

    Raises:
        CheckpointError: It is damaged, of a newer version, or missing beside other files of a checkpoint.
    """
    path = folder / STATE_FILE
    if not os.path.lexists(path):
        if beside := [name for name in _BESIDE if os.path.lexists(folder / name)]:
            raise CheckpointError(f"{path}: is missing, and {beside[0]} is there, which only a checkpoint has")
        return {}
    text = read_small(path)
    try:
        state: dict[str, Any] = strict_json(text, constants=True)
        known, version = state["format"], state["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: expected the state of a checkpoint, it is damaged: {error}") from None
    if known != FORMAT or type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{path}: expected {FORMAT!r} of version {VERSION} at the most, got {known!r} of version {version!r}; "
            "a newer axonmpi may read it"
        )
    body = text[:-_SEAL_BYTES]
    if version > 1 and text != body + _SEAL % crc32(body):
        raise CheckpointError(f"{path}: its checksum is not that of its content: it is damaged or was changed")
    try:
        check_state(state, _SEALED if version > 1 else ())
    except ValueError as error:
        raise CheckpointError(f"{path}: it is damaged: {error}") from None
    return state


def check_state(state: Mapping[str, Any], sealed_by: tuple[str, ...] = ()) -> None:
    """Raise unless each value of `state.json` has its type and is in range; local.

    Args:
        state: Content of the file.
        sealed_by: Keys of its checksums.

    Raises:
        ValueError: Names the value.
    """
    expected = {*_KEYS, *sealed_by}
    if strange := sorted(expected ^ state.keys()):
        has = "an unknown" if strange[0] in state else "no"
        raise ValueError(f"it has {has} {strange[0]!r}")
    for key in ("step", "epoch"):
        _check(key, _is_count(state[key]), "a whole number from 0 to 2^63", state[key])
    layout, versions, model = (_dict(state, key) for key in ("layout", "versions", "model"))
    for key in ("ranks", "nodes"):
        _check(f"layout: {key}", _is_count(layout.get(key), 1), "a whole number from 1", layout.get(key))
    _check("layout: model", isinstance(layout.get("model", ""), str), "a text", layout.get("model"))
    _check("versions", _are_texts(versions), "texts by name", versions)
    _check("model: aliases", _are_texts(model.get("aliases")), "names by name", model.get("aliases"))
    for key in (*_STATEFUL, "extra"):
        _check_encoded(key, state[key])
    _check_encoded("model: extra", _dict(model, "extra"))
    if state["optimizer"] is not None:
        _check_optimizer(_dict(state, "optimizer"))


def _check_optimizer(state: Mapping[str, Any]) -> None:
    _check("optimizer: class", isinstance(state.get("class"), str), "a text", state.get("class"))
    groups, parameters, values = (_dict(state, key) for key in ("groups", "parameters", "values"))
    for label in groups:
        _check_encoded(f"optimizer: group {label!r}", _dict(groups, label))
    for name, described in parameters.items():
        try:
            label, dtype, shape = described
            fits = label in groups and isinstance(dtype, str) and all(map(_is_count, shape))
        except (TypeError, ValueError):
            fits = False
        _check(f"optimizer: {name!r}", fits, "the label of a group, a dtype and a shape", described)
    _check_encoded("optimizer: values", values)


def _is_count(value: Any, minimum: int = 0) -> bool:
    return type(value) is int and minimum <= value < _MOST


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _dict(state: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = state.get(key)
    _check(key, isinstance(value, dict), "values by name", value)
    found: dict[str, Any] = state[key]
    return found


def _check(name: str, fits: bool, expected: str, value: Any) -> None:
    if not fits:
        raise ValueError(f"{name!r}: expected {expected}, got {str(value)[:60]!r}")


def _check_encoded(name: str, value: Any) -> None:
    try:
        decoded(value)
    except Exception as error:  # torch has several
        raise ValueError(f"{name!r}: is no value of a checkpoint: {error}") from None
