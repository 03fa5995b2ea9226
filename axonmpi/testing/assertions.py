"""An assertion that fails on all ranks together."""

from __future__ import annotations

from ..comm import all_gather_object
from ..groups.process_group import ProcessGroup
from ..utils.arguments import hint
from ..utils.text import name_ranks
from .merged_texts import group_by_text


def parallel_assert(condition: object, message: str = "", group: ProcessGroup | None = None) -> None:
    """Raise on all ranks if the condition is false on any of them; collective.

    An `assert` that fails on one rank leaves the others waiting at their next collective; this does not.

    Args:
        condition: Anything with a truth value; may differ between ranks.
        message: The error's text if it is false; may differ between ranks.
        group: The ranks, named by their numbers in it; None means the default group.

    Raises:
        TypeError: `message` is no text.
        AssertionError: The condition is false on some rank; names these ranks and gives their messages.
    """
    __tracebackhide__ = True
    if not isinstance(message, str):
        raise TypeError(f"message: expected a text, got {message!r}{hint(message)}")
    answers: list[str | None] = all_gather_object(None if condition else message, group)
    failed = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    if failed:
        lines = [
            f"{name_ranks(ranks)} of {len(answers)}: {text}".rstrip(": ") for ranks, text in group_by_text(failed)
        ]
        raise AssertionError("\n".join(lines))
