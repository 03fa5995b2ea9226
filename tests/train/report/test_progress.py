"""What a run shows, and whether anybody sees it."""

import fcntl
import io
import os
import struct
import termios

import pytest

from axonmpi.train.report.metrics import StepMetrics
from axonmpi.train.report.progress import LiveProgress, PlainProgress, SilentProgress, make_progress
from axonmpi.train.report.terminal import terminal_width

NUMBERS = "loss 2.5000  12,346 tokens/s  communication 26 %"


def metrics(step, loss=2.5):
    return StepMetrics(step, loss, 1e-3, 0.5, 12345.6, 0.256, 1.0)


class Flushed(io.StringIO):
    """Keeps what has been flushed, which is what a pipe has passed on."""

    shown = ""

    def flush(self):
        self.shown = self.getvalue()


@pytest.mark.parametrize(("steps", "expected"), [(300, [1, *range(30, 301, 30)]), (3, [1, 2, 3]), (1, [1])])
def test_plain_lines_come_each_tenth_and_are_flushed(steps, expected):
    stream, shown = Flushed(), []
    progress = PlainProgress(steps, stream)
    for step in range(1, steps + 1):
        progress.update(metrics(step))
        if len(stream.shown.splitlines()) > len(shown):
            shown.append(step)
    assert (shown, stream.shown.splitlines()[-1]) == (expected, f"step {steps}/{steps}  {NUMBERS}")


def test_plain_lines_survive_a_stream_that_cannot_show_everything():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainProgress(1, stream).note("caf\u00e9 \u2502")
    stream.seek(0)
    assert stream.read() == "caf? ?\n"


def test_the_live_line_is_redrawn_in_place():
    stream = io.StringIO()
    progress = LiveProgress(2, stream, width=100)
    progress.update(metrics(1))
    progress.note("a note [not markup]")
    progress.update(metrics(2, loss=1.25))
    progress.close()
    progress.close()
    expected = (f"step 1/2  {NUMBERS}", "step 2/2  loss 1.2500", "a note [not markup]", "\x1b[2K")
    assert [part for part in expected if part not in stream.getvalue()] == []


def test_modes_choose_the_progress():
    kinds = {"auto": PlainProgress, "plain": PlainProgress, "off": SilentProgress, "live": LiveProgress}
    made = {mode: make_progress(mode, 3, io.StringIO()) for mode in kinds}
    for progress in made.values():
        progress.close()
    assert {mode: type(progress) for mode, progress in made.items()} == kinds


@pytest.fixture
def terminal():
    """Yield the name of a terminal of 77 columns and a stream that writes to it."""
    main, own = os.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 77, 0, 0))
    with os.fdopen(own, "w") as stream:
        yield os.ttyname(own), stream
    os.close(main)


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield stream
    os.close(reading)


def describe(folder, chain, own_output, stream):
    """Write what the system would say of this process and its ancestors: (name, output) from the parent up."""
    own = folder / "self" / "fd"
    own.mkdir(parents=True)
    os.symlink(own_output, own / str(stream.fileno()))
    os.symlink(own_output, own / "1")
    pids = [os.getppid(), *range(10_000_001, 10_000_000 + len(chain)), 1]
    for (name, output), pid, parent in zip(chain, pids, pids[1:], strict=False):
        (folder / str(pid) / "fd").mkdir(parents=True)
        (folder / str(pid) / "comm").write_text(name + "\n")
        (folder / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 0 0\n")
        os.symlink(output, folder / str(pid) / "fd" / "1")
    return folder


@pytest.fixture(autouse=True)
def _parent(monkeypatch):
    """Have a parent, also as the first process of a container."""
    monkeypatch.setattr(os, "getppid", lambda: 10_000_000)


def test_a_terminal_and_a_pipe_of_our_own(tmp_path, terminal, pipe):
    nothing = tmp_path / "none"
    widths = [terminal_width(stream, nothing) for stream in (terminal[1], pipe, io.StringIO())]
    assert widths == [77, None, None]


def test_behind_a_launcher_its_output_counts(tmp_path, terminal, pipe):
    name, stream = terminal
    for number, (chain, own_output, written, width) in enumerate(
        [
            ([("hydra_pmi_proxy", "pipe:[5]"), ("mpirun", name), ("bash", name)], "pipe:[9]", pipe, 77),
            # whatever the launcher gives its ranks
            ([("prterun", "/home/user/log"), ("bash", name)], name, stream, None),
            # a launcher on another node
            ([("prted", name), ("sshd", "pipe:[3]")], name, stream, None),
            # a script between launcher and us may collect our output, or pass it on
            ([("bash", "pipe:[8]"), ("prterun", name)], "pipe:[9]", pipe, None),
            ([("bash", "pipe:[8]"), ("prterun", name)], "pipe:[8]", pipe, 77),
        ]
    ):
        assert terminal_width(written, describe(tmp_path / str(number), chain, own_output, written)) == width, chain
