#!/usr/bin/env python3
"""Stock programs, Lightning and transformers' Trainer over MPI give what they give over gloo, or in one process.

    tests/others/run programs [NAME ...]

They run in the ranks of the mpirun that belongs to this Python, and need `pip install 'axonmpi[interop]'`; 0 is the
exit code if all of them pass.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from helpers.over_gloo import PROGRAM, QUIET
from helpers.tried import try_each

from axonmpi.testing import launch

SECONDS = 600
DATA = """
import sys, torch
torch.manual_seed(0)
X = torch.randn(32, 4)
Y = X @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
def expect(weight, steps=4, lr=0.1):
    # what gradient descent in one process gives on batches of 8
    layer = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr)
    for step in range(steps):
        optimizer.zero_grad()
        rows = slice(8 * step, 8 * step + 8)
        torch.nn.functional.mse_loss(layer(X[rows]), Y[rows]).backward()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), layer.weight.detach())
    print("all is well", flush=True)
"""

LIGHTNING = """
import lightning
from axonmpi.interop.lightning import MpiEnvironment, ddp_strategy
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
    def training_step(self, batch, index):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
rows = torch.utils.data.TensorDataset(X, Y)
strategy = ddp_strategy()
sampler = torch.utils.data.DistributedSampler(rows, 2, strategy.cluster_environment.global_rank(), shuffle=False)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1,
                            use_distributed_sampler=False, **quiet)
model = Model()
trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4, sampler=sampler))
import torch.distributed as dist
assert dist.get_backend() == "axonmpi" and trainer.world_size == 2
expect(model.layer.weight)
try:
    MpiEnvironment().validate_settings(4, 1)
except ValueError as error:
    assert "expected devices=2, num_nodes=1" in str(error)
"""

TRAINER = """
import torch.distributed as dist
from transformers import Trainer, TrainingArguments
from axonmpi.interop.accelerate import start_process_group
start_process_group()
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
    def forward(self, x, labels=None):
        out = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}
rows = [{"x": x, "labels": y} for x, y in zip(X, Y)]
class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(rows)
options = TrainingArguments(
    output_dir=sys.argv[1], use_cpu=True, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=0.1,
    optim="sgd", lr_scheduler_type="constant", max_grad_norm=0, save_strategy="no", report_to=[], disable_tqdm=True,
)
model = Model()
InOrder(model, options, train_dataset=rows).train()
assert options.world_size == 2 and dist.get_backend() == "axonmpi"
expect(model.layer.weight)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of lightning, transformers, compiled, stock")
    chosen = parser.parse_args().names
    with tempfile.TemporaryDirectory() as folder:
        start = partial(launch, timeout=SECONDS, env=QUIET, cwd=folder)
        files = [Path(folder, name) for name in ("compiled", "stock")]  # gloo's addresses stay in a file
        parts = ("ddp", "fsdp2_and_dcp", "dtensor", "pipeline", "functional")
        programs = {
            "lightning": partial(start, 2, DATA + LIGHTNING),
            "transformers": partial(start, 2, DATA + TRAINER, folder),
            "compiled": partial(start, 2, PROGRAM, files[0], "compiled"),
            "stock": partial(start, 4, PROGRAM, files[1], *parts),
        }
        return try_each({name: programs[name] for name in chosen or programs})


if __name__ == "__main__":
    sys.exit(main())
