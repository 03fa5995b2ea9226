"""`CheckpointFolder`: the checkpoints of a run, of which the newest are kept.

    ROOT/step-00000100              an older checkpoint
    ROOT/step-00000200              the newest one
    ROOT/latest -> step-00000200    for programs that only read
    ROOT/step-00000050.deleted      half deleted; like .partial, removed by the next start
    ROOT/.latest.axonmpi-lock       held by the job that saves

Rank 0 reads and changes the folder, and broadcasts the result. A checkpoint counts as complete if all files are
there in their sizes, and everything but the values of tensors fits its checksums. Loading finds damage of the
values, and then the checkpoint before is loaded.
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
from typing import Any

import torch
from torch import nn

from ..across_ranks.comparison import raised_on_all, same_on_all_ranks
from ..errors import CheckpointError
from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..types import Seconds
from ..utils.arguments import integer
from .background import Background
from .files.folders import check_own, partial_of, recover
from .files.integrity import damage_of
from .files.lock import SUFFIX, Lock, lock_of
from .loading import CheckpointInfo, load_checkpoint
from .rank_errors import first_rank_does
from .saving import save_checkpoint

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,})")
_LEFT_LOCK = re.compile(rf"\.(step-\d{{8,}}){re.escape(SUFFIX)}")
_DELETED = re.compile(r"step-\d{8,}\.deleted")
_locks: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()


class CheckpointFolder:
    """The checkpoints of one run: saves them, keeps the newest, and loads the newest complete one.

    Construction and every method are collective. Construction removes checkpoints that a killed job has left half
    written or half deleted. Only one job at a time has such an object for a root; a second job gets an error that
    names the first. Programs that only read load `root/latest` instead.

    Args:
        root: The folder, the same on all ranks and on a file system that all of them see; made by the first save.
        keep: Number of checkpoints to keep, at least 1; None keeps all.
        group: The ranks with shards of the model; None means all.

    Attributes:
        root: The folder, as an absolute path.
        keep: The argument.

    Raises:
        ValueError: `keep` is below 1, or ranks have different arguments; on all ranks.
        CheckpointError: The folder cannot be read or changed, or another job holds its lock; on all ranks.
    """

    def __init__(
        self, root: str | os.PathLike[str], keep: int | None = 3, *, group: ProcessGroup | None = None
    ) -> None:
        self._group = group_of_this_rank(group, "group")
        backend = self._group.backend
        with raised_on_all(backend):
            self.root = Path(os.path.abspath(os.fspath(root)))
            self.keep = None if keep is None else integer("keep", keep, minimum=1)
        same_on_all_ranks(
            backend,
            [f"root {self.root}", f"keep {self.keep}"],
            "CheckpointFolder: the arguments are not the same on all ranks",
            "Give all ranks the same folder, on a file system that all of them see.",
        )
        self._saving: Background | None = None
        self._lock: Lock | None = None  # of rank 0
        first_rank_does(self._group, self.root, self._recover)

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
        """Save a checkpoint as `root/step-NNNNNNNN`, and remove older ones that are not to be kept; collective.

        Checkpoints of later steps are removed as well: the run has gone back to an earlier one.

        Args:
            model: As for `save_checkpoint`.
            optimizer: As for `save_checkpoint`.
            step: Number of steps made; also the folder's name.
            blocking: As for `save_checkpoint`. If False, older checkpoints are removed when this one is complete.
            **others: More arguments of `save_checkpoint`.

        Returns:
            As `save_checkpoint`.

        Raises:
            ValueError: As `save_checkpoint`.
            CheckpointError: The checkpoint cannot be written; on all ranks. The earlier ones are still there. Older
                checkpoints that cannot be removed are a warning.
        """
        with raised_on_all(self._group.backend):
            step = integer("step", step, minimum=0)
        self._wait()
        first_rank_does(self._group, self.root, self._make_and_lock)
        path = self.path_of(step)
        work = save_checkpoint(path, model, optimizer, step=step, blocking=blocking, group=self._group, **others)
        if work is None:
            first_rank_does(self._group, self.root, lambda: self._keep_newest(step))
            return None
        assert isinstance(work, Background)
        if self._group.rank:
            return work
        self._saving = _SaveAndRemove(work, lambda: self._keep_newest(step))
        self._saving.start()
        return self._saving

    def path_of(self, step: int) -> Path:
        """Return the path of a step's checkpoint, there or not; local."""
        return self.root / f"step-{step:08}"

    def _wait(self) -> None:
        """Wait until older checkpoints are removed: a later save to one of their paths must not be."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None

    def _keep_newest(self, step: int) -> None:
        """Link `latest` to the checkpoint of a step, and remove others; on rank 0."""
        try:
            found = self._found()
            if step not in found:  # it could not be written
                return
            self._link_latest(found[step])
            complete = sorted((each for each in found if each <= step and not damage_of(found[each])), reverse=True)
            oldest = complete[: self.keep][-1] if complete else 0
            for each in found.keys() - range(oldest, step + 1):
                self._delete(found[each])
        except OSError as error:
            self._warn_of_removal(error)

    def _delete(self, path: Path) -> None:
        """Remove a checkpoint; after a kill at any time it is complete, or the next start removes it."""
        deleted = path.with_name(f"{path.name}.deleted")
        try:
            check_own(path)
            assert self._lock is not None
            if deleted.exists() and self._lock.may_tidy:
                shutil.rmtree(deleted)
            path.rename(deleted)
            self._lock.may_tidy = True
            shutil.rmtree(deleted)
        except OSError as error:
            self._warn_of_removal(error)

    def _warn_of_removal(self, error: OSError) -> None:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        warnings.warn(f"{self.root}: cannot be tidied up: {text}", RuntimeWarning, stacklevel=2)

    def _link_latest(self, path: Path) -> None:
        """Link `latest` to a checkpoint; until then it leads to the one before."""
        latest, fresh = self.root / LATEST, partial_of(self.root / LATEST)
        for each in (latest, fresh):
            if os.path.lexists(each) and not each.is_symlink():
                raise FileExistsError(errno.EEXIST, "it is no link to a checkpoint: move it away", str(each))
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(path.name)
        fresh.replace(latest)

    # ---- loading --------------------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """Return the newest checkpoint that looks complete, the same on all ranks, or None; collective.

        Raises:
            CheckpointError: The folder cannot be read; on all ranks.
        """
        complete = self._complete()
        return complete[0] if complete else None

    def load_latest(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Any
    ) -> CheckpointInfo | None:
        """Load the newest checkpoint; if it is damaged, warn and load the one before; collective.

        Args:
            model: As for `load_checkpoint`; in place.
            optimizer: As for `load_checkpoint`; in place.
            **others: More arguments of `load_checkpoint`.

        Returns:
            The result of `load_checkpoint`; None if there is no checkpoint yet.

        Raises:
            ValueError: As `load_checkpoint`.
            CheckpointError: There are checkpoints, but none can be loaded; on all ranks. The values of model and
                optimizer are then undefined.
        """
        complete = self._complete()
        for number, path in enumerate(complete, 1):
            try:
                return load_checkpoint(path, model, optimizer, group=self._group, **others)
            except CheckpointError as error:
                if number == len(complete):
                    raise
                self._warn(f"{error}; the checkpoint before it, {complete[number].name}, is loaded instead")
        return None

    def _complete(self) -> list[Path]:
        """Return the checkpoints that look complete, the newest first; collective."""
        self._wait()
        return first_rank_does(self._group, self.root, self._find_complete)

    def _find_complete(self) -> list[Path]:
        found = self._found()
        complete = []
        for step in sorted(found, reverse=True):
            if damage := damage_of(found[step]):
                self._warn(f"{damage}; {found[step].name} is not used")
            else:
                complete.append(found[step])
        if found and not complete:
            raise CheckpointError(f"{self.root}: none of the {len(found)} checkpoints in it is whole")
        return complete

    def _warn(self, text: str) -> None:
        if self._group.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    # ---- the folder, on rank 0 ------------------------------------------------------------------------------

    def _take_lock(self) -> Lock:
        """Take the folder's lock, which all such objects of this process share."""
        path = Path(os.path.realpath(self.root))
        lock = self._lock = _locks.get(path) or Lock(lock_of(path / LATEST))
        _locks[path] = lock
        return lock

    def _found(self) -> dict[int, Path]:
        """Return all checkpoints by their steps, complete or not."""
        if not self.root.exists():
            return {}
        matches = ((_STEP.fullmatch(path.name), path) for path in self.root.iterdir())
        return {int(match[1]): path for match, path in matches if match}

    def _make_and_lock(self) -> None:
        if self._lock is None:
            self.root.mkdir(parents=True, exist_ok=True)
            self._take_lock()

    def _recover(self) -> None:
        """Lock the folder, if it is there; remove the remains of a killed job, and link `latest` to the newest."""
        if not self.root.exists():
            return
        left = sorted(self.root.iterdir())
        lock = self._take_lock()
        for path in left:
            if match := _LEFT_LOCK.fullmatch(path.name):
                recover(self.root / match[1])
            elif lock.may_tidy and _DELETED.fullmatch(path.name):
                shutil.rmtree(path)
        latest = self.root / LATEST
        if lock.may_tidy and partial_of(latest).is_symlink():
            partial_of(latest).unlink()
        found = self._found()
        newest = next((found[step] for step in sorted(found, reverse=True) if not damage_of(found[step])), None)
        if newest is not None and (not latest.is_symlink() or os.readlink(latest) != newest.name):
            self._link_latest(newest)


class _SaveAndRemove(Background):
    """A save in the background, followed by the removal of older checkpoints; on rank 0.

    Args:
        save: The save.
        remove: Removes the older ones.
    """

    def __init__(self, save: Background, remove: Callable[[], None]) -> None:
        super().__init__(self._save_and_remove, f"{save}, and the removal of older ones")
        self._save = save
        self._remove = remove

    def _save_and_remove(self) -> None:
        self._save.join()
        self._remove()

    def wait(self, timeout: Seconds | None = None) -> None:
        """Wait until both are complete; raise an error of the save."""
        super().wait(timeout)
        self._save.wait()

    def claim(self) -> None:
        """Let only `wait` raise an error of the save; local."""
        self._save.claim()
