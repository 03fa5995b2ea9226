"""Failures of files on one rank, kept until all ranks meet, and raised on all of them as one `CheckpointError`.

A rank that cannot read or write a file goes on to the collectives in which the other ranks wait. At their end all
ranks raise the same `CheckpointError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ..errors import CheckpointError
from ..groups.process_group import ProcessGroup
from ..utils.text import text_of_problems

_MOST_ERRORS = 8
T = TypeVar("T")


class RankErrors:
    """The errors of this rank, until all ranks raise them.

    Args:
        path: File or folder that is named where an error names none.

    Attributes:
        texts: Messages of the first few errors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.texts: list[str] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record an error of the `with` block, and go on after it; local."""
        try:
            yield
        except CheckpointError as error:
            self._add(str(error))
        except OSError as error:
            self._add(f"{error.filename or self._path}: {error.strerror or error}")
        except Exception as error:
            self._add(f"{self._path}: {type(error).__name__}: {error}")

    def _add(self, text: str) -> None:
        if len(self.texts) < _MOST_ERRORS:
            self.texts.append(text)

    def raise_on_all(self, group: ProcessGroup, value: T, prefix: str = "") -> list[T]:
        """Return the values of all ranks, or raise if a rank has recorded an error; collective.

        Args:
            group: The ranks.
            value: This rank's.
            prefix: Beginning of the message.

        Raises:
            CheckpointError: On all ranks, with the errors of all.
        """
        answers = group.all_gather_object(("\n  ".join(self.texts), value))
        if text := text_of_problems([errors for errors, _ in answers]):
            raise CheckpointError(prefix + text)
        return [value for _, value in answers]


def first_rank_does(group: ProcessGroup, path: Path, work: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on all ranks; collective.

    Args:
        group: The ranks.
        path: File or folder that is named where an error names none.
        work: The function; reads or changes files.

    Raises:
        CheckpointError: The function has failed; on all ranks.
    """
    errors = RankErrors(path)
    result: T | None = None
    if group.rank == 0:
        with errors.recorded():
            result = work()
    answer: T
    answer, texts = group.broadcast_object((result, errors.texts))
    if texts:
        raise CheckpointError(texts[0])
    return answer
