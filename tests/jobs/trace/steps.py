"""Steps of the trainer's model on all ranks of a job: steps.py clocks|overhead FOLDER."""

import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn import functional

import axonmpi as ax
from axonmpi.train.config import ModelConfig
from axonmpi.train.model import GPT

TURNS, STEPS, CALLS = 30, 6, 2000

kind, folder = sys.argv[1], Path(sys.argv[2])
world = ax.init_process_group()
model = ax.DDP(GPT(ModelConfig()))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 256, (4, 129), generator=torch.Generator().manual_seed(world.rank))
small = torch.zeros(1)


def step() -> None:
    logits = model(tokens[:, :-1])
    functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def seconds(call: object, count: int) -> float:
    assert callable(call)
    world.barrier()
    began = time.perf_counter()
    for _ in range(count):
        call()
    world.barrier()
    return (time.perf_counter() - began) / count


if kind == "clocks":
    with ax.trace(folder):
        for _ in range(40):
            step()
else:
    for name, call, count in (("step", step, STEPS), ("all_reduce of 4 B", lambda: ax.all_reduce(small), CALLS)):
        seconds(call, count)
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(TURNS):
            traced = turn % 2 == 0
            with ax.trace(folder) if traced else nullcontext():
                times[traced].append(seconds(call, count))
        on, off = (statistics.median(times[traced]) for traced in (True, False))
        if world.rank == 0:
            us = (on * 1e6, off * 1e6)
            print(f"{world.size} ranks, {name}: traced {us[0]:.2f} us, not {us[1]:.2f} us, ratio {on / off:.4f}")
ax.destroy_process_group()
