"""The fenced blocks of the README and of the pages, and the conditions for running each, from its first line."""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from markdown_it import MarkdownIt

from helpers import REPOSITORY

PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
FRESH_MACHINE = "<!-- fresh machine -->"

_FILE_NAME = re.compile(r"# (\w[\w.-]*\.(?:py|toml|yaml))\n")


@dataclass(frozen=True)
class Fence:
    """One block.

    Attributes:
        line: Number of the line that opens it, from 1.
        language: The word after the three marks.
        code: Its text.
        fresh_machine: Whether it is a long set-up, run on a fresh machine only.
    """

    line: int
    language: str
    code: str
    fresh_machine: bool

    @property
    def file_name(self) -> str | None:
        """The name of the file that the block is, as its first line says: `# train.py`."""
        found = _FILE_NAME.match(self.code)
        return found[1] if found else None

    @property
    def ranks(self) -> int:
        """The number of ranks that run it, as its first line says: `# ranks: 4`; else 0."""
        return self._number("ranks")

    @property
    def gpus(self) -> int:
        """The number of ranks with a GPU each that it is for, as its first line says: `# gpus: 2`; else 0."""
        return self._number("gpus")

    def _number(self, name: str) -> int:
        found = re.match(rf"# {name}: (\d+)\n", self.code)
        return int(found[1]) if found else 0

    @property
    def takes_minutes(self) -> bool:
        """Whether its first line says that it takes too long for a test, or needs a job that runs beside it."""
        return self.code.startswith(("# takes minutes\n", "# while a job runs\n"))


@lru_cache
def fences_of(page: Path) -> tuple[Fence, ...]:
    """Return the blocks of a page, in order."""
    found, marked = [], False
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "fence":
            found.append(Fence(token.map[0] + 1, token.info.strip(), token.content, marked))
        marked = token.type == "html_block" and token.content.strip() == FRESH_MACHINE
    return tuple(found)
