"""Pytest's hooks in ranks that `mpirun -n 4 pytest` has started: tests marked for four ranks run.

All ranks collect the same tests and run them in step. After each phase of a test (setup, call, teardown) rank 0
merges the ranks' outcomes into a verdict, so that `-x`, the exit code and the reports are the same on all ranks;
rank 0 prints. A rank that a test is not for only exchanges outcomes. A monitor ends the job when a rank is late.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from ...groups.process_group import ProcessGroup
from ...groups.world import World, current_world, set_process_world
from ...launch.launcher_variables import launched_ranks
from ...observe import write_to
from ..merged_texts import merge_texts
from .markers import is_for_all_ranks, marked_rank_count, timeout_of, uses_ranks
from .outcomes import FAILED, PASSED, apply_verdict, merge_outcomes, outcome_of
from .real_session import END_OF_SESSION, RealSession
from .verdict_channel import SessionEnd, SessionStoppedError, merge_collected

_ABOUT_OLD_FOLDERS = (
    r"ignore:\(rm_rf\) error removing:pytest.PytestWarning",
    "ignore:unclosed scandir iterator:ResourceWarning",
)
"""At the end every rank's pytest removes the same old temporary folders, and warns if another rank was quicker."""


class RealRanks:
    """Hooks that run tests on the ranks of an `mpirun`.

    Args:
        config: Of the session.
        unmarked: `"all"` or `"first"`: the ranks that run tests without a marker.
        stream: File descriptor of the terminal.
    """

    def __init__(self, config: pytest.Config, unmarked: str, stream: int) -> None:
        self._config = config
        for line in _ABOUT_OLD_FOLDERS:
            config.addinivalue_line("filterwarnings", line)
        self._unmarked = unmarked
        self._stream = stream
        write_to(stream)
        self._session: RealSession | None = None
        self._collection_errors: list[str] = []
        self._too_large = 0
        self._takes_part = True
        self._why_ended = ""
        self._world: World | None = None  # of the test, on its ranks
        self._groups_before: tuple[ProcessGroup | World, ...] = ()
        self._warnings: dict[str, None] = {}
        self._warnings_elsewhere = ""
        self.real_size = launched_ranks()

    @property
    def session(self) -> RealSession:
        """The session of all ranks, from its start."""
        assert self._session is not None
        return self._session

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.session.world.rank

    # ---- values of fixtures -----------------------------------------------------------------------------

    def rank_count(self, item: pytest.Item) -> int:
        """Return the number of ranks that the test runs on."""
        count = marked_rank_count(item)
        if count is not None:
            return count
        return self.real_size if self._unmarked == "all" or is_for_all_ranks(item) else 1

    def world(self, item: pytest.Item) -> World | None:
        """Return the value of the fixture `world`; None on ranks that the test is not for."""
        return self.session.subworld(self.rank_count(item))

    # ---- the session ------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Start MPI and silence all ranks but the first."""
        if session.config.pluginmanager.has_plugin("dsession"):
            raise pytest.UsageError(
                "pytest-xdist's -n and mpirun cannot be combined: each starts processes of its own; "
                "-n auto starts none under mpirun"
            )
        self._session = RealSession(self._config, self._stream)
        self.real_size = self._session.world.size
        if self._config.pluginmanager.hasplugin("pytest_mpi") and not self._config.getoption("only_mpi"):
            self._config.option.with_mpi = True
        if self.rank:
            self._be_quiet()

    def _be_quiet(self) -> None:
        """Leave the terminal, the cache and result files to rank 0."""
        manager = self._config.pluginmanager
        if manager.has_plugin("terminalreporter"):
            self._config.get_terminal_writer()._file = io.StringIO()
        if (cache := getattr(self._config, "cache", None)) is not None:
            vars(cache)["set"] = lambda key, value: None
        for plugin in manager.get_plugins():
            if "logfile" in getattr(plugin, "__dict__", {}):  # pytest's junitxml
                vars(plugin)["logfile"] = os.devnull

    def pytest_report_header(self) -> str:
        """Return the session's line about real ranks."""
        who = "all ranks run" if self._unmarked == "all" else "rank 0 runs"
        return f"axonmpi: {self.real_size} ranks under MPI; {who} tests without a rank marker"

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep the reason of this rank's early end."""
        self._why_ended = excinfo.exconly()

    def pytest_internalerror(self, excrepr: object) -> None:
        """Keep an error of the test runner itself, which only rank 0 prints."""
        self._why_ended = str(excrepr)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        """Keep a warning: pytest itself prints the warnings of rank 0 only."""
        seen = warning_message
        self._warnings[warnings.formatwarning(seen.message, seen.category, seen.filename, seen.lineno)] = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Merge the exit codes of the ranks."""
        if self.session.stopped:
            return
        topic = "end of the session" + (f": {self._why_ended}" if self._why_ended else "")
        end = SessionEnd(int(exitstatus), tuple(self._warnings))
        try:
            with self.session.together_at(END_OF_SESSION):
                session.exitstatus, self._warnings_elsewhere = self.session.agree(topic, end, _merge_ends)
        except SessionStoppedError as stopped:
            session.exitstatus = stopped.exit_code
            self._print(stopped.reason)

    def pytest_unconfigure(self) -> None:
        """End MPI."""
        if self._session is not None:
            self._session.close()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the number of tests for more ranks than there are, and the warnings of other ranks."""
        if self._warnings_elsewhere:
            terminalreporter.section("warnings on other ranks only", "=", yellow=True)
            terminalreporter.write_line(self._warnings_elsewhere)
        if self._too_large:
            terminalreporter.write_line(
                f"axonmpi: tests for more than {self.real_size} ranks were left out: {self._too_large}", yellow=True
            )

    def _print(self, text: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\naxonmpi: {text}", red=True)

    # ---- collection -------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests for more ranks than there are."""
        left_out = [item for item in items if (marked_rank_count(item) or 0) > self.real_size]
        if left_out:
            self._too_large = len(left_out)
            self._config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if (marked_rank_count(item) or 0) <= self.real_size]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep an error of the collection."""
        if report.failed:
            self._collection_errors.append(f"{report.nodeid}: {report.longreprtext}")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Check that all ranks have collected the same tests."""
        collected = [*self._collection_errors, *(item.nodeid for item in session.items)]
        try:
            with self.session.together_at("the end of the collection"):
                self.session.agree("collection", collected, merge_collected)
        except SessionStoppedError as stopped:
            reasons = () if self.rank else (stopped.reason,)
            raise pytest.UsageError(*reasons) from stopped

    # ---- running a test ---------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run the test on the ranks that it is for; the others only exchange outcomes."""
        count, seconds = self.rank_count(item), timeout_of(item)
        self._takes_part = self.rank < count
        if not self._takes_part:
            vars(item).update(setup=lambda: None, runtest=lambda: None)
        with ExitStack() as stack:
            stack.enter_context(self.session.limit(seconds, f"{item.nodeid} did not end within {seconds:g} s"))
            self._world = self.session.subworld(count) if uses_ranks(item) else None
            if self._world is not None:
                stack.enter_context(self._world.activate())
            elif count < self.real_size:
                stack.enter_context(_no_process_world())
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Keep the groups before the test, so that the test's own groups can be released."""
        self._groups_before = () if self._world is None else self._world.groups
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Merge the ranks' outcomes of a phase of the test."""
        report = yield
        own = outcome_of(report) if self._takes_part else None
        failure = own.with_output() if own is not None and own.kind == FAILED else ""
        try:
            verdict = self.session.agree(f"{report.when} of {item.nodeid}", own, merge_outcomes, failure)
        except SessionStoppedError as stopped:
            self._print(stopped.reason)
            pytest.exit("the ranks agreed to end the session", returncode=stopped.exit_code)
        apply_verdict(report, verdict, self.rank)
        if verdict.kind == FAILED:
            self.session.forget_subworlds()
        elif verdict.kind == PASSED and report.when == "call" and self._world is not None:
            # MPI libraries are limited to some thousand communicators.
            self._world.close_groups(keep=self._groups_before)
        return report


@contextmanager
def _no_process_world() -> Iterator[None]:
    """Take the default world away from a test that only rank 0 runs, as in a plain run."""
    world = current_world()
    set_process_world(None)
    try:
        yield
    finally:
        set_process_world(world)


def _merge_ends(ends: dict[int, SessionEnd]) -> tuple[int, str]:
    """Return the lowest failed rank's exit code, and the warnings that rank 0 has not had."""
    exit_code = next((ends[rank].exit_code for rank in sorted(ends) if ends[rank].exit_code), 0)
    seen = set(ends[0].warnings)
    elsewhere = {rank: "".join(text for text in end.warnings if text not in seen) for rank, end in ends.items()}
    return exit_code, merge_texts({rank: text for rank, text in elsewhere.items() if text})
