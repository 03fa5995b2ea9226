"""Finding torch's functions by their names, under which several callables of one operation go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...utils.torch_internals import compiled_functions
from ..domain_tensor import tensors_in as tensors_in

_PLACES = (torch, Tensor, functional, torch.special, torch.linalg, torch.fft, compiled_functions)


def named(*names: str) -> list[Any]:
    """Return torch's functions and methods of some names, each name one word or several; local."""
    words = [word for name in names for word in name.split()]
    found = (getattr(place, word, None) for word in words for place in _PLACES)
    return list({id(each): each for each in found if callable(each)}.values())


def properties(*names: str, access: str = "__get__") -> list[Any]:
    """Return the functions that read some properties of tensors, or set them: `__set__`; local."""
    words = [word for name in names for word in name.split()]
    return [getattr(getattr(Tensor, word), access) for word in words if hasattr(Tensor, word)]


def with_parts(args: Any, parts: Mapping[int, Tensor]) -> Any:
    """Return arguments, and members of lists, tuples and dicts, with other tensors, by the `id` of each; local."""
    if isinstance(args, Tensor):
        return parts.get(id(args), args)
    if type(args) is dict:
        return {name: with_parts(value, parts) for name, value in args.items()}
    return type(args)(with_parts(arg, parts) for arg in args) if type(args) in (list, tuple) else args


def each(value: Any, count: int) -> list[Any]:
    """Return an argument for each of `count` dimensions, of one number or of a number for each; local."""
    given = list(value) if isinstance(value, list | tuple) else [value]
    return given * count if len(given) == 1 else given
