"""The payloads between stages: tensors in nested tuples, lists and dicts.

    {"hidden": t0, "mask": t1, "scale": 2}   ->   [t0, t1]  and  {"hidden": <0>, "mask": <1>, "scale": 2}

The tensors are sent in every step. The skeleton, with shapes and dtypes, is the *form*, which is sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import DomainError


@dataclass(frozen=True)
class _Index:
    """A placeholder for a tensor in a skeleton.

    Attributes:
        value: The index among the tensors.
    """

    value: int


@dataclass(frozen=True)
class TensorForm:
    """The form of a tensor, known before it arrives.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        requires_grad: Whether a gradient goes back for it.
        device_type: The type of its device at both ends.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device_type: str

    def __str__(self) -> str:
        device = "" if self.device_type == "cpu" else f" on {self.device_type}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{device}"

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Form:
    """The form of a payload, known before it arrives.

    Attributes:
        skeleton: The payload with indices in place of tensors.
        tensors: The form of each tensor.
    """

    skeleton: Any
    tensors: tuple[TensorForm, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or f"a {type(self.skeleton).__name__} without tensors"


class Forms(dict[tuple[tuple[int, int], int], Form]):
    """The known forms of activations: by the stages that send and receive them, and the micro-batch.

    Attributes:
        are_complete: Whether all are known; else the next step sends them with the payloads.
    """

    are_complete = False

    def carried(self, line: tuple[int, int], micro_batch: int) -> tuple[TensorForm, ...]:
        """Return the forms of the tensors from one stage to another: activations forward, gradients back."""
        source, target = line
        if source < target:
            return self[line, micro_batch].tensors
        return tuple(form for form in self[(target, source), micro_batch].tensors if form.requires_grad)


def pack(value: Any) -> tuple[Any, list[Tensor]]:
    """Take the tensors out of a payload; return the skeleton and the tensors, in order."""
    tensors: list[Tensor] = []
    return _taken_out(tensors, value), tensors


def _taken_out(tensors: list[Tensor], part: Any) -> Any:
    # Not a closure of `pack`: a closure that calls itself keeps the tensors until the next garbage collection.
    if isinstance(part, Tensor):
        if hasattr(part, "to_local"):  # a DomainTensor, a DTensor
            raise DomainError(
                f"expected ordinary tensors between stages, got a {type(part).__name__}, of which this rank has a "
                "part; give its full_tensor(), or keep the cut within a stage"
            )
        tensors.append(part)
        return _Index(len(tensors) - 1)
    return _rebuilt(part, partial(_taken_out, tensors))


def unpack(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    """Put tensors back into a skeleton."""
    if isinstance(skeleton, _Index):
        return tensors[skeleton.value]
    return _rebuilt(skeleton, partial(unpack, tensors=tensors))


def _rebuilt(part: Any, walk: Callable[[Any], Any]) -> Any:
    """Return a container with `walk` applied to its entries; anything else as it is."""
    if isinstance(part, tuple):
        values = [walk(entry) for entry in part]
        return type(part)(*values) if hasattr(part, "_fields") else tuple(values)
    if isinstance(part, list):
        return [walk(entry) for entry in part]
    if isinstance(part, dict):
        return {key: walk(entry) for key, entry in part.items()}
    return part


def form_of(skeleton: Any, tensors: Sequence[Tensor]) -> Form:
    """Describe a payload."""
    forms = (TensorForm(tuple(t.shape), t.dtype, t.requires_grad, t.device.type) for t in tensors)
    return Form(skeleton, tuple(forms))


def check_form(known: Form, skeleton: Any, tensors: Sequence[Tensor], what: str) -> None:
    """Raise unless a payload still has the form that its receiver expects.

    Raises:
        ValueError: Its tensors have other shapes, dtypes or devices, or another structure.
    """
    if known != (form := form_of(skeleton, tensors)):
        raise ValueError(
            f"{what} was {known} when inputs of this shape came first, and is {form} now; "
            "a stage's output may depend on the shape of its input, and on nothing else: pad it to one shape"
        )
