"""Fixtures on mock ranks: what needs a rank is set up on each one, in its thread.

pytest sets fixtures up before there are ranks. There, `world` and `group` are stand-ins, and a fixture that asks
for one of them, or fails because there is no default world, becomes a plan:

    pytest                     the test's fixtures ─ set up once ─ shared by all ranks
                                                   └ plans ─┬─ set up on rank 0 ─ test ─ torn down
    each rank's thread                                      └─ set up on rank 1 ─ test ─ torn down
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest

from ...groups.world import World

__all__ = ["FixturesOfRank", "Plan", "StandIn", "plan_for"]


class StandIn:
    """Stands for `world` or `group` where there is no rank: outside the test's body."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self.size = size

    def __repr__(self) -> str:
        return f"<{self._name} of {self.size} mock ranks>"

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(
            f"{self._name}.{attribute}: on mock ranks, `{self._name}` is a different object on each rank and "
            f"exists in the test and in fixtures of its scope only; here {self._name}.size is known"
        )

    def own(self, world: World) -> Any:
        """Return what it stands for on a rank."""
        return world if self._name == "world" else world.default_group


@dataclass(frozen=True, eq=False)
class Plan:
    """A fixture that each rank sets up.

    Attributes:
        function: The fixture's function, bound to the test's instance.
        arguments: The fixtures that it asks for, among them stand-ins and other plans.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]


def plan_for(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Plan:
    """Put a fixture's set-up off until there are ranks, and let pytest know."""
    function: Any = fixturedef.func
    owner = getattr(function, "__self__", None)
    if owner is not None and isinstance(request.instance, type(owner)):
        function = function.__func__.__get__(request.instance)
    plan = Plan(function, {name: request.getfixturevalue(name) for name in fixturedef.argnames})
    found: Any = fixturedef
    found.cached_result = (plan, found.cache_key(request), None)
    return plan


class FixturesOfRank:
    """One rank's own values of fixtures.

    Args:
        world: The rank's.
        stack: Tears them down when it is closed.
    """

    def __init__(self, world: World, stack: ExitStack) -> None:
        self._world = world
        self._stack = stack
        self._values: dict[Plan, Any] = {}

    def value(self, given: Any) -> Any:
        """Return this rank's value of what pytest has as the value of a fixture."""
        if isinstance(given, StandIn):
            return given.own(self._world)
        if not isinstance(given, Plan):
            return given
        if given not in self._values:
            self._values[given] = self._set_up(given)
        return self._values[given]

    def _set_up(self, plan: Plan) -> Any:
        result = plan.function(**{name: self.value(argument) for name, argument in plan.arguments.items()})
        if not inspect.isgeneratorfunction(plan.function):
            return result
        self._stack.callback(next, result, None)
        return next(result)
