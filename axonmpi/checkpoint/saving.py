"""`save_checkpoint`: a model, an optimizer and a few values, to one folder of standard files."""

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

from ..across_ranks.comparison import raised_on_all, same_on_all_ranks
from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..record import Phase, phase
from ..types import Work
from ..utils.arguments import check_flags, integer
from ..wrapping.optimizer_hooks import before_steps, parameters_of
from .background import Background
from .files.state_file import FORMAT, STATE_FILE, VERSION
from .files.tensor_file import TensorFile, index_of
from .files.values import encoded
from .global_plan import plan_writes
from .ranks import CheckpointRanks, ranks_of
from .shards.model_shards import ModelShards, model_shards
from .shards.optimizer_shards import optimizer_shards
from .shards.random_state import random_shards
from .shards.tensor_shard import TensorShard
from .writing.job import Job, write_checkpoint
from .writing.local_plan import LocalPlan
from .writing.snapshot import Snapshot

MAX_FILE_SIZE = 50 * 10**9
"""Bytes of tensors in one file: the default of `transformers`."""


class Stateful(Protocol):
    """A learning-rate schedule, a loss scaler, a sampler."""

    def state_dict(self) -> Any:
        """Return its state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Set its state."""


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
    """Write a model, and the state that is needed to continue its training, to a folder; collective.

    The folder has standard files with full tensors, under the names of the model without wrappers, in every
    layout of ranks. Each rank writes its own shards; nothing is gathered. The folder is renamed to `path` when
    all of it is on the disk: a job that is killed leaves the earlier checkpoint.

    Args:
        path: The folder, the same on all ranks and on a file system that all of them see. An earlier checkpoint at
            this path is replaced.
        model: A module, or one wrapped in DDP or FSDP, with tensor-parallel layers, or a pipeline.
        optimizer: Its state is saved by the names of parameters.
        step: Number of steps made.
        epoch: Number of the epoch.
        scheduler: A learning-rate schedule, or another object with `state_dict()` that is the same on all ranks.
        scaler: A loss scaler; otherwise as `scheduler`.
        sampler: A sampler, such as `DistributedSampler`, or a `StatefulDataLoader` with one; rank 0's state is
            saved.
        extra: Further values: None, numbers, texts, small tensors, and lists, tuples and dicts of these.
        blocking: Return when the checkpoint is complete. If False, return at once: parameters and the optimizer's
            state are copied while forward and backward run, and `optimizer.step()` waits for the copy. Without an
            optimizer they are copied before the call returns. The next save waits for this one.
        max_file_size: Bytes of tensors in a file; more are spread over several files with an index.
        group: The ranks with shards of the model; None means all.

    Returns:
        None. If `blocking` is False, a `Work` that is done when the checkpoint is complete; an error of the save is
        raised by the next step of the optimizer, the next save or `wait()`.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: Ranks have different arguments, or a checkpoint cannot hold a value; on all ranks.
        CheckpointError: The files cannot be written; on all ranks. An earlier checkpoint at `path` is still there.

    Source: the format is https://github.com/huggingface/safetensors.
    """
    ranks = ranks_of(group_of_this_rank(group, "group"))
    ranks.settle()
    with raised_on_all(ranks.all.backend):
        check_flags(blocking=blocking)
        integer("max_file_size", max_file_size, minimum=1)
        check_model_and_optimizer(model, optimizer)
        target = Path(os.path.realpath(os.fspath(path)))  # a link is followed, and not replaced
        state = {
            "format": FORMAT,
            "version": VERSION,
            "step": integer("step", step, minimum=0),
            "epoch": integer("epoch", epoch, minimum=0),
            "layout": {"ranks": ranks.all.size, "nodes": ranks.nodes, "model": type(model).__name__},
            "versions": versions_here(),
            "scheduler": _state_of("scheduler", scheduler),
            "scaler": _state_of("scaler", scaler),
            "sampler": _state_of("sampler", sampler),
            "extra": encoded(extra, "extra"),
        }
        json.dumps(state)  # values without a JSON form raise now, on all ranks
    arguments = {"path": os.path.abspath(path), "step": step, "epoch": epoch, "blocking": blocking}
    arguments |= {"max_file_size": max_file_size, "optimizer": optimizer is not None}
    same_on_all_ranks(
        ranks.all.backend,
        [f"{name} {value}" for name, value in arguments.items()],
        "save_checkpoint: the arguments are not the same on all ranks",
        "Give all ranks the same path and numbers.",
    )
    found = model_shards(model, ranks.all)
    with found.stable():
        job = _planned(target, found, optimizer, state, ranks, max_file_size)
        if blocking:
            write_checkpoint(job, ranks)
            return None
        with raised_on_all(ranks.all.backend):
            snapshot = _snapshot(job.plan)
    return _write_beside(job, snapshot, optimizer, ranks)


def check_model_and_optimizer(model: object, optimizer: object) -> None:
    """Raise unless a model and an optimizer have their types; local.

    Raises:
        TypeError: The model is no module, or the optimizer is neither an optimizer nor None.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")


def _state_of(name: str, stateful: Stateful | None) -> Any:
    if stateful is None:
        return None
    if not callable(getattr(stateful, "state_dict", None)):
        raise TypeError(f"{name}: expected something with state_dict(), got {type(stateful).__name__}")
    return encoded(stateful.state_dict(), name)


def versions_here() -> dict[str, str]:
    """Return the versions of this library, torch and Python."""
    try:
        own = metadata.version("axonmpi")
    except metadata.PackageNotFoundError:  # its folder is on PYTHONPATH
        own = "unknown"
    return {"axonmpi": own, "torch": str(torch.__version__), "python": platform.python_version()}


# ---- the plan ---------------------------------------------------------------------------------------------------


def _planned(
    target: Path,
    found: ModelShards,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    ranks: CheckpointRanks,
    max_file_size: int,
) -> Job:
    """Find this rank's shards, and plan the files with all ranks; collective."""
    with raised_on_all(ranks.all.backend):
        shards: dict[str, Sequence[TensorShard]] = {"model": _model_shards(found, optimizer)}
        notes: dict[str, Any] = {"model": {"aliases": found.aliases, "extra": found.extra}}
        notes |= {"optimizer": None, "config": found.config}
        if optimizer is not None:
            own = optimizer_shards(optimizer, found)
            notes["optimizer"] = own.state
            shards["optimizer"] = [dataclasses.replace(shard, may_wait=True) for shard in own.shards]
        shards["random"] = random_shards(ranks.all)
        for kind, of_kind in shards.items():
            _check_names(kind, [shard.name for shard in of_kind])
    ranks.plan, plan = plan_writes(ranks.all, shards, notes, max_file_size, ranks.plan)
    files, notes = ranks.plan.files, dict(ranks.plan.known.notes)
    config = notes.pop("config")
    texts = texts_of({**state, **notes}, config, files) if ranks.all.rank == 0 else {}
    return Job(target, [file for of_kind in files.values() for file in of_kind], plan, plan.nbytes, texts)


def _model_shards(found: ModelShards, optimizer: torch.optim.Optimizer | None) -> list[TensorShard]:
    """Return the shards of a model, with `may_wait` set for the parameters of the optimizer."""
    parameters = [] if optimizer is None else parameters_of(optimizer)
    names = {placement.name for placement in map(found.placement_of, parameters) if placement is not None}
    return [dataclasses.replace(shard, may_wait=shard.name in names) for shard in found.shards]


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


def texts_of(
    state: Mapping[str, Any], config: Mapping[str, Any] | None, files: Mapping[str, list[TensorFile]]
) -> dict[str, bytes]:
    """Return the small files of a checkpoint by name; local."""
    values: dict[str, Any] = {STATE_FILE: state}
    if config is not None:
        values["config.json"] = config
    for kind, of_kind in files.items():
        if len(of_kind) > 1:
            values[f"{kind}.safetensors.index.json"] = index_of(of_kind)
    return {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in values.items()}


# ---- beside training --------------------------------------------------------------------------------------------


def _snapshot(plan: LocalPlan) -> Snapshot:
    try:
        snapshot = Snapshot(plan)
        snapshot.copy_now()
    except (RuntimeError, MemoryError) as error:
        message = f"blocking: no memory for a copy of {plan.nbytes} bytes, so save with blocking=True: {error}"
        raise ValueError(message) from error
    return snapshot


def _write_beside(
    job: Job, snapshot: Snapshot, optimizer: torch.optim.Optimizer | None, ranks: CheckpointRanks
) -> Work:
    """Write a checkpoint on a thread, or on the caller's if MPI allows no other thread; local."""

    def write() -> None:
        write_checkpoint(job._replace(plan=snapshot.plan), ranks, snapshot.copy_rest)

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
