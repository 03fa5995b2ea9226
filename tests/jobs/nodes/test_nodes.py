"""Ranks on several nodes: tests of the suite, and the operations of torch.distributed, between real nodes."""

from __future__ import annotations

from helpers import TESTS
from helpers.nodes import Nodes

TRAINING = (
    "jobs/nodes/on_nodes.py",
    "conformance/test_mismatch.py",
    "ddp/test_training.py",
    "fsdp/test_training.py",
    "pipeline/test_training.py",
    "tensor/test_parallelize.py",
)


def test_the_suite_passes_on_two_ranks_of_each_of_two_nodes(nodes: Nodes, seed: int) -> None:
    """Ranks are dealt out in turn, so that the next rank is on another node."""
    files = [str(TESTS / name) for name in TRAINING]
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--seed", str(seed), "--durations=15"]
    printed = nodes.run((2, 2), *options, *files, timeout=120, placement="round robin")
    print(printed)
    assert " passed" in printed, printed


def test_operations_of_torch_distributed(nodes: Nodes) -> None:
    program = str(TESTS / "interop/every_operation.py")
    assert nodes.run((2, 1), program, timeout=60).count("all is well") == 3
