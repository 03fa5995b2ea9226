"""Which elements of a parameter a rank's part of it has (layer 4).

A wrapper that divides parameters among ranks marks the parts. Who compares parts of different modules, as a
pipeline does with tied parameters, sees whether they are parts of the same elements.
"""

from __future__ import annotations

from torch import nn

__all__ = ["elements_of", "mark_part"]

_ELEMENTS = "_axonmpi_elements"


def mark_part(part: nn.Parameter, first: int, last: int) -> None:
    """Say that a parameter is the elements from `first` up to `last` of a larger one; local."""
    setattr(part, _ELEMENTS, (first, last))


def elements_of(parameter: nn.Parameter) -> tuple[int, int] | None:
    """Return which elements of a larger parameter this one has; None for a whole one; local."""
    elements: tuple[int, int] | None = getattr(parameter, _ELEMENTS, None)
    return elements
