"""Property-based tests on several ranks.

Hypothesis draws an example and calls the test's body, once. On ranks the body runs on each of them, with the same
example. Hypothesis leaves a place for that: the body is `test.hypothesis.inner_test`, and may be replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["adapt_to_ranks", "inner_test_of", "replaced_inner_test"]


def inner_test_of(test: Any) -> Callable[..., Any] | None:
    """Return the body of a hypothesis test, or None for any other test."""
    inner: Callable[..., Any] | None = getattr(getattr(test, "hypothesis", None), "inner_test", None)
    return inner


@contextmanager
def replaced_inner_test(test: Any, body: Callable[..., Any]) -> Iterator[None]:
    """Replace the body of a hypothesis test by `body` for the duration of a `with` block."""
    inner = test.hypothesis.inner_test
    test.hypothesis.inner_test = functools.wraps(inner)(body)
    try:
        yield
    finally:
        test.hypothesis.inner_test = inner


def adapt_to_ranks(item: pytest.Item) -> None:
    """Give a hypothesis test on ranks the settings that make sense there.

    No deadline, unless the user has set one: an example takes as long as the slowest rank makes the others wait.
    And `world` and `group`, which no example changes, may be function-scoped fixtures.
    """
    test: Any = getattr(item, "obj", None)
    if inner_test_of(test) is None:
        return
    from hypothesis import HealthCheck, settings

    function = getattr(test, "__func__", test)
    default: Any = settings.default
    current: Any = getattr(function, "_hypothesis_internal_use_settings", default)
    deadline = None if current.deadline == default.deadline else current.deadline
    suppressed = set(current.suppress_health_check)
    info: Any = getattr(item, "_fixtureinfo", None)
    definitions = [info.name2fixturedefs[name][-1] for name in info.argnames if name in info.name2fixturedefs]
    if {one.argname for one in definitions if one.scope == "function"} <= {"world", "group", "rank_count"}:
        # The check of the second one would set up the fixtures, on ranks that take no part too.
        suppressed |= {HealthCheck.function_scoped_fixture, HealthCheck.differing_executors}
    adapted = settings(current, deadline=deadline, suppress_health_check=suppressed)
    function._hypothesis_internal_use_settings = adapted
