"""Parsing of command lines, and the types of their options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .output import printed_once


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; on bad options or after help every rank ends as with argparse, and rank 0 prints."""
    with printed_once():
        return parser.parse_args(argv)


def positive(text: str) -> int:
    """Return an option's value, a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


def positive_seconds(text: str) -> float:
    """Return an option's value, a time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def file_to_write(text: str, endings: Sequence[str] = ("",)) -> Path:
    """Return an option's value, the path of a file in an existing folder, whose name has one of these endings."""
    if not text.endswith(tuple(endings)):
        raise argparse.ArgumentTypeError(f"expected a file name that ends in {' or '.join(endings)}, got {text!r}")
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path
