"""What `backend.rs`, `comm.rs`, `process_group.rs` and `ddp_smoke.rs` check of groups and collectives."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import axonmpi as ax
from axonmpi import Backend, MockBackend, ProcessGroup, ReduceOp, World

VALUES = np.array([1.0, 2.0, 3.0, 4.0])
REDUCTIONS = {
    ReduceOp.SUM: (ax.all_reduce_sum, np.sum),
    ReduceOp.PRODUCT: (ax.all_reduce_product, np.prod),
    ReduceOp.MIN: (ax.all_reduce_min, np.min),
    ReduceOp.MAX: (ax.all_reduce_max, np.max),
    ReduceOp.AVERAGE: (ax.all_reduce_mean, np.mean),
}


def test_mock_backends_talk_on_threads() -> None:
    """A message waits for its receiver, so one thread can send for one rank, then receive for the other."""

    def run(backend: Backend) -> list[float]:
        backend.all_reduce(tensor := torch.full((2,), backend.rank + 1.0), ReduceOp.SUM)
        backend.broadcast(whole := torch.arange(3.0) * (backend.rank == 0), 0)
        backend.barrier()
        return [*tensor.tolist(), *whole.tolist()]

    backends = MockBackend.create_world(3)
    names = [(backend.name, backend.rank, backend.world_size) for backend in backends]
    assert names == [("mock", rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(run, backends)) == [[6, 6, 0, 1, 2]] * 3
    backends[0].send(torch.tensor([1.0, 2.0, 3.0]), 1, 0)
    backends[1].recv(received := torch.zeros(3), 0, 0)
    assert received.tolist() == [1.0, 2.0, 3.0]
    groups = [ProcessGroup(backend) for backend in backends]
    assert [(group.rank, group.world_size, group.ranks) for group in groups] == [
        (rank, 3, (0, 1, 2)) for rank in range(3)
    ]
    assert groups[1].backend is backends[1]


@pytest.mark.ranks(1, 3)
def test_reductions(group) -> None:
    parts = np.stack([VALUES * (rank + 1) for rank in range(group.size)])
    for op, (function, in_numpy) in REDUCTIONS.items():
        for reduce in (group.all_reduce, group.backend.all_reduce, lambda t, op: ax.all_reduce(t, op, group)):
            tensor = torch.tensor(parts[group.rank])
            reduce(tensor, op)
            assert tensor.tolist() == in_numpy(parts, axis=0).tolist()
        tensor = torch.tensor(parts[group.rank])
        assert function(tensor, group=group) is None
        assert tensor.tolist() == in_numpy(parts, axis=0).tolist()


@pytest.mark.ranks(2)
def test_copies(group) -> None:
    """The original's all_gather stacks: [W, ...]; its scatter cuts the tensor of each rank."""
    own = torch.tensor(VALUES[:2]) + 10 * group.rank
    gathered = ax.all_gather(own, group)
    assert gathered.tolist() == [1, 2, 11, 12]
    assert gathered.view(group.size, 2).tolist() == [[1, 2], [11, 12]]
    whole = torch.tensor(VALUES)
    part = ax.scatter_tensor(whole if group.rank == 0 else None, 0, group)
    assert part.tolist() == whole.chunk(group.size)[group.rank].tolist()
    collected = ax.gather_tensor(part, 0, group)
    assert torch.cat(collected).tolist() == VALUES.tolist() if group.rank == 0 else collected is None
    for function in (ax.broadcast_from, ax.gather_tensor, ax.scatter_tensor):
        # In some lines of its README the group stands before the rank.
        with pytest.raises(TypeError, match=r"group: .* got int; the rank stands before the group"):
            function(own, group, 0)


def test_groups_and_worlds_of_one_mock_rank() -> None:
    group, world = ProcessGroup.mock(), World.mock()
    for each in (group, world.default_group, world.new_group([0])):
        assert (each.rank, each.world_size, each.size) == (0, 1, 1)
        assert (each.contains(0), each.contains(1)) == (True, False)
    assert (world.rank, world.world_size, world.is_main) == (0, 1, True)
    world.barrier()
