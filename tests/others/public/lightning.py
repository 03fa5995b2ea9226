"""Lightning: its Trainer with strategy "ddp", on the Transformer of its demos."""

from others.public.program import Program

FIT = """
import lightning
import torch
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
from torch.utils.data import DataLoader, Subset
from torchmetrics import MeanMetric


class LanguageModel(LightningTransformer):
    def __init__(self, vocab_size):
        super().__init__(vocab_size)
        self.accuracy = MeanMetric()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        inputs, target = batch
        output = self(inputs, target)
        self.accuracy.update(output.argmax(-1) == target.view(-1))
        self.log("val_accuracy", self.accuracy, on_epoch=True)
        self.log("val_loss", torch.nn.functional.nll_loss(output, target.view(-1)), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, index):
        self.print(f"step {self.global_step}: loss {self.trainer.callback_metrics['loss']:.9g}")

    def on_validation_epoch_end(self):
        found = self.trainer.callback_metrics
        loss, accuracy = found["val_loss"], found["val_accuracy"]
        self.print(f"epoch {self.current_epoch}: loss {loss:.9g}, accuracy {accuracy:.9g}")


lightning.seed_everything(1)
data = WikiText2()
train = DataLoader(Subset(data, range(800)), batch_size=10, shuffle=True)
val = DataLoader(Subset(data, range(800, 1001)), batch_size=10)
model = LanguageModel(data.vocab_size)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, enable_progress_bar=False)
trainer.fit(model, train, val)
trainer.validate(model, val, ckpt_path="best")
"""
MAKE = """
import os
import random

random.seed(0)
words = [first + middle + last for first in "bdfgklmnprst" for middle in "aeiou" for last in "mnrst"]
os.makedirs("data")
with open("data/wikitext-2.txt", "w") as file:
    for _ in range(8000):
        first = random.randrange(len(words))
        file.write(" ".join(words[(first + step * step) % len(words)] for step in range(20)) + "\\n")
"""
PROGRAMS = {
    "lightning-log": Program(
        command="fit.py",
        files={"fit.py": FIT, "make.py": MAKE},
        prepare=("python make.py",),
        packages=("lightning", "requests"),
        results=r"loss ([\d.e-]+)(?:, accuracy ([\d.e-]+))?",
        compared="losses of 120 steps, and 5 evaluations",
    ),
    "lightning-transformer": Program(
        repository="Lightning-AI/pytorch-lightning",
        command="examples/pytorch/basics/transformer.py",
        files={"make.py": MAKE},
        prepare=("python make.py",),
        packages=("lightning", "requests"),
        changes=(
            # Without these, Lightning takes one process on the CPU; and 3 epochs take less time than 20.
            (
                "examples/pytorch/basics/transformer.py",
                "max_epochs=20)",
                'max_epochs=3, accelerator="cpu", devices=2, strategy="ddp")',
            ),
        ),
        results=r"test_loss\W+(\d[\d.]+)",
        compared="loss of a test after 3 epochs",
    ),
}
