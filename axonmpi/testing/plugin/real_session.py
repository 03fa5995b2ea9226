"""The session under `mpirun`: all ranks run each test together and agree on its outcome.

It has the world, the channel for verdicts, the monitor that ends the job when a rank is late, and the smaller
worlds that tests run in. These are kept from test to test, but not after a failed test, which may have left
messages in them.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from ... import comm
from ...backends import MpiBackend
from ...errors import CommunicatorError, LaunchError
from ...groups.world import World
from ...launch.exit import end_job, expect_common_end
from .markers import positive_seconds
from .monitor import Monitor
from .verdict_channel import SessionStoppedError, VerdictChannel

END_OF_SESSION = "the end of the session"


class RealSession:
    """The session, which starts MPI; `close` ends it.

    Args:
        config: pytest's configuration.
        stream: File descriptor of the terminal.

    Attributes:
        world: All ranks.
        limit: See `Monitor.limit`.
        stopped: Whether a verdict ended the session early, so that the ranks are no longer in step.
    """

    def __init__(self, config: pytest.Config, stream: int) -> None:
        self._config = config
        self._stream = stream
        self._grace = positive_seconds(config, "axonmpi_grace")
        self._timeout = positive_seconds(config, "axonmpi_timeout")
        self._worlds: dict[int, World | None] = {}
        self.stopped = False
        self.world = _start()
        backend = self.world.default_group.backend
        assert isinstance(backend, MpiBackend)
        self._channel = VerdictChannel(backend.mpi_comm.Dup())
        self._monitor = Monitor(self.world.rank, stream, self._captured, self._earlier_failures)
        self.limit = self._monitor.limit

    def subworld(self, count: int) -> World | None:
        """Return a world of the first `count` ranks, None on the others; collective."""
        if count not in self._worlds:
            self._worlds[count] = self.world.subworld(count)
        return self._worlds[count]

    def forget_subworlds(self) -> None:
        """Use new worlds from now on; on all ranks together."""
        self._worlds.clear()

    def agree(self, topic: str, own: Any, merge: Callable[[dict[int, Any]], Any], failure: str = "") -> Any:
        """Exchange results for a verdict, see `VerdictChannel`; a failed rank waits a short time only.

        Args:
            topic: The point of the session.
            own: This rank's result.
            merge: Makes the verdict on rank 0.
            failure: Text of this rank's failure, if it has failed.
        """
        reason = (
            f"{topic}: rank {self.world.rank} failed, and other ranks did not come to the end "
            f"within {self._grace:g} s"
        )
        with self.limit(self._grace if failure else math.inf, reason, failure):
            try:
                return self._channel.agree(topic, own, merge)
            except SessionStoppedError:
                self.stopped = True
                raise

    def together_at(self, point: str) -> AbstractContextManager[None]:
        """Return a limit of the time in which all ranks have to come to the same point of the session."""
        return self.limit(self._timeout, f"the ranks did not come to {point} together")

    def close(self) -> None:
        """End the monitor and MPI; collective unless `stopped`."""
        with self.together_at(END_OF_SESSION):
            try:
                self.world.close()
            except CommunicatorError as error:  # an operation of a failed test will never end
                self._flush()
                os.write(self._stream, f"axonmpi: {error}; the job is ended\n".encode())
                end_job(1)
            self._flush()  # whatever happens from now on, the report is out
            if not self.stopped:  # ranks that end at different times look like failed ones to a launcher
                self._channel.agree("end of MPI", None, lambda results: None)
                expect_common_end()
        self._monitor.stop()
        if not self.stopped:
            self._channel.comm.Free()
        os.close(self._stream)

    def _flush(self) -> None:
        if self._config.pluginmanager.has_plugin("terminalreporter"):
            self._config.get_terminal_writer().flush()

    def _earlier_failures(self) -> str:
        """Return the failures that pytest would print at the end of the session."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        stats = {} if reporter is None else reporter.stats
        reports = [*stats.get("error", ()), *stats.get("failed", ())]
        return "\n".join(
            f"\n==== earlier: {report.when} of {report.nodeid} ====\n{report.longreprtext.rstrip()}"
            for report in reports
        )

    def _captured(self) -> str:
        """Return this rank's output in the current test."""
        self._flush()  # another rank may end the job
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        try:
            return "".join(capture.read_global_capture())
        except (AttributeError, AssertionError, ValueError, OSError):  # nothing is captured at the moment
            return ""


def _start() -> World:
    """Start MPI, but keep pytest's hook for exceptions in threads."""
    hook = threading.excepthook
    try:
        return comm.init_process_group("mpi")
    except LaunchError as error:
        raise pytest.UsageError(str(error)) from error
    finally:
        threading.excepthook = hook
