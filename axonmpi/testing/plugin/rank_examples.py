"""Property-based tests on real ranks: rank 0 draws the examples, all ranks of the test run them.

    rank 0: hypothesis ── drawn arguments ──> rank 1, 2, …: run the body
            run the body                      │
            <── whether it failed ────────────┘        a failure on any rank is a failure of the example

So hypothesis sees one test that passes or fails, and can look for the smallest example that fails. `assume`, `note`
and `data` need hypothesis' own state, which only rank 0 has: use them in the strategies, not in the body.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from ...errors import RankFailedError
from ...utils.text import name_ranks
from .examples import replaced_inner_test
from .real_session import RealSession

__all__ = ["follow_examples", "lead_examples"]

Body = Callable[..., Any]


def lead_examples(item: pytest.Function, inner: Body, session: RealSession, count: int) -> None:
    """Run the hypothesis test on rank 0 and each example on all `count` ranks."""
    __tracebackhide__ = True
    own = _own_arguments(item, inner)
    others = range(1, count)

    def tell(message: dict[str, Any] | bool) -> None:
        for rank in others:
            session.send(message, rank)

    def body(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        given = inspect.signature(inner).bind(*args, **kwargs).arguments
        tell({name: value for name, value in given.items() if name not in own})
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

    fails = True
    try:
        with replaced_inner_test(item.obj, body):
            item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
        fails = False
    finally:
        tell(fails)


def follow_examples(item: pytest.Function, inner: Body, session: RealSession) -> None:
    """Run the examples that rank 0 sends, until it sends whether the test fails; on the other ranks."""
    __tracebackhide__ = True
    own = _own_arguments(item, inner)
    error: BaseException | None = None
    while isinstance(message := session.receive(0), dict):
        error = None
        try:
            inner(**own, **message)
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as raised:
            error = raised
        session.send(not (error is None or isinstance(error, pytest.skip.Exception)), 0)
    if error is not None and message:
        raise error


def _own_arguments(item: pytest.Function, inner: Body) -> dict[str, Any]:
    """Return the arguments that each rank has of its own: fixtures, and the object of a test method."""
    own = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    if item.instance is not None:
        own[next(iter(inspect.signature(inner).parameters))] = item.instance
    return own
