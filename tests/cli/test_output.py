"""What commands print: once for all ranks, wherever it goes; and how they end when a person ends them."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest

from axonmpi.cli import main
from axonmpi.launch import exit as exits
from axonmpi.launch.variables import without_launcher_variables
from axonmpi.testing import launch
from axonmpi.testing.mpirun import find_mpirun, mpirun_command

TINY = ["train", "--layers=1", "--width=16", "--heads=2", "--data-limit=0.1", "--held-out-sequences=2", "--no-plot"]


def axonmpi(*arguments):
    return [sys.executable, "-m", "axonmpi", *arguments]


def variables(**more):
    return {**without_launcher_variables(os.environ), "OMP_NUM_THREADS": "1", **more}


def shell(command, *arguments, **env):
    """Run a line of shell in which "$@" is the command `axonmpi` with these arguments."""
    line = ["bash", "-o", "pipefail", "-c", command, "bash", *axonmpi(*arguments)]
    return subprocess.run(line, env=variables(**env), capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("rank", [0, 1])
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
def test_a_usage_error_is_told_by_the_first_rank(arguments, message, rank, monkeypatch, capsys):
    monkeypatch.setattr(exits, "FIRST_SECONDS", 0.0)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    assert code_of(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count(message)) == ("", 1 - rank)


def code_of(arguments):
    try:
        return main(arguments.split())
    except SystemExit as end:
        return end.code


def test_a_usage_error_of_a_job_is_told_once():
    result = launch(2, "-m", "axonmpi", "train", "--stepz", "3", env={"OMP_NUM_THREADS": "1"})
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count(": --stepz") == 1


@pytest.mark.parametrize(
    ("program", "env", "message"),
    [
        (["-m", "axonmpi", *TINY], {"MPI4PY_LIBMPI": "/gone.so"}, "2 ranks were launched"),  # before MPI starts
        (["import axonmpi\naxonmpi.init_process_group()\n"], {"WORLD_SIZE": "3"}, "unset WORLD_SIZE"),  # after
    ],
    ids=["command", "script"],
)
def test_a_launch_that_cannot_work_is_told_once(program, env, message):
    result = launch(2, *program, env={"OMP_NUM_THREADS": "1", **env})
    assert result.returncode not in (0, None)
    assert result.stderr.count(message) == 1
    assert result.stderr.count("LaunchError: ") == (len(program) == 1)  # a command shows no traceback


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("chart --stages 2 --micro-batches 2", "1F1B on 2 ranks"), ("train --help", "--sequence-length")],
    ids=["chart", "train"],
)
def test_variables_left_over_silence_no_command(arguments, shown, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert code_of(arguments) == 0
    out, err = capsys.readouterr()
    assert shown in out
    assert err == ""


def test_output_that_nobody_reads_ends_a_command_in_silence():
    ended = shell('cd "$(mktemp -d)" && "$@" | head -n 1', *TINY, "--progress=plain", "--steps=5000")
    assert ended.stdout.startswith("a byte-level GPT")
    assert (ended.returncode, ended.stderr) == (141, "")


def test_an_output_that_is_full_is_said_in_one_line():
    ended = shell('"$@" >/dev/full', "chart", "--stages=2", "--micro-batches=2")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "axonmpi chart: error: cannot write the output: No space left on device" in ended.stderr


def test_help_is_shown_in_one_column():
    ended = shell('"$@"', "train", "--help", COLUMNS="1")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "--sequence-length" in ended.stdout


def test_a_closed_output_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["axonmpi", "chart", "--stages=2", "--micro-batches=2"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main() == 0
        sys.stdout.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_training_with_one_line_and_the_cursor_shown(tmp_path, ranks):
    launcher, settings = mpirun_command(find_mpirun(None), ranks) if ranks > 1 else ([], {})
    command = [*launcher, *axonmpi(*TINY, "--steps=100000", "--sample-length=0", f"--out={tmp_path}")]
    before, after, code = on_a_terminal(command, variables(**settings), until="tokens/s", then=b"\x03")
    assert code != 0
    assert "Traceback" not in after
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
        before = after = ""
        while until not in before:
            before += os.read(terminal, 65536).decode(errors="replace")
        os.write(terminal, then)
        while chunk := read_or_nothing(terminal):
            after += chunk
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
