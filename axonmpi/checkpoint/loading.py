"""`load_checkpoint`: a checkpoint, or weights of another tool, to a model, an optimizer and a few values.

rank 0          reads headers and small files, and broadcasts them
all ranks       find their shards in the files; an error is raised before anything is changed
each node       reads the blocks that its ranks need
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..across_ranks.comparison import raised_on_all, same_on_all_ranks
from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..record import Phase, phase
from ..utils.arguments import check_flags
from ..utils.text import quoted
from .files.contents import Contents, read_contents
from .files.tensor_file import TensorSpec
from .files.values import decoded
from .rank_errors import first_rank_does
from .ranks import CheckpointRanks, ranks_of
from .reading import check_blocks, read_shards
from .saving import Stateful, check_model_and_optimizer
from .shards.model_shards import ModelShards, model_shards, reshaped_buffers
from .shards.optimizer_shards import prepare_optimizer
from .shards.random_state import prepare_random
from .shards.tensor_shard import TensorShard

_MOST_NAMES = 20


@dataclass(frozen=True)
class CheckpointInfo:
    """The values of a checkpoint that are no tensors.

    Attributes:
        step: Steps made when it was saved; 0 for files of other tools.
        epoch: Number of the epoch.
        extra: The argument `extra` of the save.
        layout: The ranks that saved it: `ranks`, `nodes` and the class of the `model`.
        missing: Names in the model and not in the checkpoint; without `strict` they keep their values.
        unexpected: Names in the checkpoint and not in the model.
    """

    step: int = 0
    epoch: int = 0
    extra: Any = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@phase(Phase.CHECKPOINT)
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    sampler: Stateful | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    random: bool = True,
    group: ProcessGroup | None = None,
) -> CheckpointInfo:
    """Read a model and its training state, saved by any number of ranks in any layout; collective.

    Each rank reads its own shards; a block that several ranks of a node need is read once. A folder of
    `transformers`, or a `.safetensors` file of any tool, is read as initial weights.

    Args:
        path: A checkpoint, a folder with `model.safetensors` or its index, or a `.safetensors` file; the same on
            all ranks.
        model: As for `save_checkpoint`; loaded in place.
        optimizer: Its state and options are loaded in place.
        scheduler: A learning-rate schedule, or another object with `load_state_dict()`; None leaves its state out.
        scaler: A loss scaler; otherwise as `scheduler`.
        sampler: A sampler, or a `StatefulDataLoader`; otherwise as `scheduler`.
        strict: Raise for names that only the model or only the file has.
        dtype: Floating-point values of the model are rounded to this dtype before they are converted to the
            model's own dtypes. None means no rounding.
        random: Restore the random state of each rank that has a saved one.
        group: The ranks with shards of the model; None means all.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: Ranks have different arguments, or the checkpoint does not fit; on all ranks. Model and
            optimizer are unchanged; a schedule, scaler or sampler may have been loaded before the next one
            refused its state.
        CheckpointError: There is no checkpoint, or it is damaged; on all ranks. Names files, tensors and ranks.
            Nothing has been changed, unless a file changes or fails after it was checked: then the values of the
            model are undefined.
    """
    ranks = ranks_of(group_of_this_rank(group, "group"))
    ranks.settle()
    states = {"scheduler": scheduler, "scaler": scaler, "sampler": sampler}
    with raised_on_all(ranks.all.backend):
        check_flags(strict=strict, random=random)
        _check_types(model, optimizer, states, dtype)
        target = Path(os.path.realpath(os.fspath(path)))
    arguments = [f"path {os.path.abspath(path)}", f"strict {strict}", f"dtype {dtype}", f"random {random}"]
    arguments += [f"{name} {value is not None}" for name, value in {"optimizer": optimizer, **states}.items()]
    same_on_all_ranks(
        ranks.all.backend,
        arguments,
        "load_checkpoint: the arguments are not the same on all ranks",
        "Give all ranks the same path, and the same objects to load.",
    )
    kinds = ["model"] + ["optimizer"] * (optimizer is not None) + ["random"] * random
    contents = first_rank_does(ranks.all, target, lambda: read_contents(target, kinds))
    for name, given in {"optimizer": optimizer, **states}.items():
        if given is not None and contents.state.get(name) is None:
            raise ValueError(f"{name}: {target} has no state of one: leave {name}= out")
    return _load(contents, model, optimizer, states, ranks, strict=strict, dtype=dtype)


def _check_types(model: object, optimizer: object, states: Mapping[str, object], dtype: torch.dtype | None) -> None:
    check_model_and_optimizer(model, optimizer)
    for name, stateful in states.items():
        if stateful is not None and not callable(getattr(stateful, "load_state_dict", None)):
            raise TypeError(f"{name}: expected something with load_state_dict(), got {type(stateful).__name__}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating-point torch.dtype or None, got {dtype!r}")


def _load(
    contents: Contents,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    states: Mapping[str, Stateful | None],
    ranks: CheckpointRanks,
    *,
    strict: bool,
    dtype: torch.dtype | None,
) -> CheckpointInfo:
    state, files = contents.state, contents.files
    with ExitStack() as stack:
        stack.enter_context(reshaped_buffers(model, contents.specs("model")))
        own = model_shards(model, ranks.all)
        stack.enter_context(own.stable())
        shards, missing, unexpected = _find_tensors(own, contents, ranks.all, strict=strict)
        with raised_on_all(ranks.all.backend):
            prepared = [prepare_random(ranks.all, contents.specs("random"))]
            if optimizer is not None:
                specs = contents.specs("optimizer")
                prepared.append(prepare_optimizer(optimizer, own, specs, state["optimizer"]))
        # States are read into new memory, and the model's files are checked, before anything is changed.
        others = [(shard.name, shard) for of_kind, _ in prepared for shard in of_kind]
        read_shards(contents.folder, [*files["optimizer"], *files["random"]], others, ranks, contents.checksums)
        check_blocks(contents.folder, files["model"], ranks, contents.checksums)
        with raised_on_all(ranks.all.backend):
            for name, stateful in states.items():
                if stateful is not None:
                    stateful.load_state_dict(decoded(state[name]))
        read_shards(contents.folder, files["model"], shards, ranks, contents.checksums, dtype=dtype)
        own.loaded(contents.of_model("extra"))
    for _, put_into_place in prepared:
        put_into_place()
    return CheckpointInfo(
        state.get("step", 0),
        state.get("epoch", 0),
        decoded(state.get("extra")),
        state.get("layout", {}),
        missing,
        unexpected,
    )


# ---- the model's tensors in the files ---------------------------------------------------------------------------


def _find_tensors(
    own: ModelShards, contents: Contents, group: ProcessGroup, *, strict: bool
) -> tuple[list[tuple[str, TensorShard]], tuple[str, ...], tuple[str, ...]]:
    """Find the tensors of a model in the files, by any of their names; collective.

    Returns:
        This rank's shards with the tensors' names in the files; names that only the model has, of all ranks; names
        that only the files have.

    Raises:
        ValueError: Shapes or dtypes do not fit, or `strict` is True and names are missing; on all ranks.
    """
    in_file, extra = contents.specs("model"), contents.of_model("extra")
    saved_as = contents.of_model("aliases")  # of parameters that were tied at the save
    names_of = {shard.name: [shard.name] for shard in own.shards}
    for alias, name in own.aliases.items():
        names_of.setdefault(name, [name]).append(alias)
    known = set(chain(own.extra, *names_of.values()))
    missing = [name for name in own.extra if contents.state and name not in extra]
    shards: list[tuple[str, TensorShard]] = []
    wrong: list[str] = []
    for shard in own.shards:
        names = names_of[shard.name]
        candidates = [*names, *(saved_as.get(name) for name in names)]
        found = next((name for name in candidates if name in in_file), None)
        if found is None:
            missing.append(shard.name)
            continue
        shards.append((found, shard))
        known.add(found)
        if problem := _misfit(shard, in_file[found]):
            wrong.append(problem)

    unexpected = _unknown([*in_file, *extra], known, group)
    of_ranks = group.all_gather_object((missing, wrong))
    all_missing, lines = (tuple(dict.fromkeys(chain(*texts))) for texts in zip(*of_ranks, strict=True))
    todo = "" if lines else "\nstrict=False loads what both have"
    if strict and unexpected:
        lines = (f"it has, and the model has not: {quoted(unexpected, _MOST_NAMES)}", *lines)
    if strict and all_missing:
        lines = (f"the model has, and it has not: {quoted(all_missing, _MOST_NAMES)}", *lines)
    if lines:
        raise ValueError(f"model: {contents.folder} does not fit it\n  " + "\n  ".join(lines) + todo)
    return shards, all_missing, unexpected


def _unknown(names: Sequence[str], known: Container[str], group: ProcessGroup) -> tuple[str, ...]:
    """Return the names that no rank knows; collective, with the same `names` on all ranks."""
    marks = torch.tensor([name in known for name in names], dtype=torch.uint8, device="cpu")
    group.all_reduce_max(marks)
    return tuple(name for name, mark in zip(names, marks.tolist(), strict=True) if not mark)


def _misfit(shard: TensorShard, spec: TensorSpec) -> str:
    if shard.shape != spec.shape:
        return f"{spec.name!r}: expected shape {list(shard.shape)}, got {list(spec.shape)}"
    if _number_kind(shard.dtype) != _number_kind(spec.dtype):
        return f"{spec.name!r}: expected {_number_kind(shard.dtype)} such as {shard.dtype}, got {spec.dtype}"
    if _number_kind(shard.dtype) == "integers" and torch.promote_types(shard.dtype, spec.dtype) != shard.dtype:
        return f"{spec.name!r}: expected integers that {shard.dtype} holds, got {spec.dtype}"
    return ""


def _number_kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex numbers"
    return "floating-point numbers" if dtype.is_floating_point else "integers"
