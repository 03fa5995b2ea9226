"""Tensors in arguments and outputs of modules: nested tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output; local."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name, None))


def map_tensors(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's arguments with their tensors converted; local.

    Containers are copied, with their other contents and attributes.
    """
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, Mapping):
        mapped: Any = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(item, convert)
        return mapped
    if isinstance(value, list | tuple):
        items = [map_tensors(item, convert) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapped = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(mapped, field.name, map_tensors(getattr(value, field.name, None), convert))
        return mapped
    return value
