"""`save_checkpoint`: from a model, an optimizer and a few numbers to one folder of standard files."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..collectives.agreement import check_same, raised_on_all
from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..launch.board import phase
from ..launch.page import Phase
from ..types import Work
from ..utils.arguments import check_flags, either_group_name, integer
from ..wrapping.optimizer_hooks import before_steps, parameters_of
from .agreed import agree
from .background import Background
from .files.state_file import FORMAT, STATE_FILE, VERSION
from .files.tensor_file import TensorFile, index_of
from .files.values import encoded
from .parts.model_parts import ModelParts, model_parts
from .parts.optimizer_parts import optimizer_parts
from .parts.part import Part
from .parts.random_state import random_parts
from .ranks import CheckpointRanks, ranks_of
from .writing.job import Job, write_checkpoint
from .writing.plan import Share
from .writing.snapshot import Snapshot

MAX_FILE_SIZE = 50 * 10**9
"""Bytes of tensors in one file, as `transformers` has it."""


class Stateful(Protocol):
    """A learning-rate schedule, a scaler of losses, a sampler."""

    def state_dict(self) -> Any:
        """Return its state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state."""


@either_group_name
@phase(Phase.CHECKPOINT)
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    epoch: int = 0,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    sampler: Stateful | None = None,
    extra: Any = None,
    blocking: bool = True,
    max_file_size: int = MAX_FILE_SIZE,
    group: ProcessGroup | None = None,
) -> Work | None:
    """Write a model, and what is needed to go on training it, to a folder; collective.

    The folder has standard files with whole tensors under the names that the model has without any wrapper,
    whatever the layout of the ranks. Each rank writes its own parts of them; no rank gathers anything. The folder
    gets its name when all of it is on the disk: a job that is killed leaves what was there before.

    Args:
        path: The folder, the same on all ranks and on a file system that all of them see. A checkpoint that is
            there is replaced.
        model: A module, or one wrapped in DDP or FSDP, with divided layers, or a pipeline.
        optimizer: Its state is saved by the names of parameters.
        step: Steps made so far.
        epoch: Number of the epoch.
        scheduler: A learning-rate schedule; anything with `state_dict()`, the same on all ranks, as the two below.
        scaler: A scaler of losses.
        sampler: A sampler, such as `DistributedSampler`.
        extra: Other values to find again: None, numbers, texts, small tensors, and lists, tuples and dicts of
            these.
        blocking: Return when the checkpoint is complete. Else at once: parameters and the optimizer's state are
            copied while forward and backward run, and `optimizer.step()` waits until they are; without an optimizer
            they are copied before the call returns. Another save waits for the one before.
        max_file_size: Bytes of tensors in a file; more are spread over several files with an index.
        group: The ranks that have parts of the model; None means all.

    Returns:
        None; without `blocking` a `Work`, which is done when the checkpoint is complete. If it fails, the next step
        of the optimizer, the next save or `wait()` raises the error.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: Ranks have different arguments, or something cannot be held by a checkpoint; on all ranks.
        CheckpointError: The files cannot be written; on all ranks. What was at `path` is still there.

    Source: the format is https://github.com/huggingface/safetensors.
    """
    chosen = group_of_this_rank(group, "group")
    ranks = ranks_of(chosen)
    ranks.settle()
    with raised_on_all(ranks.all.backend):
        check_flags(blocking=blocking)
        integer("max_file_size", max_file_size, minimum=1)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        target = Path(os.path.realpath(os.fspath(path)))  # else a link would be replaced
        state: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "step": integer("step", step, minimum=0),
            "epoch": integer("epoch", epoch, minimum=0),
            "layout": {"ranks": chosen.size, "nodes": ranks.nodes, "model": type(model).__name__},
            "versions": versions_here(),
            "scheduler": _state_of("scheduler", scheduler),
            "scaler": _state_of("scaler", scaler),
            "sampler": _state_of("sampler", sampler),
            "extra": encoded(extra, "extra"),
        }
        json.dumps(state)  # raises on all ranks what only the first would meet
    arguments = [
        f"path {os.path.abspath(path)}",
        f"step {step}",
        f"epoch {epoch}",
        f"blocking {blocking}",
        f"max {max_file_size}",
    ]
    arguments.append(f"optimizer {optimizer is not None}")
    check_same(
        ranks.all.backend,
        arguments,
        "save_checkpoint: the arguments are not the same on all ranks",
        "Give all ranks the same path and numbers.",
    )
    return _save(target, model, optimizer, state, ranks, blocking=blocking, max_file_size=max_file_size)


def _save(
    target: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    ranks: CheckpointRanks,
    *,
    blocking: bool,
    max_file_size: int,
) -> Work | None:
    described = model_parts(model, ranks.all)
    with described.stable():
        with raised_on_all(ranks.all.backend):
            optimized = None if optimizer is None else optimizer_parts(optimizer, described)
            notes: dict[str, Any] = {"model": {"aliases": described.aliases, "extra": described.extra}}
            notes["optimizer"] = None if optimized is None else optimized.state
            notes["config"] = described.config
            parts: dict[str, Sequence[Part]] = {"model": _marked(described, optimizer)}
            if optimized is not None:
                parts["optimizer"] = [dataclasses.replace(part, may_wait=True) for part in optimized.parts]
            parts["random"] = random_parts(ranks.all)
            for kind, own in parts.items():
                _check_names(kind, [part.name for part in own])
        ranks.agreed, share = agree(ranks.all, parts, notes, max_file_size, ranks.agreed)
        known, files = ranks.agreed.catalogue, ranks.agreed.files
        config = known.notes.pop("config")
        texts = texts_of({**state, **known.notes}, config, files) if ranks.all.rank == 0 else {}
        laid_out = [file for of_kind in files.values() for file in of_kind]
        job = Job(target, laid_out, share, share.nbytes, texts)
        if blocking:
            write_checkpoint(job, ranks)
            return None
        with raised_on_all(ranks.all.backend):
            snapshot = _snapshot(job.share)
    return _write_beside(job, snapshot, optimizer, ranks)


def _check_names(kind: str, names: Sequence[str]) -> None:
    """Raise if a file cannot have tensors of these names."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{kind}: two tensors would have the name {twice!r} in the file: rename one of them")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{kind}: {name!r} is no Unicode text, which names in a file are: rename it") from None


def _snapshot(share: Share) -> Snapshot:
    try:
        snapshot = Snapshot(share)
        snapshot.copy_now()
    except (RuntimeError, MemoryError) as error:
        message = f"blocking: no memory for a copy of {share.nbytes} bytes, so save with blocking=True: {error}"
        raise ValueError(message) from error
    return snapshot


def _write_beside(
    job: Job, snapshot: Snapshot, optimizer: torch.optim.Optimizer | None, ranks: CheckpointRanks
) -> Work:
    """Write a checkpoint on a thread, if another thread than the caller's may communicate; local then."""

    def write() -> None:
        write_checkpoint(job._replace(share=snapshot.share), ranks, snapshot.copy_rest)

    work = Background(write, f"the checkpoint {job.path}")
    copied = snapshot.is_copied
    if optimizer is not None:
        # First, before FSDP's hook, in which ranks meet: they may learn of an error at different steps.
        before_steps(_before_step, first=True)
        _under_way[optimizer] = copied, work
    ranks.begin(work)
    work.start(beside=ranks.all.backend.allows_threads)
    if optimizer is None:
        copied.wait()
    return work


_under_way: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[threading.Event, Background]]
_under_way = weakref.WeakKeyDictionary()


def _before_step(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step when what it would change is copied, and tell it what went wrong."""
    if optimizer in _under_way:
        copied, work = _under_way[optimizer]
        copied.wait()
        if work.done():
            del _under_way[optimizer]
        work.check()


def _marked(described: ModelParts, optimizer: torch.optim.Optimizer | None) -> list[Part]:
    """Return the parts of a model, of which those may wait that only the optimizer changes."""
    changed = [] if optimizer is None else [described.part_of(parameter) for parameter in parameters_of(optimizer)]
    names = {part.name for part in changed if part is not None}
    return [dataclasses.replace(part, may_wait=part.name in names) for part in described.parts]


def _state_of(name: str, stateful: Stateful | None) -> Any:
    if stateful is None:
        return None
    if not callable(getattr(stateful, "state_dict", None)):
        raise TypeError(f"{name}: expected something with state_dict(), got {type(stateful).__name__}")
    return encoded(stateful.state_dict(), name)


def versions_here() -> dict[str, str]:
    """Return the versions of the programs that save."""
    try:
        own = metadata.version("axonmpi")
    except metadata.PackageNotFoundError:  # its folder is on PYTHONPATH
        own = "unknown"
    return {"axonmpi": own, "torch": metadata.version("torch"), "python": platform.python_version()}


def texts_of(
    state: Mapping[str, Any], config: Mapping[str, Any] | None, files: Mapping[str, list[TensorFile]]
) -> dict[str, bytes]:
    """Return the small files of a checkpoint by name."""
    values: dict[str, Any] = {STATE_FILE: state}
    if config is not None:
        values["config.json"] = config
    for kind, of_kind in files.items():
        if len(of_kind) > 1:
            values[f"{kind}.safetensors.index.json"] = index_of(of_kind)
    return {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in values.items()}
