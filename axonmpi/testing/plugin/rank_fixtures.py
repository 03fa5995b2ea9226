"""Fixtures on mock ranks: those that need a rank are set up on each rank, in its thread.

pytest sets fixtures up before there are ranks. At that time `world` is a plan, and a fixture that uses a plan, or
fails because there is no default world, becomes a plan too:

    pytest                     the test's fixtures ─ set up once ─ shared by all ranks
                                                   └ plans ─┬─ set up on rank 0 ─ test ─ torn down
    each rank's thread                                      └─ set up on rank 1 ─ test ─ torn down
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True, eq=False)
class Plan:
    """A fixture that each rank sets up.

    Attributes:
        function: The fixture's function, bound to the test's instance.
        arguments: Values of the fixtures that it uses, among them other plans.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]


def plan_for(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Plan:
    """Put a fixture's set-up off until there are ranks, and let pytest know."""
    function: Any = fixturedef.func
    owner = getattr(function, "__self__", None)
    if owner is not None and isinstance(request.instance, type(owner)):
        function = function.__func__.__get__(request.instance)
    arguments = {name: request.getfixturevalue(name) for name in fixturedef.argnames}
    plan = Plan(function, arguments)
    untyped: Any = fixturedef  # its cached value is of the fixture's own type
    untyped.cached_result = (plan, untyped.cache_key(request), None)
    return plan


def value_on_rank(fixture: Any, values: dict[Plan, Any], stack: ExitStack) -> Any:
    """Return this rank's value of a fixture; in the rank's thread, whose default world is the rank's.

    Args:
        fixture: pytest's value of the fixture: a plan, or the value that all ranks share.
        values: The rank's values of plans so far; the new values are added.
        stack: Tears the fixtures down when it is closed.
    """
    if not isinstance(fixture, Plan):
        return fixture
    if fixture not in values:
        arguments = {name: value_on_rank(value, values, stack) for name, value in fixture.arguments.items()}
        result = fixture.function(**arguments)
        if inspect.isgeneratorfunction(fixture.function):
            stack.callback(next, result, None)
            result = next(result)
        values[fixture] = result
    return values[fixture]
