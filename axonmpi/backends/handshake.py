"""The small message that every collective begins with.

All ranks of a group exchange 128 bytes each with a single all-gather:

    | fingerprint of the call, 8 bytes | a size, 8 bytes | payload, up to 112 bytes |

Ranks that made different calls see it at once, whatever they called. Data that fits into the payload needs no
further message: reductions of such data keep a message with the fingerprint and all views ready, so that what
Python adds to MPI's own all-reduce stays a few microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..utils.cache import BoundedCache
from ..utils.waiting import Backoff, Steps, is_beside_computation
from .buffers import buffer_of
from .call import Call, mismatch_error
from .reduction import DTYPES, plain_binary, reduce_in_rank_order
from .tuning import HANDSHAKE_YIELDS, MAX_PLANS

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["PAYLOAD_BYTES", "Handshake", "describe", "described"]

MESSAGE_BYTES = 128
HEADER_BYTES = 16
PAYLOAD_BYTES = MESSAGE_BYTES - HEADER_BYTES
_TEXT_BYTES = 512


class Handshake:
    """The messages of one rank in one communicator.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The communicator.
        oversubscribed: Whether ranks outnumber the cores anywhere in it, the same on all ranks. MPI libraries poll
            while they block, which then takes the core from the very ranks that are waited for: so this waits
            with a non-blocking exchange, yielding first and napping when it takes long.

    Attributes:
        own_words: The payload of the own message as 14 integers.
        words: [ranks, 14] the payloads that came with the last exchange, as integers.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, *, oversubscribed: bool) -> None:
        self._mpi = mpi
        self._oversubscribed = oversubscribed
        self._comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        with torch.inference_mode(False):  # what is made in that mode could not be written to outside of it
            self._own = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
            self._all = torch.zeros(self.size, MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        self._header = self._own.numpy().view(np.int64)
        words = self._all.numpy().view(np.int64)
        self._keys, self._extras = words[:, 0], words[:, 1]
        self.own_words = self._own[HEADER_BYTES:].numpy().view(np.int64)
        self.words = words[:, HEADER_BYTES // 8 :]
        self._out = self._spec(self._own)
        self._in = self._spec(self._all)
        self._views: BoundedCache[Any, tuple[Tensor, list[Tensor]]] = BoundedCache(MAX_PLANS)
        self._reductions: BoundedCache[int, _SmallReduction] = BoundedCache(MAX_PLANS)

    @property
    def own_payload(self) -> Tensor:
        """The payload of the own message, 112 bytes."""
        return self._own[HEADER_BYTES:]

    @property
    def payloads(self) -> Tensor:
        """The payloads that came with the last exchange, [ranks, 112] bytes."""
        return self._all[:, HEADER_BYTES:]

    def agree(self, call: Call, extra: int = 0) -> list[int]:
        """Exchange the messages; return every rank's `extra`. Collective.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        self._header[0] = call.key
        self._header[1] = extra
        self._exchange(call, self._out)
        self._check(call)
        extras: list[int] = self._extras.tolist()
        return extras

    def agree_in_steps(self, call: Call, first: int, second: int) -> Steps[list[list[int]]]:
        """Do what `agree` does in steps, with two words of payload; return those of all ranks. Collective."""
        self._header[0] = call.key
        self._header[1] = 0
        self.own_words[0], self.own_words[1] = first, second
        yield from self._exchange_in_steps(call, self._out)
        words: list[list[int]] = self.words[:, :2].tolist()
        return words

    def reduce(self, call: Call, tensor: Tensor) -> None:
        """Reduce data that fits into the payload, in place where the call wants it; collective.

        Args:
            call: The call.
            tensor: Of the call's shape, any strides.
        """
        reduction = self._reduction(call)
        reduction.own.copy_(tensor)
        self._exchange(call, reduction.out)
        self._check(call)
        reduction.finish(tensor)

    def reduce_in_steps(self, call: Call, tensor: Tensor) -> Steps[None]:
        """Do what `reduce` does in steps; no other exchange may begin meanwhile."""
        reduction = self._reduction(call)
        reduction.own.copy_(tensor)
        yield from self._exchange_in_steps(call, reduction.out)
        reduction.finish(tensor)

    def _reduction(self, call: Call) -> _SmallReduction:
        found = self._reductions.get(call.key)
        return found or self._reductions.add(call.key, self._prepare(call))

    def _prepare(self, call: Call) -> _SmallReduction:
        with torch.inference_mode(False):
            message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
            message.numpy().view(np.int64)[0] = call.key
            return _SmallReduction(call, message, self._spec(message), self.views(call)[1], self.rank)

    def views(self, call: Call) -> tuple[Tensor, list[Tensor]]:
        """Return the own payload and those of all ranks as tensors of the call's dtype and shape; local."""
        key = (call.dtype, call.shape)
        views = self._views.get(key)
        if views is None:
            with torch.inference_mode(False):
                views = _payload(self._own, call), [_payload(message, call) for message in self._all]
            self._views.add(key, views)
        return views

    def _exchange(self, call: Call, out: list[Any]) -> None:
        """Exchange a message; collective."""
        if not self._oversubscribed:
            self._comm.Allgather(out, self._in)
            return
        request = self._comm.Iallgather(out, self._in)
        backoff = Backoff(0 if is_beside_computation() else HANDSHAKE_YIELDS)
        while not request.Test():
            backoff.rest()

    def _exchange_in_steps(self, call: Call, out: list[Any]) -> Steps[None]:
        """Do what `_exchange` and `_check` do in steps; no other exchange may begin meanwhile."""
        request = self._comm.Iallgather(out, self._in)
        while not request.Test():
            yield False
        self._check(call)

    def _check(self, call: Call) -> None:
        if self._keys.tolist().count(call.key) != self.size:
            raise self._mismatch(call)

    def _mismatch(self, call: Call) -> Exception:
        """Exchange texts: all ranks have seen different fingerprints, so all of them come here; collective."""
        text = str(call).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        texts = bytearray(_TEXT_BYTES * self.size)
        self._comm.Allgather(text, texts)
        rows = (texts[i : i + _TEXT_BYTES] for i in range(0, len(texts), _TEXT_BYTES))
        return mismatch_error([row.rstrip(b"\0").decode(errors="replace") for row in rows])

    def _spec(self, messages: Tensor) -> list[Any]:
        return [buffer_of(self._mpi, messages), MESSAGE_BYTES, self._mpi.BYTE]


class _SmallReduction:
    """All that reductions of one dtype, shape and operation have in common.

    Attributes:
        own: Where the own data goes.
        out: The own message, as MPI is given it.
    """

    __slots__ = ("_call", "_gets_result", "_message", "_other", "_parts", "out", "own")

    def __init__(self, call: Call, message: Tensor, out: list[Any], parts: list[Tensor], rank: int) -> None:
        assert call.op is not None
        assert call.dtype is not None
        self._call = call
        self._message = message  # which `out` points to
        self.out = out
        self.own = _payload(message, call)
        self._parts = parts
        self._gets_result = call.root in (None, rank)
        adds = plain_binary(call.dtype, call.op) is torch.add
        # The sum of two is the same in either order, and the own part is in the tensor already.
        self._other = parts[1 - rank] if adds and len(parts) == 2 else None

    def finish(self, tensor: Tensor) -> None:
        """Reduce what all ranks have sent into the tensor, if this rank gets the result; local."""
        if not self._gets_result:
            return
        if self._other is not None:
            tensor.add_(self._other)
        else:
            assert self._call.op is not None
            reduce_in_rank_order(self._parts, self._call.op, tensor)


def _payload(message: Tensor, call: Call) -> Tensor:
    assert call.dtype is not None
    return message[HEADER_BYTES : HEADER_BYTES + call.nbytes].view(call.dtype).view(call.shape)


def describe(tensor: Tensor) -> Tensor:
    """Pack dtype and shape (up to 12 dimensions) into the 112 bytes of a payload."""
    words = np.zeros(PAYLOAD_BYTES // 8, dtype=np.int64)
    words[: 2 + tensor.dim()] = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.from_numpy(words.view(np.uint8))


def described(payload: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape that `describe` packed."""
    words = payload.numpy().view(np.int64).tolist()
    return DTYPES[words[0]], tuple(words[2 : 2 + words[1]])
