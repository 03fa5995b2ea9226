"""What the tests of sharded models share: the models and references of the tests of data parallelism, and nodes."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "ddp"))

PLACEMENTS = {"one_node": "", "pairs": "2", "apart": "1"}
"""How many ranks believe that they share a node: all, two, none."""


@pytest.fixture(params=PLACEMENTS)
def placement(request, monkeypatch):
    """Let groups made in the test believe that their ranks are on so many nodes."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", PLACEMENTS[request.param])
    return request.param
