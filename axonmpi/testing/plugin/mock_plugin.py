"""Pytest's hooks under plain `pytest`: a test marked for four ranks starts four threads, each a mock rank.

Fixtures are set up once, as always, and all ranks share them. Only `world`, `group`, and fixtures that need these
or a default world are each rank's own, see `rank_fixtures.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

import pytest

from ...errors import CommunicatorError
from ...groups.world import World, current_world, get_world
from ..merged_texts import merge_texts
from ..mock_ranks import RankRun, start_ranks
from .markers import marked_rank_count, timeout_of, uses_ranks
from .outcomes import MergedFailure, failure_of
from .rank_fixtures import Plan, plan_for, value_on_rank

_FAILURES = pytest.StashKey[dict[int, BaseException]]()


class MockRanks:
    """Hooks that run tests on mock ranks."""

    real_size = 0
    """Number of processes under `mpirun`."""

    def rank_count(self, item: pytest.Item) -> int:
        """Return the number of ranks that the test runs on."""
        return marked_rank_count(item) or 1

    def world(self, item: pytest.Item) -> Any:
        """Return the value of the fixture `world`, which each rank sets up for itself."""
        return Plan(get_world, {})

    def pytest_report_header(self) -> str:
        """Return the session's line about mock ranks."""
        return "axonmpi: tests on ranks use mock ranks (threads); for real ones: mpirun -n 4 pytest"

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> object | None:
        """Put off the set-up of a fixture that uses a rank's own fixture."""
        if not _can_wait(fixturedef, request):
            return None
        asked = [request.getfixturevalue(name) for name in fixturedef.argnames]
        return plan_for(fixturedef, request) if any(isinstance(value, Plan) for value in asked) else None

    @pytest.hookimpl(specname="pytest_fixture_setup", wrapper=True)
    def pytest_fixture_setup_without_a_world(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Put off the set-up of a fixture that has failed because there is no default world."""
        try:
            return (yield)
        except CommunicatorError:
            if current_world() is not None or not _can_wait(fixturedef, request):
                raise
            return plan_for(fixturedef, request)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run the body of the test on its ranks."""
        if not uses_ranks(pyfuncitem) or inspect.iscoroutinefunction(pyfuncitem.obj):
            return None
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        _run_on_ranks(pyfuncitem, self.rank_count(pyfuncitem), pyfuncitem.obj, arguments)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Merge the failures of the ranks into one."""
        report = yield
        failures = item.stash.get(_FAILURES, {})
        if call.when == "call" and report.failed and call.excinfo and call.excinfo.value in failures.values():
            pictures = {
                rank: item.repr_failure(pytest.ExceptionInfo.from_exception(error))
                for rank, error in failures.items()
            }
            outcomes = {rank: failure_of(picture, str(picture)) for rank, picture in pictures.items()}
            report.longrepr = MergedFailure(outcomes, pictures)
        return report


def _run_on_ranks(item: pytest.Item, count: int, test: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Run the test with each rank's own world; raise the error or skip of the test as a whole."""
    __tracebackhide__ = True

    def body(world: World) -> BaseException | None:
        __tracebackhide__ = True
        try:
            with ExitStack() as stack:
                values: dict[Plan, Any] = {}
                for fixture in getattr(item, "funcargs", {}).values():
                    value_on_rank(fixture, values, stack)
                test(**{name: value_on_rank(fixture, values, stack) for name, fixture in arguments.items()})
        except pytest.skip.Exception as skipped:
            return skipped  # not a failure that must release the other ranks
        return None

    run = _without_expected(start_ranks(count, body, timeout_of(item)))
    if run.timeout is not None:
        failures = {rank: "".join(traceback.format_exception(error)) for rank, error in run.causes.items()}
        pytest.fail(f"{run.timeout}\n{merge_texts(failures, 'failure of ')}".rstrip(), pytrace=False)
    error = run.error()
    if error is not None:
        if count > 1:
            item.stash[_FAILURES] = run.causes
        raise error
    skips = [run.results[rank] for rank in range(count)]
    if all(skips):
        raise skips[0]


def _can_wait(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> bool:
    return fixturedef.scope == "function" and isinstance(request.node, pytest.Function) and uses_ranks(request.node)


def _without_expected(run: RankRun) -> RankRun:
    """Return the run without `pytest.xfail()` of some ranks if others failed unexpectedly."""
    unexpected = {
        rank: error for rank, error in run.causes.items() if not isinstance(error, pytest.xfail.Exception)
    }
    return dataclasses.replace(run, errors=unexpected) if unexpected else run
