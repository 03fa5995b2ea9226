"""A copy of what this rank writes, made while the program trains.

    save_checkpoint(blocking=False)     buffers and random states are copied
    forward, backward                   meanwhile parameters and the optimizer's state are, on a thread
    optimizer.step()                    waits until they are, and then changes them
    ...                                 the thread writes the copies

Forward and backward change neither the optimizer's parameters nor its state: copies have the values of the call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...utils.device import device_at
from ..shards.tensor_shard import Piece
from .local_plan import FileSlice, LocalPlan, ShortRuns
from .output import CHUNK_BYTES, bytes_of, elements_of


class Snapshot:
    """Replicas of this rank's share of a checkpoint.

    Args:
        share: What the rank writes.

    Attributes:
        share: The same of the copies.
        is_copied: Set when all values are in it.
    """

    def __init__(self, share: LocalPlan) -> None:
        self._pairs: list[tuple[FileSlice, Tensor]] = [
            (file_slice, torch.empty(file_slice.last - file_slice.first, dtype=file_slice.view.dtype, device="cpu"))
            for file_slice in share.slices
        ]
        self._scattered: list[tuple[ShortRuns, Tensor]] = [
            (one, torch.empty(one.piece.subarray.size, dtype=one.piece.view.dtype, device="cpu"))
            for one in share.short_runs
        ]
        self.share = LocalPlan(
            [file_slice._replace(view=copy, first=0, last=copy.numel()) for file_slice, copy in self._pairs],
            [one._replace(piece=Piece(one.piece.subarray, copy)) for one, copy in self._scattered],
        )
        self.is_copied = threading.Event()
        devices = {device_at(source.device) for source in self._sources()}
        self._computed = [(device, device.record(device.current_stream())) for device in devices]

    def _sources(self) -> Iterator[Tensor]:
        yield from (file_slice.view for file_slice, _ in self._pairs)
        yield from (one.piece.view for one, _ in self._scattered)

    def copy_now(self) -> None:
        """Copy what may change before the optimizer steps; local."""
        self._copy(may_wait=False)

    def copy_rest(self) -> None:
        """Copy everything else, when the device has computed what it was told before the call; local."""
        try:
            for device, event in self._computed:
                device.block(event)
            self._copy(may_wait=True)
        finally:
            self.is_copied.set()

    @torch.no_grad()
    def _copy(self, *, may_wait: bool) -> None:
        for file_slice, copy in self._pairs:
            if file_slice.may_wait == may_wait:
                _copy(file_slice, copy)
        for one, copy in self._scattered:
            if one.may_wait == may_wait:
                copy.copy_(one.piece.view)


def _copy(file_slice: FileSlice, copy: Tensor) -> None:
    """Copy in chunks, on this thread alone: torch would use all cores, which the program computes on."""
    target = np.asarray(bytes_of(copy))
    for begin, source in _chunks(file_slice):
        np.copyto(target[begin : begin + len(source)], source)


def _chunks(file_slice: FileSlice) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    size = file_slice.view.itemsize
    step = max(1, CHUNK_BYTES // size)
    for first in range(file_slice.first, file_slice.last, step):
        last = min(first + step, file_slice.last)
        yield (first - file_slice.first) * size, np.asarray(bytes_of(elements_of(file_slice.view, first, last)))
