"""Property-based tests on real ranks: rank 0 draws the examples, all ranks of the test run them.

    rank 0: hypothesis ── drawn arguments ──> rank 1, 2, …: run the body
            run the body                      │
            <── whether it failed ────────────┘        a failure on any rank is a failure of the example

So hypothesis sees one test that passes or fails, and can look for the smallest example that fails. `assume`, `note`
and `data` need hypothesis' own state, which only rank 0 has: use them in the strategies, not in the body.
"""

from __future__ import annotations

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
    fixtures = _fixture_values(item)
    others = range(1, count)

    def tell(message: dict[str, Any] | bool) -> None:
        for rank in others:
            session.send(message, rank)

    def body(*instance: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        tell({name: value for name, value in kwargs.items() if name not in fixtures})
        error: BaseException | None = None
        try:
            inner(*instance, **kwargs)
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
            item.obj(**fixtures)
        fails = False
    finally:
        tell(fails)


def follow_examples(item: pytest.Function, inner: Body, session: RealSession) -> None:
    """Run the examples that rank 0 sends, until it sends whether the test fails; on the other ranks."""
    __tracebackhide__ = True
    instance = () if item.instance is None else (item.instance,)
    fixtures = _fixture_values(item)
    error: BaseException | None = None
    while isinstance(message := session.receive(0), dict):
        error = None
        try:
            inner(*instance, **fixtures, **message)
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as raised:
            error = raised
        session.send(not (error is None or isinstance(error, pytest.skip.Exception)), 0)
    if error is not None and message:
        raise error


def _fixture_values(item: pytest.Function) -> dict[str, Any]:
    return {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
