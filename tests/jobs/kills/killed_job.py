"""A job that goes on from its newest checkpoint and saves, now and then beside the program, until it is killed."""

import os
import sys
from pathlib import Path

import torch
from jobs.kills.whole import check_whole
from torch import nn

import axonmpi as ax

LAYERS, WIDTH = 6, 256


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            for name, state in optimizer.state.get(parameter, {}).items():
                if name != "step":
                    state.fill_(value)


def main() -> None:
    ax.init_process_group()
    root = Path(sys.argv[1])
    model = ax.FSDP(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, WIDTH)).sum().backward()
    optimizer.step()
    folder = ax.CheckpointFolder(root, keep=2)
    info = folder.load_latest(model, optimizer)
    step = 0 if info is None else info.step
    newest = folder.latest()
    if ax.is_main_process() and newest is not None:
        assert check_whole(Path(newest))["step"] == step
        strays = [
            name for name in os.listdir(root) if name != "latest" and (not name.startswith("step-") or "." in name)
        ]
        if strays or len(os.listdir(root)) > 4:  # one more than is kept, until the next save
            print(f"wrong: {sorted(os.listdir(root))}", flush=True)
    os.write(1, f"saving {os.getpid()}\n".encode())  # at once, so that lines of ranks do not mix
    while True:
        step += 1
        fill(model, optimizer, step)
        work = folder.save(model, optimizer, step=step, blocking=step % 2 == 0)
        if work is not None:
            work.wait()


if __name__ == "__main__":
    main()
