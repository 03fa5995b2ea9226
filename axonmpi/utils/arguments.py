"""Checks of plain arguments, for every package: flags, integers, members of an enum, seconds."""

from __future__ import annotations

import enum
import inspect
import operator
from datetime import timedelta
from typing import SupportsFloat, SupportsIndex, TypeVar

Seconds = float | timedelta
"""A time, in seconds where it is a number."""

E = TypeVar("E", bound=enum.Enum)


def check_flags(**flags: object) -> None:
    """Raise unless each argument is True or False; local.

    Raises:
        TypeError: Naming the argument.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r}{hint(value)}")


def check_functions(**functions: object) -> None:
    """Raise unless each argument is a function or None, and no class; local.

    Raises:
        TypeError: Naming the argument.
    """
    for name, value in functions.items():
        if inspect.isclass(value):
            raise TypeError(
                f"{name}: expected a function or None, got the class {value.__name__}; give an instance"
            )
        if value is not None and not callable(value):
            raise TypeError(f"{name}: expected a function or None, got {value!r}{hint(value)}")


def integer(name: str, value: object, minimum: int | None = None) -> int:
    """Return `value` as a plain int; True and False are not taken for numbers; local.

    Args:
        name: The argument's name, for the message.
        value: The number.
        minimum: The smallest valid number.

    Raises:
        TypeError: It is no integer.
        ValueError: It is smaller.
    """
    if type(value) is int:  # first, since to compare with a protocol takes 10 µs
        number = value
    elif isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name}: expected an integer, got {value!r}{hint(value)}")
    else:
        number = operator.index(value)
    if minimum is not None and number < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {number}")
    return number


def number(name: str, value: object) -> float:
    """Return `value` as a float; True and False are not taken for numbers; local.

    Args:
        name: The argument's name, for the message.
        value: The number.

    Raises:
        TypeError: It is no number.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name}: expected a number, got {value!r}{hint(value)}")
    return float(value)


def hint(value: object) -> str:
    """Return advice for a group or world in place of another argument, empty for other values; local."""
    kind = type(value).__name__  # groups and worlds are classes of a higher layer
    if kind == "ProcessGroup":
        return "; name the group, as group= or process_group=, which the function's signature has"
    if kind == "World":
        return "; its group of all ranks is its default_group"
    return ""


def member(name: str, kind: type[E], value: object) -> E:
    """Return a member of an enum, from itself or from its name in any case; local.

    Args:
        name: The argument's name, for the message.
        kind: The enum, a public one of axonmpi.
        value: The member, its name, or its value if that is a string.

    Raises:
        TypeError: `value` is neither.
        ValueError: It is a string that no member has.
    """
    if isinstance(value, kind):
        return value
    names = ", ".join(_both(each) for each in kind)
    expected = f"{name}: expected an axonmpi.{kind.__name__}, {names}, got {value!r}"
    if not isinstance(value, str):
        raise TypeError(expected + hint(value))
    wanted = value.lower().replace("-", "_")
    for each in kind:
        if wanted in (each.name.lower(), _value(each).replace("-", "_")):
            return each
    raise ValueError(expected)


def _value(each: enum.Enum) -> str:
    """Return a member's value if that is a string, else its name."""
    return each.value if isinstance(each.value, str) else each.name.lower()


def _both(each: enum.Enum) -> str:
    value = _value(each)
    return each.name if value == each.name.lower() else f"{each.name} ({value!r})"


def seconds(name: str, value: Seconds | None, *, positive: bool = True) -> float | None:
    """Return a time in seconds, given as a number or a `timedelta`; None means no limit; local.

    Args:
        name: The argument's name, for the message.
        value: The time.
        positive: Refuse 0 and negative times.

    Raises:
        ValueError: It is no time, or not positive.
    """
    if value is None:
        return None
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if not isinstance(number, (int, float)) or isinstance(number, bool) or not (number > 0 or not positive):
        kind = "positive number" if positive else "number"
        raise ValueError(f"{name}: expected a {kind} of seconds, a timedelta or None, got {value!r}")
    return float(number)
