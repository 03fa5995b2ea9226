"""Variables and defaults for programs that insist on torchrun's."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.limits import limit

from axonmpi.interop.environment import host_of_first, launch_env
from axonmpi.testing import launch


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


NO_BACKEND_IS_NAMED = """
import sys, torch
import torch.distributed as dist
from axonmpi.interop import launch_env
launch_env(*sys.argv[1:])
dist.init_process_group()
group = dist.device_mesh.init_device_mesh("cpu", (2,)).get_group()
dist.all_reduce(total := torch.ones(1), group=group)
print(dist.get_backend_config(), int(total))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("given", "found"), [((), "gloo"), (("axonmpi",), "axonmpi"), (("gloo",), "gloo")])
def test_groups_without_a_name_have_the_backend_that_was_chosen(given, found):
    done = launch(2, NO_BACKEND_IS_NAMED, *given, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"cpu:{found} 2"] * 2


def test_another_backend_is_refused():
    with pytest.raises(ValueError, match="backend: expected 'axonmpi' or 'gloo', or None, got 'nccl'"):
        launch_env("nccl")
