"""What groups of the trainer's settings have in common: types are checked, then values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..utils.arguments import hint

__all__ = ["Settings", "above", "at_least"]


@dataclass(frozen=True)
class Settings:
    """A group of settings: types are checked when one is made, then `_check` looks at the values."""

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(type(self)).items():
            object.__setattr__(self, name, _typed(name, annotation, getattr(self, name)))
        self._check()

    def _check(self) -> None:
        """Raise ValueError where a value is out of range or two contradict each other."""


def _typed(name: str, annotation: Any, value: Any) -> Any:
    """Return `value` as the type of its setting."""
    if get_origin(annotation) is Literal:
        if value in get_args(annotation):
            return value
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, get_args(annotation)))}, got {value!r}")
    if annotation == Path | None:
        if isinstance(value, str | Path | None):
            return Path(value) if isinstance(value, str) else value
    elif annotation is float:
        return _number(name, value)
    elif isinstance(value, annotation) and (annotation is bool or not isinstance(value, bool)):
        return value
    kind = "path" if annotation == Path | None else annotation.__name__
    raise TypeError(f"{name}: expected a value of type {kind}, got {value!r}{hint(value)}")


def _number(name: str, value: Any) -> float:
    try:
        # YAML reads 1e-3, without a dot, as text
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return number


def at_least(name: str, value: float, minimum: int) -> None:
    """Raise ValueError where a setting is smaller than it may be."""
    if value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")


def above(name: str, value: float, bound: int) -> None:
    """Raise ValueError where a setting is not larger than it has to be."""
    if value <= bound:
        raise ValueError(f"{name}: expected more than {bound}, got {value}")
