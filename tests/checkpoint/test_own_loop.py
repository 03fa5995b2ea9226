"""A loop of one's own goes on where it was stopped: the same samples and the same losses, to the bit."""

import random

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


def train(world, root, stop_after, wrap, dropout):
    """Train, and stop on one rank's account after some steps; return the samples and losses of these."""
    model = wrap(built(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 1))))
    torch.manual_seed(1)  # of dropout, which mock ranks would share
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 20])
    sampler = ax.DistributedSampler(DATA, seed=5)
    # with the default generator each pass through the loader would take a number that dropout is to have
    loader = DataLoader(DATA, GLOBAL_BATCH // world.size, sampler=sampler, generator=torch.Generator())
    guard, folder, log = ax.PreemptionGuard(()), ax.CheckpointFolder(root), []
    shards = {"scheduler": scheduler, "sampler": sampler}
    info = folder.load_latest(model, optimizer, **shards)
    before, first = (info.step, info.epoch) if info else (0, 0)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for ids, x in loader:
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            log.append((epoch, ax.all_gather(ids).tolist(), loss.item()))
            if len(log) == stop_after and world.rank == stop_after % world.size:
                guard.request_stop()
            if guard.stop_requested():
                folder.save(model, optimizer, step=before + len(log), epoch=epoch, **shards)
                return log
    return log


@pytest.mark.parametrize(
    ("ranks", "wrap", "dropout"),
    [(1, ax.DDP, 0.5), (2, ax.DDP, 0.0), (2, ax.FSDP, 0.0)],
    ids=["random numbers", "ddp", "fsdp"],
)
def test_the_curve_is_the_same_however_often_it_is_stopped(tmp_path, seed, ranks, wrap, dropout):
    expected = run_ranks(ranks, train, tmp_path / "whole", 0, wrap, dropout)[0]
    assert len(expected) == STEPS
    draw, log = random.Random(seed), []
    while len(log) < STEPS:
        log += run_ranks(ranks, train, tmp_path / "parted", draw.randint(3, 9), wrap, dropout)[0]
    assert log == expected
