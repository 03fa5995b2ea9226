"""Checkpoints of a run: one to go on from, and saves during the run and at its end.

    axonmpi-runs/NAME/checkpoints/step-00000100     model, optimizer, random state, and the settings of the run

The data of a step depend on the seed and the step only, so a run that goes on has the same data. Model, text and
optimizer have to be the same, too. The number of ranks and their layout may differ.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..across_ranks.comparison import raised_on_all
from ..checkpoint.background import Background
from ..checkpoint.files.state_file import STATE_FILE
from ..checkpoint.folder import CheckpointFolder
from ..checkpoint.loading import load_checkpoint
from ..errors import CheckpointError
from ..groups.process_group import ProcessGroup
from .config import Config
from .report.metrics import METRICS, History, read_history

FOLDER = "checkpoints"
_OF_THE_RUN = ("seed", "steps", "global_batch", "dtype")
_WHY = {
    "steps": "the learning rate of a step depends on their number",
    "global_batch": "it decides the data of a step",
    "seed": "it decides the data of a step",
    "text": "it is what the run trains on",
}
T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """The state in which a run begins.

    Attributes:
        step: Steps made before.
        seconds: The time that they took.
        path: The checkpoint; None at the beginning.
        history: The metrics of these steps.
    """

    step: int = 0
    seconds: float = 0.0
    path: Path | None = None
    history: History = field(default_factory=History)


class RunCheckpoints:
    """The checkpoints of a run of the trainer; every method but `has_saved` is collective.

    Args:
        config: The run's settings.
        group: All ranks of the run.
        text: The digest of its text.

    Raises:
        CheckpointError: The folder cannot be read; on all ranks.
        ValueError: Ranks write to different folders; on all ranks.
    """

    def __init__(self, config: Config, group: ProcessGroup, text: str) -> None:
        self._config = config
        self._group = group
        self._decisive = {**_decisive(config), "text": text}
        self._folder = CheckpointFolder(config.run.folder / FOLDER, config.checkpoint.keep, group=group)
        self._under_way: Background | None = None
        self._summary = config.run.folder / "summary.json"

    # ---- going on -------------------------------------------------------------------------------------------

    def find(self) -> Path | None:
        """Return the checkpoint to go on from; or None, after removing the checkpoints of a finished earlier run.

        Raises:
            ValueError: There is no checkpoint at the given path, its run had other settings, or an earlier run
                here is not finished and would be lost; on all ranks.
            CheckpointError: There are checkpoints, and none of them is complete; on all ranks.
        """
        resume = self._config.checkpoint.resume
        path: Path | None = None
        if resume == "auto":
            path = self._folder.latest()
        elif resume != "none":
            path = self._on_first(lambda: _checkpoint_at(Path(resume)))
        if path is not None:
            self._on_first(lambda: self._check(path))
        if path is None or self._folder.root.resolve() not in path.resolve().parents:
            self._on_first(self._make_room)
        return path

    def finished(self, path: Path | None) -> dict[str, Any] | None:
        """Return the content of `summary.json` if the run is finished, else None."""
        if path is None or self._config.checkpoint.resume != "auto":
            return None
        return self._on_first(lambda: self._summary_of(path))

    def load(self, path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> Start:
        """Load a checkpoint; with `resume = auto`, the one before a damaged checkpoint, with a warning.

        Raises:
            CheckpointError: It is damaged; on all ranks.
            ValueError: It does not fit the model; on all ranks.
        """
        if path is None:
            return Start()
        if self._config.checkpoint.resume == "auto":
            info = self._folder.load_latest(model, optimizer)
            assert info is not None
            path = self._folder.path_of(info.step)
        else:
            info = load_checkpoint(path, model, optimizer, group=self._group)
        # beside the checkpoint, which may be another run's
        history = self._on_first(lambda: read_history(path.parent.parent / METRICS, info.step))
        return Start(info.step, info.extra["trainer"]["seconds"], path, history)

    def _summary_of(self, path: Path) -> dict[str, Any] | None:
        made = _state_of(path)["step"]
        if made < self._config.run.steps or not self._summary.exists():
            return None
        summary: dict[str, Any] = json.loads(self._summary.read_text("utf-8"))
        return summary

    def _check(self, path: Path) -> None:
        """Raise unless a checkpoint is of a run with the same model, text, data and optimizer; on rank 0."""
        known = (_state_of(path).get("extra") or {}).get("trainer")
        if known is None:
            raise ValueError(f"resume: {path} was not saved by axonmpi train: load it with axonmpi.load_checkpoint")
        wrong = [
            f"{name} {known['settings'][name]}, now {value}" + (f" ({_WHY[name]})" if name in _WHY else "")
            for name, value in self._decisive.items()
            if name in known["settings"] and known["settings"][name] != value
        ]
        if wrong:
            raise ValueError(
                f"resume: {path} was saved in a run with other settings: {'; '.join(wrong)}.\n"
                "Go on with the same ones; ranks and their layout may be others. Or begin a new run, with another "
                "--name and --resume none"
            )

    def _make_room(self) -> None:
        """Remove the checkpoints of a finished earlier run; on rank 0."""
        root = self._folder.root
        if not root.exists():
            return
        if any(root.glob("step-*")) and not self._summary.exists():
            raise ValueError(
                f"resume: {root} has checkpoints of a run that has not come to its end: go on with --resume auto, "
                f"choose another --name, or remove {self._config.run.folder}"
            )
        shutil.rmtree(root)

    def _on_first(self, work: Callable[[], T]) -> T:
        """Return on all ranks the result of rank 0, or raise on all its ValueError or OSError."""
        result = None
        with raised_on_all(self._group.backend):
            if self._group.rank == 0:
                try:
                    result = work()
                except OSError as error:
                    raise ValueError(f"resume: {error.filename}: {error.strerror}") from error
        shared: T = self._group.broadcast_object(result)
        return shared

    # ---- saving ---------------------------------------------------------------------------------------------

    def save(
        self, step: int, seconds: float, model: nn.Module, optimizer: torch.optim.Optimizer, *, blocking: bool
    ) -> Path:
        """Save a checkpoint, without `blocking` beside the steps that follow; return its path.

        Args:
            step: Steps made.
            seconds: The time that they took.
            model: The wrapped model.
            optimizer: The optimizer of its parameters.
            blocking: Whether to wait until it is complete.

        Raises:
            CheckpointError: It cannot be written; on all ranks.
        """
        extra = {"trainer": {"settings": self._decisive, "seconds": seconds}}
        work = self._folder.save(model, optimizer, step=step, blocking=blocking, extra=extra)
        if work is not None:
            work.claim()  # else the ranks would hear of an error in different steps
            self._under_way = work
        return self._folder.path_of(step)

    def has_saved(self) -> bool:
        """Return True if this rank has completed the save under way; local."""
        return self._under_way is not None and self._under_way.done()

    def settle(self) -> str:
        """Wait for the save under way, if there is one; return its error, empty without one; on all ranks."""
        work, self._under_way = self._under_way, None
        try:
            if work is not None:
                work.wait()
        except CheckpointError as error:
            return str(error)
        return ""


def _decisive(config: Config) -> dict[str, Any]:
    """Return the settings that decide the loss curve."""
    groups = (config.model, config.optimizer)
    names = [each.name for group in groups for each in dataclasses.fields(group)]
    settings = config.flat()
    return {name: settings[name] for name in (*names, *_OF_THE_RUN)}


def _checkpoint_at(path: Path) -> Path:
    """Return the checkpoint at a path, or the newest one of a run's folder or of its folder of checkpoints."""
    for folder in (path, path / "latest", path / FOLDER / "latest"):
        if (folder / STATE_FILE).exists():
            return folder.resolve()
    raise ValueError(
        f"resume: expected none, auto, or the path of a checkpoint or of the folder of a run, got {path}, which "
        f"{'has no checkpoint' if path.exists() else 'does not exist'}"
    )


def _state_of(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / STATE_FILE).read_text("utf-8"))
    return state
