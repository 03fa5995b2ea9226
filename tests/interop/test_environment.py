"""What programs of others are told about the job."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from axonmpi.interop.environment import host_of_first


def started(num_nodes: int, node_rank: int, comm: Any = None) -> Any:
    return SimpleNamespace(topology=SimpleNamespace(num_nodes=num_nodes, node_rank=node_rank), comm=comm)


@pytest.mark.parametrize("node_rank", [0, 1])
def test_other_nodes_reach_the_first_by_its_name(node_rank):
    sent = []

    def bcast(name: str) -> str:
        sent.append(name)
        return "first-node"

    name = host_of_first(started(2, node_rank, SimpleNamespace(bcast=bcast)))
    assert name == ("first-node" if node_rank else "127.0.0.1")
    assert sent == [socket.gethostname()]  # by all ranks, or the others would wait


def test_one_node_needs_no_name():
    assert host_of_first(started(1, 0)) == "127.0.0.1"
