"""`CheckpointFolder`: the checkpoints of a run, of which the newest are kept.

    ROOT/step-00000100              an older checkpoint
    ROOT/step-00000200              the newest one
    ROOT/latest -> step-00000200    for programs that only read
    ROOT/step-00000050.deleted      on its way out; like .partial, removed by the next start
    ROOT/.latest.axonmpi-lock       held by the job that saves

Rank 0 looks and tidies up, and tells the others. A checkpoint counts if it looks whole: all its files are there, as
long as their headers say, and all but the values of tensors is as it was written. Damage inside of these is found
when it is loaded, and then the one before is taken.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..collectives.agreement import check_same, raised_on_all
from ..errors import CheckpointError
from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..types import Seconds
from ..utils.arguments import either_group_name, integer
from .background import Background
from .files.folders import check_own, partial_of, recover
from .files.integrity import damage_of
from .files.lock import SUFFIX, Lock, lock_of
from .loading import CheckpointInfo, load_checkpoint
from .saving import save_checkpoint

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,})")
_LEFT_LOCK = re.compile(rf"\.(step-\d{{8,}}){re.escape(SUFFIX)}")
_DELETED = re.compile(r"step-\d{8,}\.deleted")
_locks: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()
T = TypeVar("T")


class CheckpointFolder:
    """The checkpoints of one run: saves them, keeps the newest, finds and loads the newest whole one.

    Construction is collective, and so is every method. Construction removes checkpoints that a killed job has left
    half written or half deleted. One job at a time has such an object for a root; a second job gets an error that
    names the first. Programs that only read load `root/latest` instead.

    Args:
        root: The folder, the same on all ranks and on a file system that all of them see; made when first needed.
        keep: How many checkpoints to keep, at least 1; None keeps all.
        group: The ranks that have shards of the model; None means all.

    Attributes:
        root: The folder, as an absolute path.
        keep: As given.

    Raises:
        ValueError: `keep` is below 1, or ranks have different arguments; on all ranks.
        CheckpointError: The folder cannot be read or tidied up, or another job has it; on all ranks.
    """

    @either_group_name
    def __init__(
        self, root: str | os.PathLike[str], keep: int | None = 3, *, group: ProcessGroup | None = None
    ) -> None:
        self._group = group_of_this_rank(group, "group")
        backend = self._group.backend
        with raised_on_all(backend):
            self.root = Path(os.path.abspath(os.fspath(root)))
            self.keep = None if keep is None else integer("keep", keep, minimum=1)
        check_same(
            backend,
            [f"root {self.root}", f"keep {self.keep}"],
            "CheckpointFolder: the arguments are not the same on all ranks",
            "Give all ranks the same folder, on a file system that all of them see.",
        )
        self._saving: Background | None = None
        self._lock: Lock | None = None  # of rank 0
        self._is_locked = self._on_first(self._tidy)

    # ---- saving ---------------------------------------------------------------------------------------------

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int,
        blocking: bool = True,
        **others: Any,
    ) -> Background | None:
        """Save a checkpoint as `root/step-NNNNNNNN`, and remove those that are not to be kept; collective.

        Checkpoints of later steps are removed as well: the run has gone back to an earlier one.

        Args:
            model: As for `save_checkpoint`.
            optimizer: As for `save_checkpoint`.
            step: Steps made so far; also the folder's name.
            blocking: As for `save_checkpoint`. Without it older ones are removed when this one is complete.
            **others: More arguments of `save_checkpoint`.

        Returns:
            None; without `blocking` a `Work`, as `save_checkpoint` does.

        Raises:
            ValueError: As `save_checkpoint`.
            CheckpointError: The checkpoint cannot be written; on all ranks. The earlier ones are still there. That
                older ones cannot be removed is a warning.
        """
        with raised_on_all(self._group.backend):
            step = integer("step", step, minimum=0)
        self._wait()
        if not self._is_locked:
            self._is_locked = self._on_first(self._take)
        path = self.path_of(step)
        work = save_checkpoint(path, model, optimizer, step=step, blocking=blocking, group=self._group, **others)
        if work is None:
            self._on_first(lambda: self._keep_newest(step))
            return None
        assert isinstance(work, Background)
        if self._group.rank:
            return work
        self._saving = _SaveAndTidy(work, lambda: self._keep_newest(step))
        self._saving.start()
        return self._saving

    def path_of(self, step: int) -> Path:
        """Return the path of a step's checkpoint, there or not; local."""
        return self.root / f"step-{step:08}"

    def _wait(self) -> None:
        """Wait until older checkpoints are removed: a save that goes back a few steps must not be among them."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None

    def _keep_newest(self, step: int) -> None:
        """Let `latest` lead to the checkpoint of a step, and remove others; on rank 0."""
        try:
            found = self._found()
            if step not in found:  # it could not be written
                return
            self._point_to(found[step])
            whole = sorted((each for each in found if each <= step and not damage_of(found[each])), reverse=True)
            oldest = whole[: self.keep][-1] if whole else 0
            for each in found.keys() - range(oldest, step + 1):
                self._delete(found[each])
        except OSError as error:
            self._say_untidy(error)

    def _delete(self, path: Path) -> None:
        """Remove a checkpoint: at any instant it is there, or to be removed by the next start."""
        going = path.with_name(f"{path.name}.deleted")
        try:
            check_own(path)
            assert self._lock is not None
            if going.exists() and self._lock.may_tidy:
                shutil.rmtree(going)
            path.rename(going)
            self._lock.may_tidy = True
            shutil.rmtree(going)
        except OSError as error:
            self._say_untidy(error)

    def _say_untidy(self, error: OSError) -> None:
        warnings.warn(f"{self.root}: cannot be tidied up: {_text_of(error)}", RuntimeWarning, stacklevel=2)

    def _point_to(self, path: Path) -> None:
        """Let `latest` lead to a checkpoint, at any instant to this one or to the one before."""
        latest, fresh = self.root / LATEST, partial_of(self.root / LATEST)
        for each in (latest, fresh):
            if os.path.lexists(each) and not each.is_symlink():
                raise FileExistsError(errno.EEXIST, "it is no link to a checkpoint: move it away", str(each))
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(path.name)
        fresh.replace(latest)

    # ---- loading --------------------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """Return the newest checkpoint that looks whole, the same on all ranks, or None; collective.

        Raises:
            CheckpointError: The folder cannot be read; on all ranks.
        """
        whole = self._whole_ones()
        return whole[0] if whole else None

    def load_latest(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Any
    ) -> CheckpointInfo | None:
        """Load the newest checkpoint, or where it is damaged, with a warning, the one before; collective.

        Args:
            model: As for `load_checkpoint`; in place.
            optimizer: As for `load_checkpoint`; in place.
            **others: More arguments of `load_checkpoint`.

        Returns:
            What `load_checkpoint` returns; None if there is no checkpoint yet.

        Raises:
            ValueError: As `load_checkpoint`.
            CheckpointError: There are checkpoints, but none can be loaded; on all ranks. Model and optimizer are
                then not to be used.
        """
        whole = self._whole_ones()
        for number, path in enumerate(whole, 1):
            try:
                return load_checkpoint(path, model, optimizer, group=self._group, **others)
            except CheckpointError as error:
                if number == len(whole):
                    raise
                self._warn(f"{error}; the checkpoint before it, {whole[number].name}, is loaded instead")
        return None

    def _whole_ones(self) -> list[Path]:
        """Return the checkpoints that look whole, the newest first; collective."""
        self._wait()
        return self._on_first(self._look)

    def _look(self) -> list[Path]:
        found = self._found()
        whole = []
        for step in sorted(found, reverse=True):
            if damage := damage_of(found[step]):
                self._warn(f"{damage}; {found[step].name} is not used")
            else:
                whole.append(found[step])
        if found and not whole:
            raise CheckpointError(f"{self.root}: none of the {len(found)} checkpoints in it is whole")
        return whole

    def _warn(self, text: str) -> None:
        if self._group.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    # ---- the folder, on rank 0 ------------------------------------------------------------------------------

    def _on_first(self, work: Callable[[], T]) -> T:
        """Return on all ranks what rank 0 does, or raise on all what it raises; collective."""
        value, problem = None, ""
        if self._group.rank == 0:
            try:
                value = work()
            except OSError as error:
                problem = f"{self.root}: {_text_of(error)}"
            except CheckpointError as error:
                problem = str(error)
        value, problem = self._group.broadcast_object((value, problem))
        if problem:
            raise CheckpointError(problem)
        found: T = value
        return found

    def _locked(self) -> Lock:
        """Return the lock of the folder, which all such objects of this process have in common."""
        path = Path(os.path.realpath(self.root))
        lock = _locks.get(path)
        if lock is None:
            lock = _locks[path] = Lock(lock_of(path / LATEST))
        return lock

    def _found(self) -> dict[int, Path]:
        """Return all checkpoints by their steps, whole or not."""
        if not self.root.exists():
            return {}
        matches = ((_STEP.fullmatch(path.name), path) for path in self.root.iterdir())
        return {int(match[1]): path for match, path in matches if match}

    def _take(self) -> bool:
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        return True

    def _tidy(self) -> bool:
        """Remove what a killed job has left, and let `latest` lead to the newest checkpoint that looks whole.

        Returns:
            Whether there is a folder, which is then locked.
        """
        if not self.root.exists():
            return False
        left = sorted(self.root.iterdir())
        self._lock = self._locked()
        for path in left:
            if match := _LEFT_LOCK.fullmatch(path.name):
                recover(self.root / match[1])
            elif self._lock.may_tidy and _DELETED.fullmatch(path.name):
                shutil.rmtree(path)
        found = self._found()
        newest = next((found[step] for step in sorted(found, reverse=True) if not damage_of(found[step])), None)
        latest = self.root / LATEST
        if self._lock.may_tidy and partial_of(latest).is_symlink():
            partial_of(latest).unlink()
        if newest is not None and (not latest.is_symlink() or os.readlink(latest) != newest.name):
            self._point_to(newest)
        return True


class _SaveAndTidy(Background):
    """A save in the background, and then the removal of older checkpoints; on rank 0.

    Args:
        save: The save.
        tidy: What to do after it.
    """

    def __init__(self, save: Background, tidy: Callable[[], None]) -> None:
        super().__init__(self._save_and_tidy, f"{save}, and the removal of older ones")
        self._save = save
        self._tidy = tidy

    def _save_and_tidy(self) -> None:
        self._save.join()
        self._tidy()

    def wait(self, timeout: Seconds | None = None) -> None:
        """Wait until both are complete; raise what the save has raised."""
        super().wait(timeout)
        self._save.wait()

    def claim(self) -> None:
        """Leave it to the caller of `wait` to hear of an error; local."""
        self._save.claim()


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return str(error)
