"""What commands print: once for all ranks, wherever it goes; and how they end when a person ends them."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from axonmpi import environment
from axonmpi.testing import launch
from axonmpi.testing.mpirun import find_mpirun, mpirun_command

LEFT_OVER = {"RANK": "1", "WORLD_SIZE": "2"}
TINY = ["train", "--layers=1", "--width=16", "--heads=2", "--data-limit=0.1", "--held-out-sequences=2", "--no-plot"]


def axonmpi(*arguments):
    return [sys.executable, "-m", "axonmpi", *arguments]


def variables(**more):
    return {**environment.without_launcher_variables(os.environ), "OMP_NUM_THREADS": "1", **more}


def shell(command, *arguments, **env):
    """Run a line of shell in which "$@" is the command `axonmpi` with these arguments."""
    line = ["bash", "-o", "pipefail", "-c", command, "bash", *axonmpi(*arguments)]
    return subprocess.run(line, env=variables(**env), capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "unknown command 'fly'"),
        (["train", "--stepz", "3"], ": --stepz"),
        (["bench", "overhead", "--blocks", "x"], "expected a positive number, got 'x'"),
        (["chart", "--stages", "3", "--micro-batches", "2", "--chunks", "2"], "--stages: expected a multiple"),
        (["doctor", "--cure"], "unrecognized arguments: --cure"),
    ],
    ids=["command", "train", "bench", "chart", "doctor"],
)
def test_a_usage_error_is_told_once(arguments, message):
    result = launch(2, "-m", "axonmpi", *arguments, env={"OMP_NUM_THREADS": "1"})
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count(message) == 1


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"MPI4PY_LIBMPI": "/gone.so"}, "2 ranks were launched"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "the launcher and MPI disagree"),
    ],
    ids=["before MPI starts", "after"],
)
@pytest.mark.parametrize("program", [["-m", "axonmpi", *TINY], ["import axonmpi\naxonmpi.init_process_group()\n"]])
def test_a_launch_that_cannot_work_is_told_once(program, env, message):
    result = launch(2, *program, env={"OMP_NUM_THREADS": "1", **env})
    assert result.returncode not in (0, None)
    assert result.stderr.count(message) == 1
    assert result.stderr.count("LaunchError: ") == (len(program) == 1)  # a command shows no traceback


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["doctor"], 1, "PROBLEM: the launcher and MPI disagree: by the variables of RANK/WORLD_SIZE"),
        (["chart", "--stages", "2", "--micro-batches", "2"], 0, "1F1B on 2 ranks"),
        (["train", "--help"], 0, "--sequence-length"),
    ],
    ids=["doctor", "chart", "train"],
)
def test_variables_left_over_silence_no_command(arguments, code, shown):
    ended = shell('"$@"', *arguments, **LEFT_OVER)
    assert (ended.returncode, ended.stderr) == (code, "")
    assert shown in ended.stdout


def test_the_doctor_speaks_where_left_over_variables_call_no_rank_the_first():
    result = launch(2, "-m", "axonmpi", "doctor", env={"OMP_NUM_THREADS": "1", **LEFT_OVER})
    assert result.returncode == 1
    assert result.stdout.count("PROBLEM: on ranks 0 the launcher and MPI disagree") == 1


def test_output_that_nobody_reads_ends_a_command_in_silence():
    ended = shell('"$@" | head -n 1', *TINY, "--progress=plain", "--out=/dev/null/none", "--steps=50")
    assert (ended.returncode, ended.stdout) == (2, "")  # refused: the shell works as expected
    ended = shell('cd "$(mktemp -d)" && "$@" | head -n 1', *TINY, "--progress=plain", "--steps=5000")
    assert ended.stdout.startswith("a byte-level GPT")
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["doctor"], ["chart", "--stages=2", "--micro-batches=2"]])
def test_a_closed_output_is_no_error(arguments):
    ended = shell('"$@" >&-', *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_output_of_few_letters_loses_no_figures():
    flags = ["--ranks=1", "--blocks=1", "--sizes=4B", "--dtypes=float32"]
    ended = shell('"$@"', "bench", "collectives", *flags, PYTHONIOENCODING="ascii")
    assert ended.returncode == 0, ended.stderr
    assert "?s" in ended.stdout  # the sign of a microsecond


@pytest.mark.cold
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
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
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


def read_or_nothing(terminal):
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:  # nobody has it open any more
        return ""
