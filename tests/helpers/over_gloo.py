"""The stock program of tests/interop: over this library's backend it gives what it gives over gloo."""

from collections.abc import Sequence
from pathlib import Path

from axonmpi.testing import launch
from helpers.limits import limit

PROGRAM = Path(__file__).parents[1] / "interop" / "stock.py"
QUIET = {"PYTHONWARNINGS": "ignore"}


def equals_gloo(ranks: int, parts: Sequence[str], folder: Path) -> None:
    """Check that parts of the program, or all, give what they give over gloo."""
    done = launch(ranks, PROGRAM, folder / "gloo", *parts, timeout=limit(120), env=QUIET)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all is well") == ranks
