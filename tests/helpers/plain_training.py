"""The trainer's run in one process of plain torch, which its runs in all layouts are compared with."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from axonmpi.train import GPT, Config, generate, load_corpus
from axonmpi.train.batches import BatchPlan, Stream, held_out_batches, seeded_generator
from helpers.once import once


def metrics_in(folder: Path) -> list[dict[str, float]]:
    """Return the lines of a run's file of metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def plain_run(config: Config) -> SimpleNamespace:
    """Train as the settings of model, text and optimizer say; return losses, norms, held-out loss and a sample."""
    names = ("seed", "steps", "global_batch", "held_out_sequences", "sample_length", "prompt", "temperature")
    run = {name: getattr(config.run, name) for name in names}
    return _plain_run(Config(model=config.model, text=config.text, optimizer=config.optimizer).replace(**run))


@once
def _plain_run(config: Config) -> SimpleNamespace:
    run, shape, settings = config.run, config.model, config.optimizer
    model = GPT(shape, generator=seeded_generator(run.seed, Stream.WEIGHTS))
    corpus = load_corpus(config.text, shape.sequence_length)
    plan = BatchPlan(run.global_batch, shape.sequence_length, 1, 0, 1, run.seed)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is kind] for kind in (True, False))
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]

    def rate(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        progress = (step + 1 - settings.warmup_steps) / max(run.steps - settings.warmup_steps, 1)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return settings.lr_final + (1 - settings.lr_final) * cosine

    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses, norms = [], []
    for step in range(1, run.steps + 1):
        ((inputs, targets),) = plan.batches(step, corpus.train)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip or math.inf)))
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in held_out_batches(
            corpus.held_out, shape.sequence_length, most=run.held_out_sequences, batch=16, replica=0, replicas=1
        ):
            total += F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum").item()
            count += targets.numel()
    drawn = seeded_generator(run.seed, Stream.SAMPLE)
    sample = generate(model, run.prompt.encode(), run.sample_length, generator=drawn, temperature=run.temperature)
    sample = run.prompt.encode() + sample
    return SimpleNamespace(losses=losses, norms=norms, held_out_loss=total / count, sample=sample)
