"""The small message that every collective over MPI begins with.

All ranks of a group exchange one slot of 128 bytes with a single all-gather:

    | fingerprint of the call, 8 bytes | a size, 8 bytes | payload, up to 112 bytes |

Ranks that made different calls see it at once, whatever they called. Data that fits into the payload needs no
further message. For all-reduces of such data there are `SmallPlan`s: a slot with the header already written and
the views already made, so that what Python adds to MPI's own all-reduce stays a few microseconds.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..types import ReduceOp
from ..utils.waiting import Steps, is_beside_computation
from .buffers import buffer_of
from .call import Call, mismatch_error
from .reduction import DTYPES, plain_binary, reduce_in_rank_order

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["PAYLOAD_BYTES", "SlotExchange", "SmallPlan", "describe", "described"]

SLOT_BYTES = 128
HEADER_BYTES = 16
PAYLOAD_BYTES = SLOT_BYTES - HEADER_BYTES
_TEXT_BYTES = 512
_MAX_CACHED = 1024
_YIELDS = 1000
_NAP_SECONDS = 1e-4


class SlotExchange:
    """The slots of one rank in one communicator.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The communicator.
        crowded: Whether ranks outnumber the cores anywhere in it, the same on all ranks. MPI libraries poll while
            they block, which then takes the core from the very ranks that are waited for: so this waits
            with a non-blocking exchange, yielding first and napping when it takes long.

    Attributes:
        own_words: The payload of the own slot as 14 integers.
        words: [ranks, 14] the payloads that came with the last exchange, as integers.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, *, crowded: bool) -> None:
        self._mpi = mpi
        self._crowded = crowded
        self._comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        with torch.inference_mode(False):  # what is made in that mode could not be written to outside of it
            self._own = torch.zeros(SLOT_BYTES, dtype=torch.uint8, device="cpu")
            self._all = torch.zeros(self.size, SLOT_BYTES, dtype=torch.uint8, device="cpu")
        self._header = self._own.numpy().view(np.int64)
        words = self._all.numpy().view(np.int64)
        self._keys, self._extras = words[:, 0], words[:, 1]
        self.own_words = self._own[HEADER_BYTES:].numpy().view(np.int64)
        self.words = words[:, HEADER_BYTES // 8 :]
        self._out = self._spec(self._own)
        self._in = self._spec(self._all)
        self._views: dict[Any, tuple[Tensor, list[Tensor]]] = {}

    @property
    def own_payload(self) -> Tensor:
        """The payload of the own slot, 112 bytes."""
        return self._own[HEADER_BYTES:]

    @property
    def payloads(self) -> Tensor:
        """The payloads that came with the last exchange, [ranks, 112] bytes."""
        return self._all[:, HEADER_BYTES:]

    def agree(self, call: Call, extra: int = 0) -> list[int]:
        """Exchange the slots; return every rank's `extra`. Collective.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        self._header[0] = call.key
        self._header[1] = extra
        self.swap(call, self._out)
        extras: list[int] = self._extras.tolist()
        return extras

    def agree_in_steps(self, call: Call, first: int, second: int) -> Steps[list[list[int]]]:
        """Do what `agree` does in steps, with two words of payload; return those of all ranks. Collective."""
        self._header[0] = call.key
        self._header[1] = 0
        self.own_words[0], self.own_words[1] = first, second
        yield from self.swap_in_steps(call, self._out)
        words: list[list[int]] = self.words[:, :2].tolist()
        return words

    def swap(self, call: Call, out: list[Any]) -> None:
        """Exchange a slot whose header is written already."""
        self._exchange(call, out)
        self._check(call)

    def swap_in_steps(self, call: Call, out: list[Any]) -> Steps[None]:
        """Do what `swap` does in steps; no other exchange may begin meanwhile."""
        request = self._comm.Iallgather(out, self._in)
        while not request.Test():
            yield False
        self._check(call)

    def _check(self, call: Call) -> None:
        if self._keys.tolist().count(call.key) != self.size:
            raise self._mismatch(call)

    def _exchange(self, call: Call, out: list[Any]) -> None:
        if self._crowded:
            self._wait_gently(self._comm.Iallgather(out, self._in))
        else:
            self._comm.Allgather(out, self._in)

    def _wait_gently(self, request: Any) -> None:
        """Wait without keeping a core from the ranks that have not come yet."""
        polls = _YIELDS if is_beside_computation() else 0
        while not request.Test():
            polls += 1
            if polls < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)

    def _mismatch(self, call: Call) -> Exception:
        """All ranks have seen different fingerprints, so all of them come here to exchange texts."""
        text = str(call).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        texts = bytearray(_TEXT_BYTES * self.size)
        self._comm.Allgather(text, texts)
        rows = (texts[i : i + _TEXT_BYTES] for i in range(0, len(texts), _TEXT_BYTES))
        return mismatch_error([row.rstrip(b"\0").decode(errors="replace") for row in rows])

    def views(self, call: Call) -> tuple[Tensor, list[Tensor]]:
        """Return the own payload and all ranks' as tensors of the call's dtype and shape."""
        assert call.dtype is not None
        views = self._views.get((call.dtype, call.shape))
        if views is None:
            with torch.inference_mode(False):
                views = _payload(self._own, call), [_payload(slot, call) for slot in self._all]
            if len(self._views) >= _MAX_CACHED:
                self._views.clear()
            self._views[call.dtype, call.shape] = views
        return views

    def plan(self, call: Call) -> SmallPlan:
        """Prepare an all-reduce of data that fits into the payload; local."""
        return SmallPlan(self, call)

    def _spec(self, slots: Tensor) -> list[Any]:
        return [buffer_of(self._mpi, slots), SLOT_BYTES, self._mpi.BYTE]

    def filled_slot(self, call: Call) -> tuple[Tensor, list[Any]]:
        """Make a slot with the header of `call`; return it with its description for MPI."""
        slot = torch.zeros(SLOT_BYTES, dtype=torch.uint8, device="cpu")
        slot.numpy().view(np.int64)[0] = call.key
        return slot, self._spec(slot)


class SmallPlan:
    """Everything about an all-reduce of one dtype, shape and reduction that does not depend on the values."""

    __slots__ = ("_call", "_op", "_others", "_out", "_own", "_parts", "_slots")

    def __init__(self, slots: SlotExchange, call: Call) -> None:
        assert call.op is not None
        assert call.dtype is not None
        self._slots = slots
        self._call = call
        self._op: ReduceOp = call.op
        slot, self._out = slots.filled_slot(call)
        self._own = _payload(slot, call)
        self._parts = slots.views(call)[1]
        adds = plain_binary(call.dtype, call.op) is torch.add
        # Of two, the order does not matter: the own part is in the tensor already.
        self._others = [self._parts[1 - slots.rank]] if adds and slots.size == 2 else []

    def run(self, tensor: Tensor) -> bool:
        """Reduce a tensor, in place; collective. Always applies."""
        self._own.copy_(tensor)
        self._slots.swap(self._call, self._out)
        self._take(tensor)
        return True

    def run_in_steps(self, tensor: Tensor) -> Steps[None]:
        """Do what `run` does in steps; no other exchange may begin meanwhile."""
        self._own.copy_(tensor)
        yield from self._slots.swap_in_steps(self._call, self._out)
        self._take(tensor)

    def _take(self, tensor: Tensor) -> None:
        if self._others:
            tensor.add_(self._others[0])
        else:
            reduce_in_rank_order(self._parts, self._op, tensor)


def _payload(slot: Tensor, call: Call) -> Tensor:
    assert call.dtype is not None
    return slot[HEADER_BYTES : HEADER_BYTES + call.nbytes].view(call.dtype).view(call.shape)


def describe(tensor: Tensor) -> Tensor:
    """Pack dtype and shape (up to 12 dimensions) into the 112 bytes of a payload."""
    words = np.zeros(PAYLOAD_BYTES // 8, dtype=np.int64)
    words[: 2 + tensor.dim()] = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.from_numpy(words.view(np.uint8))


def described(payload: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape that `describe` packed."""
    words = payload.numpy().view(np.int64).tolist()
    return DTYPES[words[0]], tuple(words[2 : 2 + words[1]])
