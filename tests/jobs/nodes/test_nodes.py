"""Ranks on several nodes: tests of the suite between nodes that are namespaces."""

from helpers import TESTS
from helpers.limits import limit
from helpers.nodes import Nodes

FILES = (
    "jobs/nodes/on_nodes.py",
    "conformance/test_mismatch.py",
    "fsdp/test_training.py",
    "tensor/test_parallelize.py",
)


def test_the_suite_passes_on_two_ranks_of_each_of_two_nodes(nodes: Nodes, seed: int) -> None:
    """Ranks are dealt out in turn, so that the next rank is on another node."""
    files = [str(TESTS / name) for name in FILES]
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--seed", str(seed), "-k", "4ranks and not large"]
    printed = nodes.run((2, 2), *options, *files, timeout=limit(120), placement="round robin")
    assert " passed" in printed, printed
