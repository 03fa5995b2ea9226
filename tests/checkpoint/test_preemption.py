"""Early stops: signals, time limits, and one answer on all ranks at the same step."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.compare import refused
from helpers.operation_log import logged

import axonmpi as ax

USR1, USR2, TERM = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM


@pytest.fixture(autouse=True)
def handlers_are_as_before(monkeypatch):
    """Whatever a guard does, outside of a job."""
    for name in ("SLURM_JOB_END_TIME", "AXONMPI_STOP_SIGNAL"):
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in (USR1, USR2, TERM)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


def alone(**settings):
    return ax.PreemptionGuard(group=ax.ProcessGroup.mock(), **settings)


# ---- one answer -------------------------------------------------------------------------------------------------


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 2, 4)
def test_all_ranks_stop_at_the_same_step_whichever_was_told(world):
    for teller in range(world.size):
        guard, answers = ax.PreemptionGuard(()), []
        for step in range(4):
            if (step, world.rank) == (2, teller):
                guard.request_stop()
            answers.append(guard.stop_requested())
        assert ax.all_gather_object(answers) == [[False, False, True, True]] * world.size


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 2, 4)
def test_the_flag_travels_with_a_reduction_that_happens_anyway(world):
    for op in (ax.ReduceOp.SUM, ax.ReduceOp.MAX, ax.ReduceOp.AVERAGE):
        guard, answers = ax.PreemptionGuard(()), []
        for step in range(4):
            if step == 2 and world.rank == world.size - 1:
                guard.request_stop()
            total = torch.tensor([0.5, guard.vote()])
            ax.all_reduce(total, op)
            answers.append(guard.decide(total[1]))
        assert answers == [False, False, True, True]


@pytest.mark.ranks(2)
def test_once_decided_nothing_more_is_sent(world):
    guard = ax.PreemptionGuard(())
    assert not guard.stop_requested()
    guard.request_stop()
    with logged(world) as log:
        assert [guard.stop_requested() for _ in range(3)] == [True] * 3
    assert [nbytes for _, nbytes in log.calls] == [1]


@pytest.mark.ranks(4)
def test_ranks_of_a_group_stop_for_themselves(world):
    guard = ax.PreemptionGuard((), group=world.partition([[0, 1], [2, 3]]))
    if world.rank == 3:
        guard.request_stop()
    assert guard.stop_requested() == (world.rank >= 2)


# ---- signals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "settings"), [(TERM, {}), (USR1, {}), (signal.SIGINT, {"signals": [signal.SIGINT]})]
)
def test_signals_only_set_the_flag_however_often_they_come(number, settings):
    with alone(**settings) as guard:
        assert not guard.stop_requested()
        for _ in range(3):
            signal.raise_signal(number)
        assert guard.stop_requested()
        signal.raise_signal(number)


def test_the_environment_names_another_signal(monkeypatch):
    for name in ("SIGUSR2", "usr2"):
        monkeypatch.setenv("AXONMPI_STOP_SIGNAL", name)
        with alone() as guard:
            assert signal.getsignal(USR1) == signal.SIG_DFL
            signal.raise_signal(USR2)
            assert guard.stop_requested()
    for name in ("KILL", "USR3", "10"):
        monkeypatch.setenv("AXONMPI_STOP_SIGNAL", name)
        refused(ValueError, (alone, f"AXONMPI_STOP_SIGNAL: .* such as USR1, got '{name}'"))


def test_a_handler_that_was_there_is_called_and_comes_back():
    heard = []

    def earlier(number, frame):
        heard.append(number)

    before = signal.signal(USR1, earlier)
    try:
        with alone() as outer, alone() as inner:
            signal.raise_signal(USR1)
            assert (outer.stop_requested(), inner.stop_requested(), heard) == (True, True, [USR1])
        assert signal.getsignal(USR1) is earlier
        guard = alone(signals=[USR1])
        signal.signal(USR1, signal.SIG_IGN)
        for _ in range(2):
            guard.close()
        assert signal.getsignal(USR1) == signal.SIG_IGN
    finally:
        signal.signal(USR1, before)


def ended_by(number: int) -> int:
    """Fork a process that gets a signal, and then SIGKILL; return the one that ends it."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"!")
        while True:
            signal.pause()
    os.read(ready, 1)
    os.kill(child, number)
    os.kill(child, signal.SIGKILL)
    os.close(ready)
    os.close(tell)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.skipif(sys.platform != "linux", reason="the others do not fork by default")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_processes_end_at_sigterm_and_ignore_the_signal_for_the_job():
    with alone():
        assert [ended_by(number) for number in (TERM, USR1)] == [TERM, signal.SIGKILL]


# ---- time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "job_ends_in", "margin", "stops_in"),
    [
        (100, None, None, 90),
        (3600, None, None, 3540),
        (3600, 50, None, 3540),
        (100, None, 30, 70),
        (None, 1000, None, 940),
        (None, 1000, 400, 600),
        (None, -5, None, -5),  # the job is late in ending
    ],
)
def test_the_time_at_which_the_guard_stops(monkeypatch, limit, job_ends_in, margin, stops_in):
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    if job_ends_in is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(1_000_000 + job_ends_in))
    guard = alone(signals=(), time_limit=limit, margin=margin)
    now = 50 + stops_in - 1
    assert not guard.stop_requested()
    now = 50 + stops_in
    assert guard.stop_requested()


def test_without_a_limit_there_is_no_end(monkeypatch):
    guard = alone(signals=(), margin=30)
    monkeypatch.setattr(time, "monotonic", lambda: 1e12)
    assert not guard.stop_requested()


# ---- what is refused --------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused_and_leave_no_handler():
    refused(
        (ValueError, TypeError),
        (lambda: alone(signals=["TERM"]), r"signals: expected numbers of signals, .* got \['TERM'\]"),
        (lambda: alone(signals=USR1), "signals: expected numbers of signals"),
        (lambda: alone(signals=[USR1, signal.SIGKILL]), "SIGKILL cannot be handled: Invalid argument"),
        (lambda: alone(time_limit=0), "time_limit: expected a positive number of seconds"),
        (lambda: alone(time_limit=10, margin=10), "margin: .* 0 and less than time_limit = 10, got 10"),
        (lambda: alone(margin=-1), "margin: expected seconds, at least 0, got -1"),
        (
            lambda: ax.PreemptionGuard((), group=ax.World.mock(1)),
            "group: expected an axonmpi.ProcessGroup or None, got World",
        ),
    )


def test_signals_need_the_main_thread():
    def make():
        refused(ValueError, (alone, r"main thread .* this is 'worker_0': make the guard there"))
        return alone(signals=())

    with ThreadPoolExecutor(1, "worker") as pool:
        assert not pool.submit(make).result().stop_requested()
