"""A copy of the values that this rank writes, made while the program trains.

    save_checkpoint(blocking=False)     copies buffers and random states
    forward, backward                   meanwhile a thread copies parameters and the optimizer's state
    optimizer.step()                    waits until they are copied, and then changes them
    ...                                 the thread writes the copies

Forward and backward change neither the optimizer's parameters nor its state, so the copies have the values of the
call.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from ...utils.device import device_at
from ..shards.tensor_shard import Piece
from .local_plan import FileSlice, LocalPlan, ShortRuns
from .output import bytes_of, chunks_of, elements_of


class Snapshot:
    """Copies of the values of a plan.

    Args:
        plan: The bytes that this rank writes.

    Attributes:
        plan: The same bytes, from the copies.
        is_copied: Set when all values are copied.
    """

    def __init__(self, plan: LocalPlan) -> None:
        self._slices: list[tuple[FileSlice, Tensor]] = [
            (each, torch.empty(each.last - each.first, dtype=each.view.dtype, device="cpu")) for each in plan.slices
        ]
        self._short_runs: list[tuple[ShortRuns, Tensor]] = [
            (each, torch.empty(each.piece.subarray.size, dtype=each.piece.view.dtype, device="cpu"))
            for each in plan.short_runs
        ]
        self.plan = LocalPlan(
            [each._replace(view=copy, first=0, last=copy.numel()) for each, copy in self._slices],
            [each._replace(piece=Piece(each.piece.subarray, copy)) for each, copy in self._short_runs],
        )
        self.is_copied = threading.Event()
        views = [each.view for each, _ in self._slices] + [each.piece.view for each, _ in self._short_runs]
        devices = {device_at(view.device) for view in views}
        self._computed = [(device, device.record(device.current_stream())) for device in devices]

    def copy_now(self) -> None:
        """Copy the values that may change before the optimizer steps; local."""
        self._copy(may_wait=False)

    def copy_rest(self) -> None:
        """Copy the other values, after the device has finished the work that was queued before the save; local."""
        try:
            for device, event in self._computed:
                device.block(event)
            self._copy(may_wait=True)
        finally:
            self.is_copied.set()

    @torch.no_grad()
    def _copy(self, *, may_wait: bool) -> None:
        for file_slice, copy in self._slices:
            if file_slice.may_wait == may_wait:
                _copy_slice(file_slice, copy)
        for runs, copy in self._short_runs:
            if runs.may_wait == may_wait:
                copy.copy_(runs.piece.view)


def _copy_slice(file_slice: FileSlice, copy: Tensor) -> None:
    """Copy in chunks, on this thread alone: torch would use all cores, on which the program computes."""
    target = np.asarray(bytes_of(copy))
    for first, last in chunks_of(file_slice):
        source = np.asarray(bytes_of(elements_of(file_slice.view, first, last)))
        begin = (first - file_slice.first) * file_slice.view.itemsize
        np.copyto(target[begin : begin + len(source)], source)
