"""Types of settings, and the base of groups of settings, which checks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from ..utils.arguments import hint


@dataclass(frozen=True)
class Limit:
    """The range of a number, as an annotation of its type.

    Attributes:
        words: The range in words.
        holds: Returns True for a number in the range.
    """

    words: str
    holds: Callable[[float], bool]


_NOT_NEGATIVE = Limit("at least 0", lambda number: number >= 0)

Positive = Annotated[int, Limit("at least 1", lambda number: number >= 1)]
Count = Annotated[int, _NOT_NEGATIVE]
NotNegative = Annotated[float, _NOT_NEGATIVE]
AboveZero = Annotated[float, Limit("more than 0", lambda number: number > 0)]
Fraction = Annotated[float, Limit("0 to 1", lambda number: 0 <= number <= 1)]


@dataclass(frozen=True)
class Settings:
    """A group of settings, whose constructor checks types and ranges, and then calls `_check`."""

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for name, annotation in get_type_hints(type(self), include_extras=True).items():
            value = _typed(name, kinds[name], getattr(self, name))
            for limit in getattr(annotation, "__metadata__", ()):
                if not limit.holds(value):
                    raise ValueError(f"{name}: expected {limit.words}, got {value}")
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        """Raise ValueError if two settings contradict each other."""


def _typed(name: str, kind: Any, value: Any) -> Any:
    """Return `value` as the type of its setting."""
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, get_args(kind)))}, got {value!r}")
    if kind is float:
        return _number(name, value)
    if kind == Path | None and isinstance(value, str | Path | None):
        return Path(value) if isinstance(value, str) else value
    if kind != Path | None and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    expected = "path" if kind == Path | None else kind.__name__
    raise TypeError(f"{name}: expected a value of type {expected}, got {value!r}{hint(value)}")


def _number(name: str, value: Any) -> float:
    try:
        # YAML reads 1e-3, without a dot, as text
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return number
