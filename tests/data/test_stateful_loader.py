"""torchdata's StatefulDataLoader with DistributedSampler, saved in an epoch and resumed at other world sizes."""

from itertools import chain, islice

import pytest
import torch
from helpers.settings import each_pair
from torch.utils.data import TensorDataset

import axonmpi as ax
from axonmpi.data import DistributedSampler

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]

DATA = TensorDataset(torch.arange(48))
ALL = list(range(48))


class Rank:
    """A rank's loader, resumed from a state; batches of two samples."""

    def __init__(self, size: int, rank: int, state=None, *, workers: int = 0, drop_last: bool = False, data=DATA):
        self.sampler = DistributedSampler(data, size, rank, seed=5, drop_last=drop_last)
        self.loader = StatefulDataLoader(data, 2, sampler=self.sampler, num_workers=workers, drop_last=drop_last)
        if state is not None:
            self.loader.load_state_dict(state)

    def epoch(self, epoch: int, most: int | None = None) -> list[int]:
        """Return the samples of an epoch, or of its first batches."""
        self.sampler.set_epoch(epoch)
        return [sample for (batch,) in islice(self.loader, most) for sample in batch.tolist()]


def ranks_of(size: int, state=None, **options) -> list[Rank]:
    return [Rank(size, rank, state, **options) for rank in range(size)]


def samples_of(ranks: list[Rank], epoch: int, most: int | None = None) -> list[int]:
    return [sample for rank in ranks for sample in rank.epoch(epoch, most)]


def order_of(epoch: int, data=DATA) -> list[int]:
    sampler = DistributedSampler(data, 1, 0, seed=5)
    sampler.set_epoch(epoch)
    return list(sampler)


@each_pair(sizes=[(2, 4), (4, 2), (2, 1), (2, 2)], workers=[0, 2], drop_last=[False, True])
def test_each_sample_comes_once_whatever_was_prefetched(sizes, workers, drop_last) -> None:
    options = {"workers": workers, "drop_last": drop_last}
    before, after = sizes
    first = ranks_of(before, **options)
    samples_of(first, 0)
    seen = samples_of(first, 1, 4)
    assert len(seen) == 8 * before
    states = [rank.loader.state_dict() for rank in first]
    for state in (states[0], states[-1]):  # of any rank
        second = ranks_of(after, state, **options)
        rest = samples_of(second, 1)
        assert sorted(seen + rest) == ALL
        assert set(seen) == set(order_of(1)[: 8 * before])
        for epoch in (2, 3):
            each = [rank.epoch(epoch) for rank in second]
            assert sorted(chain.from_iterable(each)) == ALL
            assert each[0] == order_of(epoch)[::after]


@each_pair(workers=[0, 2], drop_last=[False, True], sizes=[(4, 2), (2, 4)], length=[48, 50])
def test_a_state_of_the_end_of_an_epoch_begins_the_next(workers, drop_last, sizes, length) -> None:
    """Also if samples are left over that filled no batch of all ranks."""
    data = TensorDataset(torch.arange(length))
    before, after = sizes
    options = {"workers": workers, "drop_last": drop_last, "data": data}
    first = ranks_of(before, **options)
    samples_of(first, 3)
    state = first[0].loader.state_dict()
    for epoch in (4, 5):
        second = ranks_of(after, state, **options)
        batches = length // after // 2 * 2 if drop_last else None
        for following in (epoch, epoch + 1):
            assert second[1].epoch(following)[:24] == order_of(following, data)[1::after][:batches][:24]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_the_last_batch_leaves_nothing_of_the_epoch(workers) -> None:
    first = Rank(2, 0, workers=workers)
    first.epoch(3, 12)
    second = Rank(4, 3, first.loader.state_dict(), workers=workers)
    assert (second.epoch(3), second.epoch(4)) == ([], order_of(4)[3::4])


def test_a_run_that_is_resumed_twice_takes_each_sample_once() -> None:
    seen, state = [], None
    for size, batches in ((2, 3), (4, 2), (1, None)):
        ranks = ranks_of(size, state)
        seen += samples_of(ranks, 7, batches)
        state = ranks[0].loader.state_dict()
    assert sorted(seen) == ALL


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_a_checkpoint_has_the_loader_s_state(world, tmp_path) -> None:
    """Saved by all ranks, loaded by half of them."""
    workers = 2 if world.default_group.backend.name == "mpi" else 0  # a fork takes one thread along
    path = ax.broadcast_object(tmp_path) / "saved"
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    rank = Rank(world.size, world.rank, workers=workers)
    seen = rank.epoch(1, 2)
    ax.save_checkpoint(path, model, epoch=1, sampler=rank.loader)
    smaller = world.subworld(world.size // 2)
    if smaller is not None:
        with smaller.activate():
            rank = Rank(smaller.size, smaller.rank, workers=workers)
            info = ax.load_checkpoint(path, model, sampler=rank.loader)
            seen += rank.epoch(info.epoch)
    gathered = ax.all_gather_object(seen)
    assert sorted(chain.from_iterable(gathered)) == ALL
