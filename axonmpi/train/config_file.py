"""The reader of a TOML or YAML file of settings; it knows no setting by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .config import Config


def load_config(path: str | Path) -> Config:
    """Read a configuration from a file with the names of the flags; the other settings have their defaults. Local.

        steps = 1000                    [optimizer]
        layers = 6              or      lr = 2e-3
        lr = 2e-3                       [run]
                                        steps = 1000

    Args:
        path: A file ending in `.toml`, `.yaml` or `.yml`.

    Raises:
        ValueError: The file is missing, unreadable, malformed or of another kind; a name in it is unknown (the
            message has similar names), is given twice or in the wrong table; a value is out of range or of the
            wrong type.
    """
    path = Path(path)
    readers: dict[str, Callable[[str], Any]] = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"config file {path}: expected a name ending in .toml, .yaml or .yml")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config file {path} cannot be read: {error}") from error
    try:
        settings = reader(text)
        if not isinstance(settings, dict):
            raise TypeError(f"expected settings as NAME: VALUE, got {type(settings).__name__}")
        return Config.from_mapping(settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config file {path}: {error}") from error


def _toml(text: str) -> Any:
    # tomli became a part of Python in 3.11
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return toml.loads(text)


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from error
