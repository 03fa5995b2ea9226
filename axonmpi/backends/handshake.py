"""What first messages have in common: their size, how they describe a tensor, what is said where calls differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CollectiveMismatchError
from .call import Call, mismatch_error
from .call_site import text_with_site
from .reduction import DTYPES

__all__ = ["PAYLOAD_BYTES", "Words", "describe", "described", "mismatch"]

PAYLOAD_BYTES = 112
"""What a message has room for, besides the fingerprint and a number."""
_TEXT_BYTES = 768

Words = np.ndarray[Any, np.dtype[np.int64]]
"""A payload as 14 integers."""


def describe(tensor: Tensor) -> Words:
    """Pack dtype and shape (up to 12 dimensions) into a payload."""
    words = np.zeros(PAYLOAD_BYTES // 8, dtype=np.int64)
    words[: 2 + tensor.dim()] = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return words


def described(payload: Words) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape that `describe` packed."""
    words = payload.tolist()
    return DTYPES[words[0]], tuple(words[2 : 2 + words[1]])


def mismatch(comm: Any, call: Call) -> CollectiveMismatchError:
    """Exchange texts and make the error; collective: all ranks have seen that calls differ, so all come here."""
    text = text_with_site(call).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    texts = bytearray(_TEXT_BYTES * comm.Get_size())
    comm.Allgather(text, texts)
    rows = (texts[i : i + _TEXT_BYTES] for i in range(0, len(texts), _TEXT_BYTES))
    return mismatch_error([row.rstrip(b"\0").decode(errors="replace") for row in rows])
