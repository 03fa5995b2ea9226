"""A batch split into micro-batches, their outputs joined, and the weights of their losses."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .runtime.payload import form_of, pack, unpack


def batch_size(value: Any, name: str) -> int:
    """Return the number of samples in a batch.

    Args:
        value: A tensor, or tensors in tuples, lists and dicts, whose dim 0 is the batch.
        name: The argument's name, for messages.

    Raises:
        ValueError: There is no tensor, or one without dimensions, or their batches differ or are empty.
    """
    _, tensors = pack(value)
    if not tensors:
        raise ValueError(
            f"{name}: expected a tensor, or tuples, lists or dicts of tensors, got {type(value).__name__}"
        )
    sizes = sorted({tensor.shape[0] if tensor.dim() else -1 for tensor in tensors})
    if len(sizes) > 1 or sizes[0] < 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"{name}: expected tensors whose dim 0 is the batch, of the same size from 1, got {shapes}"
        )
    return sizes[0]


def digest_of(value: Any) -> int:
    """Return a digest from 0 to 2^62 - 1 of shapes, dtypes and all values that are no tensors."""
    skeleton, tensors = pack(value)
    text = pickle.dumps(form_of(skeleton, [tensor.detach() for tensor in tensors]))
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 2


def split_batch(value: Any, parts: int) -> list[Any]:
    """Cut a batch into micro-batches of nearly equal size, the larger ones first; views."""
    skeleton, tensors = pack(value)
    pieces = [tensor.tensor_split(parts) for tensor in tensors]
    return [unpack(skeleton, [piece[part] for piece in pieces]) for part in range(parts)]


def joined(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of micro-batches along dim 0.

    Raises:
        ValueError: They have no batch in dim 0.
    """
    packed = [pack(output) for output in outputs]
    skeleton, first = packed[0]
    if any(tensor.dim() == 0 for tensor in first):
        raise ValueError("forward: expected outputs whose dim 0 is the batch, got a tensor without dimensions")
    return unpack(skeleton, [torch.cat(parts) for parts in zip(*(tensors for _, tensors in packed), strict=True)])


def loss_weights(targets: Sequence[Any], weigh: Callable[[Any], float] | None) -> list[float]:
    """Return each micro-batch's weight in the loss, by its number of samples or by `weigh(target)`; their sum is 1.

    Raises:
        ValueError: A weight is negative, or all are zero.
    """
    weights = [float(batch_size(target, "target") if weigh is None else weigh(target)) for target in targets]
    if min(weights) < 0 or not sum(weights) > 0:
        raise ValueError(f"loss_weight: expected numbers from 0, not all of them 0, got {weights}")
    return [weight / sum(weights) for weight in weights]


def as_scalar(loss: Any) -> Tensor:
    """Return a loss that backward can begin at.

    Raises:
        TypeError: It is no tensor.
        ValueError: It has more than one element.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn: expected that it returns a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn: expected that it returns one number, the mean of a micro-batch, got {list(loss.shape)}"
        )
    return loss.reshape(())
