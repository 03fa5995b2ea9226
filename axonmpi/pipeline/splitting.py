"""`split_module`: a model cut into stages of nearly equal cost.

    model     [ embedding, [ block, block, block, block ], norm, head ]
    pieces        0          1.0    1.1    1.2    1.3       2     3
    stages    { 0, 1.0 }   { 1.1, 1.2, 1.3 }   { 2, 3 }

A piece is never cut; a stage is a row of pieces. Every piece has a cost: its number of parameters or the time of
its forward. The cut minimises the cost of the most expensive stage. Pieces keep their names in the model, so the
state dicts of all stages together are the model's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median_low
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..across_ranks.comparison import first_rank_does, same_on_all_ranks
from ..groups.process_group import ProcessGroup
from ..groups.world import chosen_group, current_world
from ..utils.arguments import integer
from ..utils.device import device_at
from .runtime.payload import form_of, pack, unpack
from .skips import skip_scope


class _Piece(NamedTuple):
    """A module that is not cut, and the names on the path to it in the model."""

    path: tuple[str, ...]
    module: nn.Module

    def __str__(self) -> str:
        return f"{'.'.join(self.path)!r}, a {type(self.module).__name__}"


def split_module(
    module: nn.Sequential | nn.ModuleList | Sequence[nn.Module],
    num_stages: int,
    *,
    balance: str = "parameters",
    sample: Any = None,
    process_group: ProcessGroup | None = None,
    repeats: int = 5,
) -> list[nn.Sequential]:
    """Cut a model into stages that together, one after the other, compute the same as the model.

    The cut is optimal: no other cut has a cheaper most expensive stage. Among equally good cuts, the one with the
    most even numbers of pieces is taken. Local with `balance="parameters"`; with `balance="time"` it is collective
    if there is a group, and the times of its rank 0 decide, so that all ranks cut alike.

    Args:
        module: A `Sequential`, or a sequence of modules, each with the output of the one before as its input, such
            as head, repeated blocks and tail; a `ModuleList` in it stands for its modules. A nested `Sequential` is
            one piece, unless more pieces are needed: then all of them are opened, one level after another. The
            modules are reused, not copied, so parameters that are tied stay tied.
        num_stages: Number of stages, at least 1.
        balance: The cost. `"parameters"`: the number of parameter elements, frozen ones included; a parameter that
            several pieces share counts once in each stage. `"time"`: the time of a forward in the mode, training or
            evaluation, that each module is in.
        sample: The input of the first stage, a tensor or nested tuples, lists and dicts of tensors, not changed.
            Needed to measure times, on rank 0 of the group only.
        process_group: The ranks that have to cut alike; None means all ranks, or this process alone if no process
            group is initialised.
        repeats: Number of timed runs after a warm-up; the median is taken. Buffers, torch's random numbers and
            generators that modules hold are restored.

    Returns:
        The stages. Parameters and buffers have the names that they have in the model, or in
        `nn.ModuleList(module)` for a sequence.

    Raises:
        TypeError: The model is no sequence of modules, or an argument is of the wrong type.
        ValueError: The model has fewer pieces than stages; it has hooks, parameters or buffers of its own, which no
            stage would have; a parameter has no shape yet; the sample is missing, or a piece fails on it; the ranks
            have different numbers of pieces or stages.
    """
    integer("num_stages", num_stages, minimum=1)
    integer("repeats", repeats, minimum=1)
    if balance not in ("parameters", "time"):
        raise ValueError(f"balance: expected 'parameters' or 'time', got {balance!r}")
    if process_group is not None:
        chosen_group(process_group, "process_group")
    pieces = _pieces(module, num_stages)
    if balance == "parameters":
        costs: list[Mapping[Hashable, int]] = [
            {id(tensor): tensor.numel() for tensor in piece.module.parameters()} for piece in pieces
        ]
    else:
        times = _times(pieces, num_stages, sample, process_group, repeats)
        costs = [{index: time} for index, time in enumerate(times)]
    modes = [module] if isinstance(module, nn.Module) else [piece.module for piece in pieces]
    training = any(part.training for part in modes)
    return [_stage(pieces[start:stop], training) for start, stop in balanced_bounds(costs, num_stages)]


# ---- pieces -----------------------------------------------------------------------------------------------------


def _pieces(model: Any, wanted: int) -> list[_Piece]:
    """Return the pieces of a model; open nested containers until there are `wanted` pieces."""
    _check_model(model)
    pieces = list(_inside(model))
    if not pieces:
        raise ValueError("module: expected at least one module to run, got none")
    while len(pieces) < wanted and any(_opens(piece) for piece in pieces):
        levels = [_inside(piece.module, piece.path) if _opens(piece) else [piece] for piece in pieces]
        pieces = [piece for level in levels for piece in level]
    if len(pieces) < wanted:
        raise ValueError(
            f"num_stages: expected 1 to {len(pieces)}, as many as the model has pieces, got {wanted}: "
            "use fewer stages, or give the model in smaller pieces"
        )
    for piece in pieces:
        _check_piece(piece)
    return pieces


def _check_model(model: object) -> None:
    if isinstance(model, nn.Sequential | nn.ModuleList):
        if not _is_plain(model):
            raise ValueError(
                f"module: a {type(model).__name__} with a forward, hooks, parameters or buffers of its own cannot "
                "be cut, as no stage would have them: give the modules that it runs as a list"
            )
    elif isinstance(model, nn.Module) or not isinstance(model, Sequence):
        raise TypeError(
            "module: expected a torch.nn.Sequential or a sequence of modules, "
            f"got {type(model).__name__}: give its head, blocks and tail as a list"
        )


def _check_piece(piece: _Piece) -> None:
    if getattr(piece.module.forward, "__func__", None) is nn.Module.forward:
        raise TypeError(f"module: {piece}, has no forward: give the modules in it, in the order in which they run")
    if any(is_lazy(tensor) for tensor in (*piece.module.parameters(), *piece.module.buffers())):
        raise ValueError(
            f"module: {piece}, has a parameter or buffer without a shape yet: run one forward before cutting"
        )


def _inside(container: Any, path: tuple[str, ...] = ()) -> Iterator[_Piece]:
    """Yield the modules of a container, with the modules of a list instead of the list, which has no forward."""
    # Not named_children(), which leaves out a module that comes a second time.
    is_module = isinstance(container, nn.Module)
    named = container._modules.items() if is_module else ((str(i), entry) for i, entry in enumerate(container))
    for name, entry in named:
        piece = _Piece((*path, name), entry)
        if not isinstance(entry, nn.Module):
            raise TypeError(f"module: expected modules, got {piece}: call it in the forward of a torch.nn.Module")
        if isinstance(entry, nn.ModuleList) and _is_plain(entry):
            yield from _inside(entry, piece.path)
        else:
            yield piece


def _opens(piece: _Piece) -> bool:
    return isinstance(piece.module, nn.Sequential) and len(piece.module) > 0 and _is_plain(piece.module)


def _is_plain(container: nn.Module) -> bool:
    """Return True if a container only holds its modules, or calls one after the other."""
    if type(container).forward not in (nn.Sequential.forward, nn.ModuleList.forward):
        return False
    own = vars(container)
    kept = [own["_parameters"], own["_buffers"], *(own[name] for name in own if name.endswith("_hooks"))]
    return "forward" not in own and not any(kept)


def _stage(pieces: Sequence[_Piece], training: bool) -> nn.Sequential:
    """Join pieces to a stage, with new containers, under the same names, for the opened ones."""
    stage = nn.Sequential()
    stage.training = training
    for piece in pieces:
        holder = stage
        for name in piece.path[:-1]:
            if name not in holder._modules:
                holder.add_module(name, nn.Sequential())
            inner = holder.get_submodule(name)
            assert isinstance(inner, nn.Sequential)
            inner.training = training
            holder = inner
        holder.add_module(piece.path[-1], piece.module)
    return stage


# ---- costs ------------------------------------------------------------------------------------------------------


def _times(
    pieces: Sequence[_Piece], num_stages: int, sample: Any, group: ProcessGroup | None, repeats: int
) -> list[int]:
    """Return the nanoseconds of each piece's forward, measured on rank 0 for all ranks; collective in a group."""
    world = current_world()
    if group is None and world is not None:
        group = world.default_group
    if group is None:
        return _measured(pieces, sample, repeats)
    own = f"{num_stages} stages of {len(pieces)} pieces"
    problem = "the ranks cut different numbers of stages from different numbers of pieces"
    same_on_all_ranks(group.backend, [own], problem, "Give all of them the same model and num_stages.")
    times: list[int] = first_rank_does(group.backend, lambda: _measured(pieces, sample, repeats))
    return times


def _measured(pieces: Sequence[_Piece], sample: Any, repeats: int) -> list[int]:
    if sample is None:
        raise ValueError("sample: balance='time' needs the input of the first stage to measure with, got None")
    modules = nn.ModuleList(piece.module for piece in pieces)
    skeleton, given = pack(sample)
    devices = {tensor.device for tensor in (*modules.parameters(), *modules.buffers(), *given)}
    with torch.no_grad(), skip_scope({}), _unchanged(modules, devices):
        # A copy of the sample for each run, as pieces may work in place.
        samples = (unpack(skeleton, [tensor.clone() for tensor in given]) for _ in range(repeats + 1))
        runs = [_timed_run(pieces, value) for value in samples]
    return [median_low(times) for times in zip(*runs[1:], strict=True)]


def _timed_run(pieces: Sequence[_Piece], value: Any) -> list[int]:
    """Return the nanoseconds of each piece in one run of all pieces, so that a disturbance spoils few medians."""
    times = []
    for number, piece in enumerate(pieces, 1):
        start = _now(value)
        try:
            result = piece.module(value)
        except Exception as error:
            raise ValueError(
                f"sample: piece {number} of {len(pieces)}, {piece}, failed on {form_of(*pack(value))}: "
                f"{type(error).__name__}: {error}\n"
                "Give the input of the first stage; each piece takes what the one before returns."
            ) from error
        times.append(_now(result) - start)
        value = result
    return times


def _now(value: Any) -> int:
    """Return the time in nanoseconds after devices have computed `value`."""
    for device in {tensor.device for tensor in pack(value)[1]}:
        device_at(device).synchronize()
    return perf_counter_ns()


@contextmanager
def _unchanged(model: nn.Module, devices: set[torch.device]) -> Iterator[None]:
    """Let modules compute on copies of their buffers, and restore their random generators."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    attributes = [value for module in model.modules() for value in vars(module).values()]
    states = [(value, value.get_state()) for value in attributes if isinstance(value, torch.Generator)]
    copies: dict[int, Tensor] = {}
    generators = [device_at(device) for device in {torch.device("cpu"), *devices}]
    drawn = [(generator, generator.random_state()) for generator in generators]
    try:
        for module, before in buffers:
            for name, buffer in before.items():
                if buffer is not None:
                    setattr(module, name, copies.setdefault(id(buffer), buffer.clone()))
        yield
    finally:
        for default, state in drawn:
            default.set_random_state(state)
        for generator, state in states:
            generator.set_state(state)
        for module, before in buffers:
            module._buffers.clear()
            module._buffers.update(before)


# ---- balance ----------------------------------------------------------------------------------------------------


def balanced_bounds(costs: Sequence[Mapping[Hashable, int]], parts: int) -> list[tuple[int, int]]:
    """Cut a row of pieces so that the most expensive part is as cheap as possible; exact, and no part is empty.

    Among the optimal cuts, the least sum of squares of the numbers of pieces decides, then more pieces in the first
    parts.

    Args:
        costs: The components of each piece with their costs, at least 0; a component that several pieces of a part
            share counts once in it.
        parts: Number of parts, from 1 to the number of pieces.

    Returns:
        For each part the index of its first piece, and the index after its last piece.
    """
    total = sum(cost for piece in costs for cost in piece.values())
    limit = bisect_left(range(total), True, key=lambda cost: _fills(costs, cost, parts))
    reach = [_reach(costs, start, limit) for start in range(len(costs))]
    # squares[start]: the least sum for the pieces from `start` on, in as many parts as there are rows in `stops`
    squares: list[float] = [math.inf] * len(costs) + [0]
    stops: list[list[int]] = []
    for _ in range(parts):
        choices = [
            min(((stop - start) ** 2 + squares[stop], -stop) for stop in range(start + 1, reach[start] + 1))
            for start in range(len(costs))
        ]
        squares = [square for square, _ in choices] + [math.inf]
        stops.append([-stop for _, stop in choices])
    bounds, start = [], 0
    for row in reversed(stops):
        bounds.append((start, row[start]))
        start = row[start]
    return bounds


def _fills(costs: Sequence[Mapping[Hashable, int]], limit: int, parts: int) -> bool:
    """Return True if all pieces fit into parts that cost up to `limit`, each filled as far as possible."""
    start = 0
    for _ in range(parts):
        stop = _reach(costs, start, limit)
        if stop in (start, len(costs)):
            return stop > start
        start = stop
    return False


def _reach(costs: Sequence[Mapping[Hashable, int]], start: int, limit: int) -> int:
    """Return the end of the longest part that begins with piece `start` and costs up to `limit`."""
    load, counted = 0, set[Hashable]()
    for stop in range(start, len(costs)):
        load += sum(cost for key, cost in costs[stop].items() if key not in counted)
        if load > limit:
            return stop
        counted.update(costs[stop])
    return len(costs)
