"""What `backend.rs`, `process_group.rs` and `ddp_smoke.rs` check of groups.

The functions of `comm.rs` are tested in `tests/conformance/test_groups.py`.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from axonmpi import Backend, MockBackend, ProcessGroup, ReduceOp, World


def test_mock_backends_talk_on_threads() -> None:
    """A message waits for its receiver, so one thread can send for one rank, then receive for the other."""

    def run(backend: Backend) -> list[float]:
        backend.all_reduce(tensor := torch.full((2,), backend.rank + 1.0), ReduceOp.SUM)
        backend.broadcast(whole := torch.arange(3.0) * (backend.rank == 0), 0)
        backend.barrier()
        return [*tensor.tolist(), *whole.tolist()]

    backends = MockBackend.create_world(3)
    assert [(each.name, each.rank, each.world_size) for each in backends] == [
        ("mock", rank, 3) for rank in range(3)
    ]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(run, backends)) == [[6, 6, 0, 1, 2]] * 3
    backends[0].send(torch.tensor([1.0, 2.0, 3.0]), 1, 0)
    backends[1].recv(received := torch.zeros(3), 0, 0)
    assert received.tolist() == [1.0, 2.0, 3.0]
    groups = [ProcessGroup(backend) for backend in backends]
    assert [(group.rank, group.world_size, group.ranks, group.backend) for group in groups] == [
        (rank, 3, (0, 1, 2), backends[rank]) for rank in range(3)
    ]


def test_groups_and_worlds_of_one_mock_rank() -> None:
    group, world = ProcessGroup.mock(), World.mock()
    for each in (group, world.default_group, world.new_group([0])):
        assert (each.rank, each.world_size, each.size, each.contains(0), each.contains(1)) == (0, 1, 1, True, False)
    assert (world.rank, world.world_size, world.is_main) == (0, 1, True)
    world.barrier()
