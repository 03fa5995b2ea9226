"""What commands print: once for all ranks, wherever it goes; and how they end when a person ends them."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from types import SimpleNamespace

import mpi4py
import pytest
from helpers.compare import assert_said
from helpers.limits import limit

from axonmpi.cli import main
from axonmpi.launch import exit as exits
from axonmpi.launch.launcher_variables import without_launcher_variables
from axonmpi.testing import launch
from axonmpi.testing.mpirun import find_mpirun, mpirun_command

TINY = ["train", "--layers=1", "--width=16", "--heads=2", "--data-limit=0.1", "--held-out-sequences=2", "--no-plot"]
CHART = ["axonmpi", "chart", "--stages=2", "--micro-batches=2"]
PATIENT = """
from axonmpi.launch import exit as exits
exits.CAUSE_SECONDS = exits.READ_SECONDS = 60.0  # rank 0 may be slow to print its error and to end the job
"""
COMMAND = [sys.executable, "-c", PATIENT + "from axonmpi.cli import main\nraise SystemExit(main())\n"]
ALONE = {**without_launcher_variables(os.environ), "OMP_NUM_THREADS": "1"}


def code_of(*arguments):
    try:
        return main(*arguments)
    except SystemExit as end:
        return end.code


# ---- on one rank of several --------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch):
    """For how long this process has waited for another one to print its error."""
    found = []
    monkeypatch.setattr(exits, "time", SimpleNamespace(sleep=found.append))
    return found


@pytest.fixture(params=[0, 1])
def rank(request, monkeypatch):
    """The number of this process, which a launcher seems to have started as one of two."""
    for name, value in {"SIZE": 2, "RANK": request.param, "LOCAL_RANK": request.param}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    return request.param


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fly", "unknown command 'fly'"),
        ("train --stepz 3", ": --stepz"),
        ("bench overhead --blocks x", "expected a positive number, got 'x'"),
        ("chart --stages 3 --micro-batches 2 --chunks 2", "--stages: expected a multiple"),
        ("doctor --cure", "unrecognized arguments: --cure"),
        ("why --not", "unrecognized arguments: --not"),
        ("top --interval 0", "argument --interval: expected a positive number of seconds, got '0'"),
    ],
)
def test_a_usage_error_is_told_by_the_first_rank(arguments, message, rank, waits, capsys):
    assert code_of(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count(message), waits) == ("", 1 - rank, [exits.FIRST_SECONDS] * rank)


def test_a_launch_without_mpi_is_told_by_the_first_rank(rank, waits, tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(mpi4py, "MPI", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    for name, value in {"argv": ["axonmpi", *TINY, f"--out={tmp_path}"], "excepthook": sys.excepthook}.items():
        monkeypatch.setattr(sys, name, value)
    with pytest.raises(Exception, match="2 ranks were launched") as caught:
        main()
    sys.excepthook(caught.type, caught.value, caught.tb)
    said = "" if rank else f"axonmpi train: error: {caught.value}\n"
    assert (*capsys.readouterr(), waits) == ("", said, [exits.FIRST_SECONDS] * rank)


def test_a_launch_that_cannot_work_is_told_once():
    program = PATIENT + "import axonmpi\naxonmpi.init_process_group()\n"
    result = launch(2, program, timeout=limit(60), env={"OMP_NUM_THREADS": "1", "WORLD_SIZE": "3"})
    assert result.returncode not in (0, None)
    assert_said(result.stderr, "unset WORLD_SIZE", "LaunchError: ", times=1)


# ---- where it goes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("chart --stages 2 --micro-batches 2", "1F1B on 2 ranks"), ("train --help", "--sequence-length")],
    ids=["chart", "train"],
)
def test_variables_left_over_silence_no_command(arguments, shown, monkeypatch, capsys):
    """Also on a terminal of one column."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "COLUMNS": "1"}.items():
        monkeypatch.setenv(name, value)
    assert code_of(arguments.split()) == 0
    out, err = capsys.readouterr()
    assert (shown in out, err) == (True, "")


def test_output_that_nobody_reads_ends_a_command_in_silence(tmp_path):
    training = [*COMMAND, *TINY, "--progress=plain", "--steps=5000"]
    line = ["bash", "-o", "pipefail", "-c", '"$@" | head -n 1', "bash", *training]
    ended = subprocess.run(
        line, env=ALONE, cwd=tmp_path, capture_output=True, text=True, timeout=limit(60), check=False
    )
    assert ended.stdout.startswith("a byte-level GPT")
    assert (ended.returncode, ended.stderr) == (141, "")


def test_an_output_that_is_full_is_said_in_one_line(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        assert chart(monkeypatch, full) == 1
    assert capsys.readouterr().err == "axonmpi chart: error: cannot write the output: No space left on device\n"


def test_a_closed_output_is_no_error(monkeypatch):
    assert chart(monkeypatch, None) == 0
    sys.stdout.close()


def chart(monkeypatch, output):
    """Run `axonmpi chart` with this output of the process, and return the exit code."""
    for name, value in {"argv": CHART, "excepthook": sys.excepthook, "stdout": output}.items():
        monkeypatch.setattr(sys, name, value)
    return code_of()


# ---- ctrl-C ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_training_with_one_line_and_the_cursor_shown(tmp_path, ranks):
    launcher, settings = mpirun_command(find_mpirun(None), ranks) if ranks > 1 else ([], {})
    training = [*COMMAND, *TINY, "--steps=100000", "--sample-length=0", f"--out={tmp_path}"]
    before, after, code = on_a_terminal([*launcher, *training], ALONE | settings, until="tokens/s", then=b"\x03")
    assert (code != 0, "Traceback" in after) == (True, False)
    by_launcher = "Abort(", "[mpiexec"
    lines = [line for line in after.splitlines() if "interrupted" in line and not line.startswith(by_launcher)]
    # Open MPI kills its ranks, which then say nothing
    assert len(lines) == (1 if ranks == 1 or "[mpiexec" in after else 0)
    for shown in (before, before + after):
        assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


def on_a_terminal(command, env, *, until, then):
    """Return what a command shows on a terminal until and after keys are pressed, and its exit code."""
    terminal, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with subprocess.Popen(
        command,
        env=env,
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
        preexec_fn=in_the_foreground,
    ) as process:
        os.close(its_end)
        hangs = threading.Timer(limit(60), process.kill)
        hangs.start()
        before = after = ""
        while until not in before:
            before += os.read(terminal, 65536).decode(errors="replace")
        os.write(terminal, then)
        while chunk := read_or_nothing(terminal):
            after += chunk
    hangs.cancel()
    os.close(terminal)
    return before, after, process.returncode


def in_the_foreground():
    """Have keys reach this process, also where the tests run in the background of a shell, which ignores ctrl-C."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_or_nothing(terminal):
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:  # nobody has it open any more
        return ""
