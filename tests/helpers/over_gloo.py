"""The stock program of tests/interop over this library's backend and over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from axonmpi.testing import launch
from helpers.nodes import Nodes

PROGRAM = Path(__file__).parents[1] / "interop" / "stock.py"
QUIET = {"PYTHONWARNINGS": "ignore"}
OVER_GLOO = """
import runpy, sys
from axonmpi.interop import launch_env
launch_env()
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def equals_gloo(ranks: int, parts: Sequence[str], folder: Path) -> None:
    """Check that parts of the program give what they give over gloo."""
    over_mpi = launch(ranks, PROGRAM, "axonmpi", folder / "mpi.pt", *parts, timeout=180, env=QUIET)
    assert over_mpi.returncode == 0, over_mpi.stderr
    over_gloo = launch(ranks, OVER_GLOO, PROGRAM, "gloo", folder / "gloo.pt", *parts, timeout=180, env=QUIET)
    assert over_gloo.returncode == 0, over_gloo.stderr
    _compare(parts, folder)


def equals_gloo_on_nodes(nodes: Nodes, ranks: Sequence[int], parts: Sequence[str], folder: Path) -> None:
    """Check that with so many ranks on each node."""
    nodes.run(ranks, str(PROGRAM), "axonmpi", str(folder / "mpi.pt"), *parts, timeout=120, env=QUIET)
    over_gloo = ("-c", OVER_GLOO, str(PROGRAM), "gloo", str(folder / "gloo.pt"))
    nodes.run(ranks, *over_gloo, *parts, timeout=120, env=QUIET)
    _compare(parts, folder)


def _compare(parts: Sequence[str], folder: Path) -> None:
    found, expected = torch.load(folder / "mpi.pt"), torch.load(folder / "gloo.pt")
    assert list(found) == list(parts)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
