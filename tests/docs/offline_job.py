"""A job beside torch, mpi4py and numpy alone: `offline_job.py CHECKPOINT OUT`.

It loads a checkpoint of another installation, trains, saves and loads, and runs the doctor and the trainer.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

import axonmpi as ax
from axonmpi.cli import main
from axonmpi.train.config import Config
from axonmpi.train.trainer import Trainer

given, out = map(Path, sys.argv[1:])
assert [name for name in ("isal", "matplotlib", "rich", "tyro", "yaml") if find_spec(name)] == []

world = ax.init_process_group()
model = ax.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
assert ax.load_checkpoint(given, model, optimizer).step == 7
for _ in range(3):
    model(torch.ones(4, 8)).mean().backward()
    optimizer.step()
expected = {name: value.clone() for name, value in model.state_dict().items()}
ax.save_checkpoint(out / "checkpoint", model, optimizer, step=3)
ax.FullyShardedDataParallel(torch.nn.Linear(8, 1))(torch.ones(4, 8)).mean().backward()
torch.nn.init.zeros_(model.module.weight)
assert ax.load_checkpoint(out / "checkpoint", model, optimizer).step == 3
assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())

settings = {"out": out / "runs", "steps": 2, "plot": False, "layers": 1, "width": 16, "data_limit": 0.1}
summary = Trainer(Config.from_mapping(settings), world).run()
assert (summary.steps, summary.ranks) == (2, 2)
assert main(["doctor"]) == 0
print(f"rank {world.rank} is done", flush=True)
