"""One check: its name and its function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import axonmpi as ax

Figures = dict[str, Any]


class NotHereError(Exception):
    """Says why a check cannot be made here."""


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: `part/what`.
        run: Raises AssertionError, or whatever it comes to; puts what it has measured into the figures. Collective.
    """

    name: str
    run: Callable[[ax.World, Figures], None]
