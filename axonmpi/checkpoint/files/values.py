"""Small Python values as JSON and back, equal in value and in type.

    {"milestones": Counter({30: 1}), "betas": (0.9, 0.98)}
    {"milestones": {"<Counter>": [[30, 1]]}, "betas": {"<tuple>": [0.9, 0.98]}}

JSON has no tuples, and turns the keys of a dict into texts; the state of learning-rate schedules has both. A
value of another type is refused by name, and never converted to a similar type.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_ELEMENTS = 4096
_MOST_LEVELS = 100
_MOST_BITS = 4096
_MOST_LETTERS = 80
_KINDS = ("<Tensor>", "<dtype>", "<tuple>", "<dict>", "<Counter>")
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def encoded(value: Any, where: str, levels: int = 0) -> Any:
    """Return a value as JSON; local.

    Args:
        value: A text, number, None, small tensor or `torch.dtype`, or a list, tuple, dict or Counter of these.
        where: Name of the value, for messages.
        levels: Number of containers around the value.

    Raises:
        ValueError: It contains another type or itself, or is nested more than 100 deep.
    """
    if levels > _MOST_LEVELS:
        raise ValueError(
            f"{where[:_MOST_LETTERS]} ...: is nested more than {_MOST_LEVELS} deep, or contains itself"
        )
    if type(value) is int and value.bit_length() > _MOST_BITS:
        raise ValueError(f"{where}: expected a whole number of at most {_MOST_BITS} bits, got {value.bit_length()}")
    if value is None or type(value) in (bool, str, int, float):
        return value
    if isinstance(value, Tensor):
        if value.numel() > _MOST_ELEMENTS:
            raise ValueError(f"{where}: expected tensors of at most {_MOST_ELEMENTS} elements, got {value.numel()}")
        return {"<Tensor>": [str(value.dtype), list(value.shape), _numbers(value)]}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # such as a long double
        return encoded(value.item(), where)
    if isinstance(value, torch.dtype):
        return {"<dtype>": str(value)}
    if type(value) in (list, tuple, torch.Size):
        items = [encoded(item, f"{where}[{index}]", levels + 1) for index, item in enumerate(value)]
        return items if type(value) is list else {"<tuple>": items}
    if type(value) in (dict, OrderedDict, Counter):
        return _encoded_dict(value, where, levels + 1)
    raise ValueError(
        f"{where}: a checkpoint holds None, numbers, texts, small tensors, and lists, tuples and dicts of these, "
        f"got {type(value).__name__}"
    )


def _encoded_dict(value: dict[Any, Any], where: str, levels: int) -> Any:
    if type(value) is not Counter and all(type(key) is str and not key.startswith("<") for key in value):
        return {key: encoded(item, f"{where}[{key!r}]", levels) for key, item in value.items()}
    pairs = [
        [encoded(key, where, levels), encoded(item, f"{where}[{key!r}]", levels)] for key, item in value.items()
    ]
    return {"<Counter>" if type(value) is Counter else "<dict>": pairs}


def _numbers(tensor: Tensor) -> list[Any]:
    flat = tensor.detach().cpu().reshape(-1)
    numbers: list[Any] = (torch.view_as_real(flat) if flat.is_complex() else flat).tolist()
    return numbers


def decoded(value: Any) -> Any:
    """Return the value whose JSON `encoded` returned; local.

    Raises:
        ValueError: It has an unknown type.
        Exception: torch's or Python's own, if a value does not fit its type.
    """
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind.startswith("<") and (len(value) > 1 or kind not in _KINDS):
        raise ValueError(f"{kind!r} is no type that a checkpoint has")
    if kind == "<Tensor>":
        return _tensor(*value[kind])
    if kind == "<dtype>":
        return _DTYPES[value[kind]]
    if kind == "<tuple>":
        return tuple(map(decoded, value[kind]))
    if kind in ("<dict>", "<Counter>"):
        pairs = {decoded(key): decoded(item) for key, item in value[kind]}
        return Counter(pairs) if kind == "<Counter>" else pairs
    return {key: decoded(item) for key, item in value.items()}


def _tensor(dtype: str, shape: list[int], numbers: list[Any]) -> Tensor:
    kind = _DTYPES[dtype]
    if kind.is_complex:
        return torch.view_as_complex(torch.tensor(numbers, dtype=kind.to_real()).reshape(-1, 2)).reshape(shape)
    return torch.tensor(numbers, dtype=kind).reshape(shape)
