"""The progress line of a run, with its columns: redrawn on a terminal, or else once for each tenth of the run.

━━━━━━━━━━━━━╸━━━━━━━━━━  step 180/250  loss 2.0312  17,512 tokens/s  communication  9 %  0:00:22
"""

from __future__ import annotations

import sys
import time
from typing import Literal, TextIO

from .metrics import StepMetrics
from .terminal import terminal_width

_PLAIN_LINES = 10
_REDRAW_SECONDS = 0.1


class SilentProgress:
    """A display that shows nothing; the base of the others."""

    def update(self, metrics: StepMetrics) -> None:
        """Show a completed step."""

    def note(self, text: str) -> None:
        """Print a text that stays."""

    def close(self) -> None:
        """Leave the terminal as it was; may be called twice."""


class PlainProgress(SilentProgress):
    """A display that prints the first step, each tenth of the run and the last; each line is flushed.

    Args:
        steps: Steps of the whole run.
        stream: The output.
    """

    def __init__(self, steps: int, stream: TextIO) -> None:
        self._steps = steps
        self._stream = stream

    def update(self, metrics: StepMetrics) -> None:
        """Print a line if this step completes a tenth."""
        tenths = metrics.step * _PLAIN_LINES // self._steps
        if metrics.step == 1 or tenths > (metrics.step - 1) * _PLAIN_LINES // self._steps:
            self.note(_text(metrics, self._steps))

    def note(self, text: str) -> None:
        """Print and flush."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        # generated text can hold anything, and the stream may be plain ASCII
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


class LiveProgress(SilentProgress):
    """A display that redraws one line at most ten times a second, on the calling thread.

    Args:
        steps: Steps of the whole run.
        stream: The output, assumed to be a terminal.
        width: Columns of the terminal; None means those of the environment, or 80.
    """

    def __init__(self, steps: int, stream: TextIO, width: int | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._steps = steps
        self._drawn = 0.0
        columns = BarColumn(bar_width=None), TextColumn("{task.fields[text]}", markup=False), TimeElapsedColumn()
        console = Console(file=stream, force_terminal=True, width=width)
        self._bar = Progress(*columns, console=console, auto_refresh=False, expand=True)
        self._task = self._bar.add_task("", total=steps, text="starting")
        self._bar.start()
        self._bar.console.show_cursor()  # a hidden cursor would stay hidden if a launcher killed this process

    def update(self, metrics: StepMetrics) -> None:
        """Redraw, unless the last time is less than a tenth of a second ago."""
        now = time.monotonic()
        if now - self._drawn > _REDRAW_SECONDS or metrics.step == self._steps:
            self._drawn = now
            text = _text(metrics, self._steps)
            self._bar.update(self._task, completed=metrics.step, text=text, refresh=True)

    def note(self, text: str) -> None:
        """Print above the line."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Draw the line for the last time and leave it standing."""
        self._bar.stop()


def make_progress(
    mode: Literal["auto", "live", "plain", "off"], steps: int, stream: TextIO | None = None
) -> SilentProgress:
    """Make the progress display of a mode; local.

    Args:
        mode: `"live"` redraws, `"plain"` prints a line each tenth of the run, `"off"` nothing, `"auto"` is
            `"live"` if a terminal shows the stream, directly or through the launcher, and else `"plain"`.
        steps: Steps of the whole run.
        stream: The output; None means `sys.stdout`.
    """
    stream = sys.stdout if stream is None else stream
    if mode == "off":
        return SilentProgress()
    width = None if mode == "plain" else terminal_width(stream)
    if mode == "live" or width is not None:
        return LiveProgress(steps, stream, width)
    return PlainProgress(steps, stream)


def _text(metrics: StepMetrics, steps: int) -> str:
    return (
        f"step {metrics.step:{len(str(steps))}}/{steps}  loss {metrics.loss:.4f}  "
        f"{metrics.tokens_per_second:,.0f} tokens/s  communication {100 * metrics.communication:2.0f} %"
    )
