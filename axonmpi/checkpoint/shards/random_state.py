"""Random states of the ranks: a tensor for each generator, with a row for each rank.

    random.torch     [W, 5056]     torch's default generator of the CPU
    random.cuda      [W, 16]       the generator of the rank's GPU
    random.python    [W, 2510]     of the module `random`: version, 625 words, the next normal deviate
    random.numpy     [W, 2507]     numpy's global one: 624 words, the index in them, the next normal deviate

All of them are bytes. Generators that a program makes are left to the program.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...groups.process_group import ProcessGroup
from ...utils.device import device_at
from ..files.tensor_file import TensorSpec
from .subarrays import Subarray
from .tensor_shard import Piece, TensorShard

_PYTHON = struct.Struct("<B625I?d")
_NUMPY = struct.Struct("<624IH?d")


def random_shards(group: ProcessGroup) -> list[TensorShard]:
    """Copy this rank's random states; local.

    Args:
        group: All ranks.

    Raises:
        ValueError: numpy's global generator is not the default one.
    """
    generators = _generators(group)
    return [_row(name, read(), group) for name, (read, _) in generators.items()]


def prepare_random(
    group: ProcessGroup, specs: Mapping[str, TensorSpec]
) -> tuple[list[TensorShard], Callable[[], None]]:
    """Allocate memory for this rank's saved random states; local.

    Ranks and generators without a saved state keep their own.

    Args:
        group: All ranks.
        specs: The saved tensors by name.

    Returns:
        Shards to read into, and a function that sets the generators afterwards.

    Raises:
        ValueError: A saved state is of another generator.
    """
    shards: list[TensorShard] = []
    found: list[tuple[Callable[[Tensor], None], Tensor]] = []
    for name, (read, write) in _generators(group).items():
        spec = specs.get(name)
        if spec is None or group.rank >= spec.shape[0]:
            continue
        own = read()
        if (spec.dtype, spec.shape[1:]) != (torch.uint8, own.shape):
            raise ValueError(
                f"{name}: expected rows of {own.numel()} bytes, got {spec.dtype} {list(spec.shape)}: it was saved "
                "with another version, or is no random state"
            )
        shard = _row(name, torch.empty_like(own), group, spec.shape[0])
        shards.append(shard)
        found.append((write, shard.pieces[0].view[0]))

    def restore() -> None:
        for write, row in found:
            write(row.clone())

    return shards, restore


def _row(name: str, state: Tensor, group: ProcessGroup, rows: int | None = None) -> TensorShard:
    shape = (group.size if rows is None else rows, state.numel())
    piece = Piece(Subarray((group.rank, 0), (1, state.numel())), state[None])
    return TensorShard(name, shape, torch.uint8, [piece], is_split=False)


def _generators(group: ProcessGroup) -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    """Return by name a function that reads a generator's state and one that sets it."""
    own, cpu = device_at(group.backend.place), device_at(torch.device("cpu"))
    found = {"random.torch": (cpu.random_state, cpu.set_random_state)}
    if own.is_asynchronous:
        found[f"random.{own.place.type}"] = (own.random_state, own.set_random_state)
    return {**found, "random.python": (_python_state, _set_python), "random.numpy": (_numpy_state, _set_numpy)}


def _python_state() -> Tensor:
    version, words, deviate = random.getstate()
    return _bytes(_PYTHON.pack(version, *words, deviate is not None, deviate or 0.0))


def _set_python(state: Tensor) -> None:
    version, *words, has_deviate, deviate = _PYTHON.unpack(state.numpy().tobytes())
    random.setstate((version, tuple(words), deviate if has_deviate else None))


def _numpy_state() -> Tensor:
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise ValueError(
            f"numpy's global generator is a {state['bit_generator']}, expected the MT19937 that it is by default: "
            "a checkpoint has no room for others"
        )
    words, position = state["state"]["key"], state["state"]["pos"]
    return _bytes(_NUMPY.pack(*words.tolist(), position, bool(state["has_gauss"]), state["gauss"]))


def _set_numpy(state: Tensor) -> None:
    *words, position, has_deviate, deviate = _NUMPY.unpack(state.numpy().tobytes())
    np.random.set_state(("MT19937", np.array(words, np.uint32), position, int(has_deviate), deviate))


def _bytes(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
