"""A loop of one's own goes on where it was stopped: the same samples, the same losses, each sample once."""

import itertools
import random
from collections import Counter

import pytest
import torch
from helpers.models import built
from torch import nn
from torch.utils.data import DataLoader

import axonmpi as ax
from axonmpi.testing import run_ranks

SAMPLES, GLOBAL_BATCH, EPOCHS = 28, 4, 3
STEPS = EPOCHS * SAMPLES // GLOBAL_BATCH
DATA = [*enumerate(torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0)))]
"""Samples that say which they are."""


def train(world, root, log, stop_after, *, wrap=ax.DDP, dropout=0.0):
    """Train, and stop on one rank's account after some steps; return whether all is done."""
    model = wrap(built(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 1))))
    torch.manual_seed(1)  # of dropout, which mock ranks would share
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 20])
    sampler = ax.DistributedSampler(DATA, seed=5)
    # with the default generator each pass through the loader would take a number that dropout is to have
    loader = DataLoader(DATA, GLOBAL_BATCH // world.size, sampler=sampler, generator=torch.Generator())
    guard, folder = ax.PreemptionGuard(()), ax.CheckpointFolder(root)
    parts = {"scheduler": scheduler, "sampler": sampler}
    info = folder.load_latest(model, optimizer, **parts)
    step, first = (info.step, info.epoch) if info else (0, 0)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for ids, x in loader:
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            ax.all_reduce_mean(loss := loss.detach())
            log.append((epoch, step, ax.all_gather(ids).tolist(), loss.item()))
            stop_after -= 1
            if stop_after == 0 and world.rank == step % world.size:
                guard.request_stop()
            if guard.stop_requested():
                folder.save(model, optimizer, step=step, epoch=epoch, **parts)
                return False
    return True


def whole_run(root, ranks, stops, **settings):
    """Return what rank 0 has seen, over all the times that the run was begun."""
    log, done, counts = [], [False], itertools.cycle(ranks)
    while not all(done) and len(log) < 2 * STEPS:
        count, after = next(counts), stops()
        logs = [log, *([] for _ in range(count - 1))]
        done = run_ranks(count, lambda world: train(world, root, logs[world.rank], after, **settings))  # noqa: B023
    return log


def check_complete(log):
    assert [step for _, step, _, _ in log] == list(range(1, STEPS + 1))
    seen = Counter((epoch, sample) for epoch, _, samples, _ in log for sample in samples)
    assert seen == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES))


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [([1], {"dropout": 0.5}), ([2], {}), ([2], {"wrap": ax.FSDP}), ([2, 4, 1, 4], {})],
    ids=["random numbers", "ddp", "fsdp", "other numbers of ranks"],
)
def test_the_curve_is_the_same_however_often_it_is_stopped(tmp_path, seed, ranks, settings):
    draw = random.Random(seed)
    expected = whole_run(tmp_path / "whole", ranks[-1:], lambda: -1, **settings)
    check_complete(expected)
    log = whole_run(tmp_path / "parted", ranks, lambda: draw.randint(3, 9), **settings)
    if len(ranks) == 1:
        assert log == expected
    else:
        check_complete(log)
        assert [loss for *_, loss in log] == pytest.approx([loss for *_, loss in expected], abs=1e-5)
