"""The entries of docs/api.md: public names as Sphinx knows them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from helpers import REPOSITORY

_DIRECTIVE = re.compile(r"\.\. (currentmodule|auto\w+|class|data|function):: ([\w.]+)\n((?:(?:   .*)?\n)*)")


@dataclass(frozen=True)
class Entry:
    """An entry of the page.

    Attributes:
        name: Full name, such as `axonmpi.pipeline.Pipeline`.
        text: The entry's own text and options.
        is_automatic: Whether Sphinx adds the docstring.
    """

    name: str
    text: str
    is_automatic: bool


def entries() -> Iterator[Entry]:
    """Yield the entries in the page's order."""
    module = "axonmpi"
    for kind, name, text in _DIRECTIVE.findall((REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")):
        if kind == "currentmodule":
            module = name
        elif kind != "automodule":
            full = name if name.startswith("axonmpi.") else f"{module}.{name}"
            yield Entry(full, text, kind.startswith("auto"))
