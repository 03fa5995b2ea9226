"""What `ddp.rs` checks: the wrapper, the bucket and the synchronizer, each on its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import axonmpi as ax
from axonmpi import GradientBucket, GradientSynchronizer, GradSyncStrategy


@pytest.mark.ranks(1, 2)
def test_the_wrapper(group) -> None:
    module = nn.Linear(10, 5)
    ddp = ax.DistributedDataParallel(module, group)
    assert (ddp.process_group.rank, ddp.process_group.world_size) == (group.rank, group.size)
    assert ddp.module is module
    assert ddp(torch.ones(1, 10)).shape == (1, 5)
    assert len(list(ddp.parameters())) == 2


@pytest.mark.ranks(1, 2)
def test_training_and_evaluation(group) -> None:
    """In the original a linear layer ignores both."""
    ddp = ax.DistributedDataParallel(nn.Linear(10, 5), group)
    assert ddp.training
    assert not ddp.eval().module.training
    assert ddp.train().module.training


def test_a_bucket_takes_what_fits() -> None:
    bucket = GradientBucket(5)
    assert bucket.is_empty
    assert bucket.add(torch.tensor([1.0, 2.0, 3.0]))
    assert not bucket.is_empty
    assert not bucket.add(torch.tensor([4.0, 5.0, 6.0]))
    assert bucket.size == 3
    assert bucket.add(torch.tensor([[4.0], [5.0]]))
    assert (bucket.size, bucket.is_full) == (5, True)
    assert bucket.data.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    bucket.data[0] = 9.0  # the original's data_mut()
    assert [tensor.tolist() for tensor in bucket.extract()] == [[9.0, 2.0, 3.0], [[4.0], [5.0]]]
    bucket.clear()
    assert bucket.is_empty


def test_the_strategy_of_a_synchronizer() -> None:
    assert GradientSynchronizer(GradSyncStrategy.OVERLAPPED, 100).strategy is GradSyncStrategy.OVERLAPPED
    assert GradientSynchronizer().strategy is GradSyncStrategy.SYNCHRONOUS
    assert len(set(GradSyncStrategy)) == 3


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("strategy", GradSyncStrategy)
def test_a_synchronizer_takes_what_was_added(group, strategy) -> None:
    synchronizer = GradientSynchronizer(strategy, 100)
    synchronizer.prepare(10)
    synchronizer.sync_all(group)  # nothing to do
    assert synchronizer.gradients() == []
    synchronizer.clear()
    synchronizer.add_gradient(0, torch.tensor([1.0, 2.0]) * group.rank)
    synchronizer.sync_all(group)
    factor = group.rank if strategy is GradSyncStrategy.NO_SYNC else (group.size - 1) / 2
    assert [each.tolist() for each in synchronizer.gradients()] == [[factor, 2 * factor]]
