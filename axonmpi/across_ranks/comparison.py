"""Arguments compared over the ranks (`same_on_all_ranks`), and one rank's error raised on all.

    raised_on_all       a block whose TypeError or ValueError on any rank is raised on all
    first_rank_does     a function of rank 0: all ranks return its result, or raise its error
    same_on_all_ranks   texts that must agree; the error shows the first difference

All three are collective. They cost one small reduction while nothing is wrong; `first_rank_does` broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..backends import Backend, broadcast_object, gather_if_different
from ..utils.text import first_difference, text_of_problems

T = TypeVar("T")


@contextmanager
def raised_on_all(backend: Backend) -> Iterator[None]:
    """Raise on all ranks the TypeError or ValueError that the `with` block raises on any; collective at its end.

    Raises:
        Exception: Of the lowest failed rank's type; names the ranks unless all have the same message.
    """
    problem: Exception | None = None
    try:
        yield
    except (TypeError, ValueError) as error:
        problem = error
    answers = gather_if_different(backend, (type(problem), "" if problem is None else str(problem)))
    if text := text_of_problems([message for _, message in answers]):
        kind = next(kind for kind, message in answers if message)
        raise _error(kind, text) from problem


def first_rank_does(backend: Backend, work: Callable[[], T]) -> T:
    """Call a function on rank 0 alone and return its result on all ranks; collective.

    Args:
        backend: The ranks.
        work: Returns something that can be pickled.

    Raises:
        Exception: Raised by `work`; of the same type and with the same message on all ranks.
    """
    result: T | None = None
    problem: Exception | None = None
    if backend.rank == 0:
        try:
            result = work()
        except Exception as error:  # the other ranks wait for it, whatever it is
            problem = error
    result, kind, text = broadcast_object(backend, (result, type(problem), str(problem)))
    if problem is not None:
        raise problem
    if issubclass(kind, Exception):
        raise _error(kind, text)
    agreed: T = result
    return agreed


def same_on_all_ranks(
    backend: Backend, texts: Iterable[str], problem: str, todo: str, error: type[Exception] = ValueError
) -> None:
    """Raise on all ranks unless all have the same texts in the same order; collective.

    Args:
        backend: The ranks.
        texts: Arguments, names, shapes of this rank, one text each.
        problem: First line of the message.
        todo: Last line of the message; the first difference stands between them.
        error: Type of the error.
    """
    if difference := first_difference(gather_if_different(backend, list(texts))):
        raise error(f"{problem}; the first difference is\n  {difference}\n{todo}")


def _error(kind: type[Exception], text: str) -> Exception:
    """Return an error of another rank: a ValueError if its type, as UnicodeEncodeError, takes more than a text."""
    try:
        return kind(text)
    except TypeError:
        return ValueError(text)
