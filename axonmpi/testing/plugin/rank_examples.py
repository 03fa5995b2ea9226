"""Property-based tests on real ranks: rank 0 draws the examples, all ranks of the test run them.

    rank 0: hypothesis ── example ──> rank 1, 2, …: run the body
            run the body              │
            <── whether it failed ────┘        a failure on any rank is a failure of the example

So hypothesis sees one test that passes or fails, and can look for the smallest example that fails. `assume`, `note`
and `data` need hypothesis' own state, which only rank 0 has: use them in the strategies, not in the body.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ...errors import RankFailedError
from ...utils.text import name_ranks
from .examples import replaced_inner_test
from .real_session import RealSession

__all__ = ["follow_examples", "lead_examples"]

Body = Callable[..., Any]


@dataclass(frozen=True)
class _Example:
    """What rank 0 sends for each example.

    Attributes:
        drawn: The drawn arguments by name.
        instance_name: Name of the argument that is the object of a test method, which each rank has its own of.
    """

    drawn: dict[str, Any]
    instance_name: str | None


@dataclass(frozen=True)
class _End:
    """What rank 0 sends when there are no more examples.

    Attributes:
        failed: Whether the test fails, with the last example.
    """

    failed: bool


def lead_examples(item: pytest.Function, inner: Body, session: RealSession, count: int) -> None:
    """Run the hypothesis test on rank 0 and each example on all `count` ranks."""
    __tracebackhide__ = True
    fixtures = _fixture_values(item)
    others = range(1, count)

    def body(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        example = _example(inspect.signature(inner).bind(*args, **kwargs).arguments, fixtures, item.instance)
        for rank in others:
            session.send(example, rank)
        error: BaseException | None = None
        try:
            inner(*args, **kwargs)
        except BaseException as raised:
            error = raised
        failure = "" if error is None else str(item.repr_failure(pytest.ExceptionInfo.from_exception(error)))
        failed = [rank for rank in others if session.receive(rank, failure, item.nodeid)]
        if error is None and failed:
            error = RankFailedError(f"{name_ranks(failed)} failed with this example")
        if error is not None:
            raise error

    ended_well = False
    try:
        with replaced_inner_test(item.obj, body):
            item.obj(**fixtures)
        ended_well = True
    finally:
        for rank in others:
            session.send(_End(failed=not ended_well), rank)


def _example(arguments: dict[str, Any], fixtures: dict[str, Any], instance: object) -> _Example:
    """Keep what the other ranks do not have: what was drawn."""
    is_instance = [name for name, value in arguments.items() if instance is not None and value is instance]
    drawn = {name: value for name, value in arguments.items() if name not in {*fixtures, *is_instance}}
    return _Example(drawn, is_instance[0] if is_instance else None)


def follow_examples(item: pytest.Function, inner: Body, session: RealSession) -> None:
    """Run the examples that rank 0 sends, until there are no more; on the other ranks."""
    __tracebackhide__ = True
    fixtures = _fixture_values(item)
    error: BaseException | None = None
    while isinstance(message := session.receive(0), _Example):
        own = {} if message.instance_name is None else {message.instance_name: item.instance}
        error = None
        try:
            inner(**fixtures, **own, **message.drawn)
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as raised:
            error = raised
        session.send(not (error is None or isinstance(error, pytest.skip.Exception)), 0)
    if error is not None and message.failed:
        raise error


def _fixture_values(item: pytest.Function) -> dict[str, Any]:
    return {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
