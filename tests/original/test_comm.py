"""What `comm.rs` checks: every function, on the group of one, and then with values that differ between ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import axonmpi as ax

pytestmark = pytest.mark.ranks(1, 2)
VALUES = np.array([1.0, 2.0, 3.0, 4.0])


def of_rank(rank: int, count: int = 3) -> np.ndarray:
    return VALUES[:count] * (rank + 1)


def of_all(group: ax.ProcessGroup, count: int = 3) -> np.ndarray:
    return np.stack([of_rank(rank, count) for rank in range(group.size)])


@pytest.mark.parametrize(
    ("function", "reduction"),
    [
        (ax.all_reduce_sum, np.sum),
        (ax.all_reduce_mean, np.mean),
        (ax.all_reduce_min, np.min),
        (ax.all_reduce_max, np.max),
        (ax.all_reduce_product, np.prod),
        (ax.sync_gradient, np.mean),
        (ax.all_reduce, np.sum),  # the original's ring_all_reduce with ReduceOp::Sum
    ],
)
def test_in_place(group, function, reduction) -> None:
    tensor = torch.tensor(of_rank(group.rank))
    assert function(tensor, group=group) is None
    assert tensor.tolist() == reduction(of_all(group), axis=0).tolist()


def test_broadcasts(group) -> None:
    last = group.size - 1
    for function, src in (
        (lambda t: ax.broadcast(t, group), 0),
        (lambda t: ax.broadcast_from(t, last, group), last),
    ):
        tensor = torch.tensor(of_rank(group.rank, 2))
        function(tensor)
        assert tensor.tolist() == of_rank(src, 2).tolist()


def test_all_gather_concatenates(group) -> None:
    """The original stacks: [W, ...]."""
    gathered = ax.all_gather(torch.tensor(of_rank(group.rank, 2)), group)
    assert gathered.tolist() == of_all(group, 2).reshape(-1).tolist()
    assert gathered.view(group.size, 2).tolist() == of_all(group, 2).tolist()


@pytest.mark.parametrize(
    ("function", "reduction"), [(ax.reduce_scatter_sum, np.sum), (ax.reduce_scatter_mean, np.mean)]
)
def test_reduce_scatter(group, function, reduction) -> None:
    scattered = function(torch.tensor(of_rank(group.rank, 4)), group)
    whole = reduction(of_all(group, 4), axis=0)
    assert scattered.tolist() == np.split(whole, group.size)[group.rank].tolist()


def test_scatter_and_gather_tensor(group) -> None:
    """The original cuts the tensor that each rank has, and gathers on all ranks: `chunk` and `all_gather`."""
    whole = torch.tensor(VALUES)
    own = ax.scatter_tensor(whole if group.rank == 0 else None, 0, group)
    assert own.tolist() == whole.chunk(group.size)[group.rank].tolist()
    gathered = ax.gather_tensor(own, 0, group)
    assert torch.cat(gathered).tolist() == VALUES.tolist() if group.rank == 0 else gathered is None
    assert ax.all_gather(own, group).tolist() == VALUES.tolist()


def test_who_is_there(group) -> None:
    ax.barrier(group)
    assert ax.rank(group) == group.rank
    assert ax.world_size(group) == group.world_size
    assert ax.is_main_process(group) == (group.rank == 0)


def test_sync_gradients(group) -> None:
    gradients = [torch.tensor(of_rank(group.rank, 2)), torch.tensor(of_rank(group.rank, 3))]
    ax.sync_gradients(gradients, group)
    assert [each.tolist() for each in gradients] == [of_all(group, count).mean(axis=0).tolist() for count in (2, 3)]


def test_the_order_of_its_readme_is_refused(group) -> None:
    """There the group stands before the rank in some lines, and after it in the code."""
    tensor = torch.tensor(of_rank(group.rank))
    for function in (ax.broadcast_from, ax.gather_tensor, ax.scatter_tensor):
        with pytest.raises(TypeError, match=r"group: .* got int; the rank stands before the group"):
            function(tensor, group, 0)
    assert tensor.tolist() == of_rank(group.rank).tolist()
