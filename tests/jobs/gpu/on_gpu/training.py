"""The trainer: its losses are those of plain torch on the CPU."""

import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from helpers.plain_training import plain_run

import axonmpi as ax
from axonmpi.train import Config
from axonmpi.train.trainer import Trainer

from . import Check, Figures

SMALL = Config().replace(
    layers=4,
    width=64,
    heads=4,
    sequence_length=64,
    data_limit=0.2,
    steps=20,
    warmup_steps=5,
    global_batch=16,
    evaluate_every=0,
    held_out_sequences=16,
    sample_length=8,
    progress="off",
    plot=False,
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "fully sharded": {"fsdp": "full"},
    "offloaded": {"fsdp": "full", "cpu_offload": "full"},
    "pipeline": {"schedule": "zero-bubble", "micro_batches": 4},
    "tensor": {},
}
DTYPES = {"float32": 2e-3, "bfloat16": 3e-2}
"""How far a loss may be from that of plain float32, as a part of it."""


def check_training(layout: str, dtype: str, world: ax.World, figures: Figures) -> None:
    settings = dict(LAYOUTS[layout])
    if layout in ("pipeline", "tensor") and world.size > 1:
        settings["pp" if layout == "pipeline" else "tp"] = world.size
    settings["device"] = world.device.type
    with tempfile.TemporaryDirectory() as folder:
        own = Path(ax.broadcast_object(folder))
        trainer = Trainer(SMALL.replace(dtype=dtype, out=own, **settings), world)
        summary = trainer.run()
        ax.barrier()
    expected = plain_run(SMALL)
    assert len(trainer.steps) == len(expected.losses)
    for step, wanted in zip(trainer.steps, expected.losses, strict=True):
        assert math.isclose(step.loss, wanted, rel_tol=DTYPES[dtype]), f"step {step}: expected {wanted}"
    assert math.isclose(summary.held_out_loss, expected.held_out_loss, rel_tol=DTYPES[dtype])
    assert summary.last_loss < summary.first_loss
    places = {parameter.device.type for parameter in trainer.model.parameters()}
    assert layout == "offloaded" or places == {world.device.type}
    figures[f"{layout}, {dtype}, tokens per second"] = summary.tokens_per_second
    figures[f"{layout}, {dtype}, last loss"] = summary.last_loss


CHECKS = [
    Check(f"trainer/{layout}, {dtype}", partial(check_training, layout, dtype))
    for layout in LAYOUTS
    for dtype in DTYPES
]
