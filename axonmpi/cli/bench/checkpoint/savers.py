"""The variants of saving and loading, which take turns. Each returns when the bytes are on the disk."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....checkpoint import load_checkpoint, save_checkpoint
from ....comm import barrier
from ....groups.world import World
from .models import flat_state

AXONMPI, PLAIN, DCP, HUGGING_FACE = "axonmpi", "plain", "dcp", "hugging face"

Call = Callable[[], None]


class Savers:
    """Functions that save and load the same amount of state; all collective.

    Args:
        world: All ranks.
        folder: On a file system that all ranks see.
        own: axonmpi's sharded model, with its optimizer.
        other: torch's, as large.

    Attributes:
        nbytes: Bytes of the state, on all ranks together.
        saves: Functions that save, by name.
        loads: Functions that load a saved state, by name.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        own: tuple[nn.Module, torch.optim.Optimizer],
        other: tuple[nn.Module, torch.optim.Optimizer],
    ) -> None:
        self._folder = folder
        self._own = own
        self._other = other
        self._world = world
        model, optimizer = other
        states = [value for values in optimizer.state.values() for value in values.values()]
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *states])
        self._plain = torch.ones(-(-self.nbytes // world.size), dtype=torch.uint8)
        self.saves: dict[str, Call] = {AXONMPI: self._save, PLAIN: self._save_plain, DCP: self._save_dcp}
        if find_spec("safetensors") is not None:  # which the writer needs
            self.saves[HUGGING_FACE] = self._save_hugging_face
        self.loads: dict[str, Call] = {AXONMPI: self._load, PLAIN: self._load_plain, DCP: self._load_dcp}

    def _path(self, name: str) -> Path:
        return self._folder / name.replace(" ", "-")

    # ---- axonmpi ----------------------------------------------------------------------------------------------

    def _save(self) -> None:
        save_checkpoint(self._path(AXONMPI), *self._own)

    def _load(self) -> None:
        load_checkpoint(self._path(AXONMPI), *self._own)

    # ---- plain: each rank an equal slice of one file -----------------------------------------------------------

    def _save_plain(self) -> None:
        """Write as many bytes by `pwrite`, with one call if the system takes as many, and fsync."""
        path = self._path(PLAIN)
        if self._world.rank == 0:
            with path.open("wb") as file:
                file.truncate(len(self._plain) * self._world.size)
        barrier()
        self._transfer_plain(path, os.O_WRONLY, os.pwrite)
        barrier()

    def _load_plain(self) -> None:
        self._transfer_plain(
            self._path(PLAIN), os.O_RDONLY, lambda file, data, offset: os.preadv(file, [data], offset)
        )
        barrier()

    def _transfer_plain(self, path: Path, flags: int, transfer: Callable[[int, memoryview, int], int]) -> None:
        data, begin, done = self._plain.numpy().data, self._world.rank * len(self._plain), 0
        file = os.open(path, flags)
        try:
            while done < len(data):
                done += transfer(file, data[done:], begin + done)
            if flags == os.O_WRONLY:
                os.fsync(file)
        finally:
            os.close(file)

    # ---- torch ------------------------------------------------------------------------------------------------

    def _save_dcp(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._dcp_state(), checkpoint_id=self._path(DCP))

    def _load_dcp(self) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._dcp_state()
        load(state, checkpoint_id=self._path(DCP))
        set_state_dict(*self._other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _dcp_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(*self._other)
        return {"model": model, "optimizer": optimizer}

    def _save_hugging_face(self) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = HuggingFaceStorageWriter(
            str(self._path(HUGGING_FACE)), save_distributed=True, enable_consolidation=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own use of torch
            save(flat_state(*self._other), storage_writer=writer)


def remove_all(world: World, folder: Path) -> None:
    """Remove the folder's files, also from the disk's queue; collective."""
    barrier()
    if world.rank == 0:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    barrier()


def drop_cache(world: World, folder: Path) -> None:
    """Have the system drop its cached pages of the folder's files, so that it reads the disk; collective."""
    barrier()
    if world.rank == 0:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    barrier()
