"""`load_checkpoint`: from a checkpoint, or another tool's weights, to a model, an optimizer and a few numbers.

rank 0          reads headers and small files, and tells the others
all ranks       find what they have of which tensor; whatever does not fit is an error before anything is changed
each node       reads the blocks that its ranks need
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..collectives.agreement import check_same, raised_on_all
from ..errors import CheckpointError
from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..launch.board import phase
from ..launch.page import Phase
from ..utils.arguments import check_flags, either_group_name
from .files.contents import Contents, read_contents
from .files.tensor_file import TensorSpec
from .files.values import decoded
from .ranks import CheckpointRanks, ranks_of
from .reading import check_blocks, read_shards
from .saving import Stateful
from .shards.model_shards import ModelShards, model_shards, reshaped_buffers
from .shards.optimizer_shards import prepare_optimizer
from .shards.random_state import prepare_random
from .shards.tensor_shard import TensorShard

_MOST_NAMES = 20


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says beside values of tensors.

    Attributes:
        step: Steps made when it was saved; 0 for files of other tools.
        epoch: Number of the epoch.
        extra: What was given as `extra`.
        layout: The ranks that saved it: `ranks`, `nodes` and the class of the `model`.
        missing: Names that the model has and the checkpoint has not; without `strict` they keep their values.
        unexpected: Names that the checkpoint has and the model has not.
    """

    step: int = 0
    epoch: int = 0
    extra: Any = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@either_group_name
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

    Each rank gets its own shards. The ranks of a node share the reading of blocks that several of them need. A
    folder of `transformers` and a `.safetensors` file of any tool are read, too, as initial weights.

    Args:
        path: A checkpoint, a folder with `model.safetensors` or its index, or a `.safetensors` file; the same on
            all ranks.
        model: What `save_checkpoint` takes; it has the values afterwards.
        optimizer: Gets its state and options, if they were saved.
        scheduler: Gets its state, as the two below; what is None is left out.
        scaler: A scaler of losses.
        sampler: A sampler.
        strict: Whether names that only the model or only the file has are an error.
        dtype: A floating-point dtype that the model's floating-point values are rounded to; they are converted to
            the dtypes of the model in any case. None means no rounding before.
        random: Whether each rank's random state is restored, if the checkpoint has as many as there are ranks.
        group: The ranks that have shards of the model; None means all.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: Ranks have different arguments, or what is there does not fit; on all ranks. Model and optimizer
            are as they were; of schedule, scaler and sampler one may have been loaded before the next refused.
        CheckpointError: There is no checkpoint, or it is damaged; on all ranks. Names files, tensors and ranks.
            Nothing has been changed, except where a file cannot be read any more that could be a moment before, or
            changes meanwhile: then the values of the model are undefined.
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
    check_same(
        ranks.all.backend,
        arguments,
        "load_checkpoint: the arguments are not the same on all ranks",
        "Give all ranks the same path, and the same objects to load.",
    )
    kinds = ["model"] + ["optimizer"] * (optimizer is not None) + ["random"] * random
    contents = _read_on_first(target, kinds, ranks.all)
    for name, given in {"optimizer": optimizer, **states}.items():
        if given is not None and contents.state.get(name) is None:
            raise ValueError(f"{name}: {target} has no state of one: leave {name}= out")
    return _load(contents, model, optimizer, states, ranks, strict=strict, dtype=dtype)


def _check_types(model: object, optimizer: object, states: Mapping[str, object], dtype: torch.dtype | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    for name, stateful in states.items():
        if stateful is not None and not callable(getattr(stateful, "load_state_dict", None)):
            raise TypeError(f"{name}: expected something with load_state_dict(), got {type(stateful).__name__}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating-point torch.dtype or None, got {dtype!r}")


def _read_on_first(path: Path, kinds: Sequence[str], group: ProcessGroup) -> Contents:
    """Read what is in a checkpoint on the first rank and return it on all; collective."""
    contents: Contents | None = None
    problem = ""
    if group.rank == 0:
        try:
            contents = read_contents(path, kinds)
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{error.filename or path}: cannot be read: {error.strerror or error}"
        except Exception as error:  # the other ranks wait
            problem = f"{path}: cannot be read: {type(error).__name__}: {error}"
    told: Contents | None
    told, problem = group.broadcast_object((contents, problem), 0)
    if told is None:
        raise CheckpointError(problem)
    return told


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
        described = model_shards(model, ranks.all)
        stack.enter_context(described.stable())
        fit = _fit(described, contents, ranks.all)
        fit.check(strict=strict)
        with raised_on_all(ranks.all.backend):
            optimized, give = _prepared(optimizer, described, contents)
            rows, restore = prepare_random(ranks.all, contents.specs("random"))
        # Into memory of their own, and then all of the model's files: damage shows before anything is changed.
        others = [(shard.name, shard) for shard in [*optimized, *rows]]
        read_shards(contents.folder, [*files["optimizer"], *files["random"]], others, ranks, contents.checksums)
        check_blocks(contents.folder, files["model"], ranks, contents.checksums)
        with raised_on_all(ranks.all.backend):
            for name, stateful in states.items():
                if stateful is not None:
                    stateful.load_state_dict(decoded(state[name]))
        read_shards(contents.folder, files["model"], fit.shards, ranks, contents.checksums, dtype=dtype)
        described.loaded(_extra_in(contents))
    give()
    restore()
    return CheckpointInfo(
        state.get("step", 0),
        state.get("epoch", 0),
        decoded(state.get("extra")),
        state.get("layout", {}),
        fit.missing,
        fit.unexpected,
    )


def _extra_in(contents: Contents) -> Mapping[str, Any]:
    extra: Mapping[str, Any] = contents.state.get("model", {}).get("extra", {})
    return extra


def _prepared(
    optimizer: torch.optim.Optimizer | None, described: ModelShards, contents: Contents
) -> tuple[list[TensorShard], Callable[[], None]]:
    if optimizer is None:
        return [], lambda: None
    return prepare_optimizer(optimizer, described, contents.specs("optimizer"), contents.state["optimizer"])


# ---- whether a file has what a model needs ----------------------------------------------------------------------


class _Fit(NamedTuple):
    """What a file has of a model.

    Attributes:
        shards: This rank's, with the names that their tensors have in the file.
        missing: Names that the model has and the file has not, of all ranks.
        unexpected: Names that the file has and the model has not.
        wrong: What is wrong with tensors of shapes or dtypes that do not fit.
        where: The file, for messages.
    """

    shards: list[tuple[str, TensorShard]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong: tuple[str, ...]
    where: Path

    def check(self, *, strict: bool) -> None:
        """Raise if it does not fit; local, the same on all ranks.

        Raises:
            ValueError: Lists the names.
        """
        lines = list(self.wrong)
        if strict and self.unexpected:
            lines.insert(0, f"it has, and the model has not: {_listed(self.unexpected)}")
        if strict and self.missing:
            lines.insert(0, f"the model has, and it has not: {_listed(self.missing)}")
        if lines:
            todo = "" if self.wrong else "\nstrict=False loads what both have"
            raise ValueError(f"model: {self.where} does not fit it\n  " + "\n  ".join(lines) + todo)


def _fit(described: ModelShards, contents: Contents, group: ProcessGroup) -> _Fit:
    """Find the tensors of a model in a file, by any of the names that they have; collective."""
    in_file = contents.specs("model")
    names_of = {shard.name: [shard.name] for shard in described.shards}
    for alias, name in described.aliases.items():
        names_of.setdefault(name, [name]).append(alias)
    saved_as = contents.state.get("model", {}).get("aliases", {})  # tied when it was saved
    shards: list[tuple[str, TensorShard]] = []
    missing: list[str] = []
    for shard in described.shards:
        names = names_of[shard.name]
        found = [name for name in (*names, *(saved_as.get(name) for name in names)) if name in in_file]
        shards += [(found[0], shard)] if found else []
        missing += [] if found else [shard.name]
    extra = _extra_in(contents)
    missing += [name for name in described.extra if contents.state and name not in extra]
    wrong = [text for name, shard in shards if (text := _misfit(shard, in_file[name]))]
    known = set(chain(*names_of.values(), described.extra, (name for name, _ in shards)))
    unexpected = _unknown([*in_file, *extra], known, group)
    told = group.all_gather_object((missing, wrong))
    all_missing, all_wrong = (tuple(dict.fromkeys(chain(*texts))) for texts in zip(*told, strict=True))
    return _Fit(shards, all_missing, unexpected, all_wrong, contents.folder)


def _unknown(names: Sequence[str], known: Container[str], group: ProcessGroup) -> tuple[str, ...]:
    """Return the names that no rank knows; collective, `names` are the same on all."""
    marks = torch.tensor([name in known for name in names], dtype=torch.uint8, device="cpu")
    group.all_reduce_max(marks)
    return tuple(name for name, mark in zip(names, marks.tolist(), strict=True) if not mark)


def _misfit(shard: TensorShard, spec: TensorSpec) -> str:
    if shard.shape != spec.shape:
        return f"{spec.name!r}: expected shape {list(shard.shape)}, got {list(spec.shape)}"
    if _sort(shard.dtype) != _sort(spec.dtype):
        return f"{spec.name!r}: expected {_sort(shard.dtype)} such as {shard.dtype}, got {spec.dtype}"
    if _sort(shard.dtype) == "integers" and torch.promote_types(shard.dtype, spec.dtype) != shard.dtype:
        return f"{spec.name!r}: expected integers that {shard.dtype} holds, got {spec.dtype}"
    return ""


def _sort(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex numbers"
    return "floating-point numbers" if dtype.is_floating_point else "integers"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + more
