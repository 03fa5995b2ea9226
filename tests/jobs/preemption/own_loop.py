"""A loop of one's own that stops when it is told to and goes on later; rank 0 writes down steps and samples."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import axonmpi as ax

SAMPLES, GLOBAL_BATCH, EPOCHS = 480, 4, 8


def main(root: Path) -> int:
    world = ax.init_process_group()
    guard = ax.PreemptionGuard()
    torch.manual_seed(0)
    data = [(index, torch.randn(16)) for index in range(SAMPLES)]
    model = ax.FSDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = ax.DistributedSampler(SAMPLES, seed=1)
    batch = GLOBAL_BATCH // world.size
    loader = DataLoader(data, batch, sampler=sampler, generator=torch.Generator())  # type: ignore[arg-type]
    folder = ax.CheckpointFolder(root / "checkpoints", keep=2)
    info = folder.load_latest(model, optimizer, sampler=sampler)
    step = info.step if info else 0
    with (root / "steps.jsonl").open("a", buffering=1) as log:
        for epoch in range(info.epoch if info else 0, EPOCHS):
            sampler.set_epoch(epoch)
            for ids, x in loader:
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                ax.all_reduce(total := torch.stack([loss.detach() / world.size, torch.tensor(guard.vote())]))
                samples = ax.all_gather(ids).tolist()
                if world.rank == 0:
                    print(json.dumps([epoch, step, samples, total[0].item()]), file=log)
                if guard.decide(total[1]):
                    folder.save(model, optimizer, step=step, epoch=epoch, sampler=sampler)
                    return ax.REQUEUE_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
