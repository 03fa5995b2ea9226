"""Memory of parameters, gradients and optimizer state: measured, and computed for any strategy.

A rank's bytes, for P parameter elements of b bytes, N nodes of L ranks, W = N·L, an optimizer with k numbers each:

    strategy         parameters                        gradients   optimizer
    FULL_SHARD       b·P/W (and gathered units)        b·P/W       k·b·P/W
    SHARD_GRAD_OP    the same, or if units are         b·P/W       k·b·P/W
                     gathered, b·P/L
    HYBRID_SHARD     b·P/L                             b·P/L       k·b·P/L
    NO_SHARD         b·P                               b·P         k·b·P

Shared memory of a node counts in equal shares for its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..utils.arguments import integer
from ..utils.process_memory import process_memory
from .flat_parameter import BufferKind, FlatParameter
from .layout import by_elements
from .optimizers import state_tensors
from .options import MixedPrecision, ShardingStrategy
from .runtime import FSDPRuntime

_MIB = 1 << 20


@dataclass(frozen=True)
class FSDPMemoryStats:
    """Memory of one rank.

    Attributes:
        total_params: Parameters of the model, on all ranks together.
        param_memory_bytes: The rank's shard, and its share of the buffers of gathered parameters.
        grad_memory_bytes: The gradient's shard.
        optim_memory_bytes: The optimizer's state for the shard.
        world_size: Ranks that train the model together.
        unsharded_bytes: Parameters, gradients and state without sharding; None: the sum over all ranks.
        resident_bytes: The process's proportional set size, in which shared memory counts in equal shares; 0 in an
            estimate, and on systems without `/proc`.
        peak_bytes: High-water mark of the process's resident set; 0 in an estimate, and on systems without `/proc`.
    """

    total_params: int
    param_memory_bytes: int
    grad_memory_bytes: int
    optim_memory_bytes: int
    world_size: int
    unsharded_bytes: int | None = None
    resident_bytes: int = 0
    peak_bytes: int = 0

    @property
    def total_memory_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.param_memory_bytes + self.grad_memory_bytes + self.optim_memory_bytes

    def total_memory_mb(self) -> float:
        """Return parameters, gradients and optimizer state in MiB."""
        return self.total_memory_bytes / _MIB

    def memory_savings(self) -> float:
        """Return the fraction of memory that sharding saves, 0 to 1: 0.75 if all is sharded over four ranks.

        On one rank it is 0, though padding makes the shard larger than the parameters.
        """
        own, full = self.total_memory_bytes, self.unsharded_bytes
        full = own * self.world_size if full is None else full
        return max(0.0, 1 - own / full) if full else 0.0


def measured(runtime: FSDPRuntime) -> FSDPMemoryStats:
    """Measure the memory of a model's parameters, gradients and optimizer state; local."""
    flats = runtime.flats
    sharers = len(runtime.groups.memory.node_ranks)
    lent = sum(buffer.memory.nbytes for buffer in {unit.lent for unit in runtime.units if unit.lent is not None})
    kept = sum(flat.buffer_bytes for flat in flats if flat.kind is not BufferKind.LENT)
    own = sum(flat.shard.nbytes for flat in flats if not flat.in_place)
    gradients = sum(gradient.shard.nbytes for gradient in runtime.queue.gradients if gradient.shard is not None)
    state = sum(tensor.nbytes for tensor in state_tensors(runtime))
    trained = sum(parameter.own.nbytes for parameter in runtime.parameters if parameter.flat.trains)
    resident, peak = process_memory()
    return FSDPMemoryStats(
        total_params=_count(flats),
        param_memory_bytes=own + (lent + kept) // sharers,
        grad_memory_bytes=gradients,
        optim_memory_bytes=state,
        world_size=runtime.groups.size,
        unsharded_bytes=_unsharded(flats, bool(gradients) + (round(state / trained) if trained else 0)),
        resident_bytes=resident,
        peak_bytes=peak,
    )


def estimated(
    runtime: FSDPRuntime,
    strategy: ShardingStrategy,
    world_size: int | None,
    ranks_per_node: int | None,
    states: int,
    precision: MixedPrecision,
) -> FSDPMemoryStats:
    """Compute the memory of a strategy; local."""
    world = runtime.groups.size if world_size is None else integer("world_size", world_size, minimum=1)
    integer("optimizer_states", states, minimum=0)
    if ranks_per_node is not None:
        local = integer("ranks_per_node", ranks_per_node, minimum=1)
    elif world_size is not None:
        local = world
    else:
        local = max((len(group.backend.control.node_ranks) for group in runtime.groups.both), default=1)
    if world % local:
        raise ValueError(f"world_size: expected a multiple of ranks_per_node ({local}), got {world}")
    shards = {ShardingStrategy.NO_SHARD: 1, ShardingStrategy.HYBRID_SHARD: local}.get(strategy, world)
    # Ranks that compute on GPUs do not share the memory of parameters.
    sharers = min(local, shards) if runtime.groups.memory is runtime.group.backend.control else 1
    parameters = gradients = state = 0
    lent = []  # bytes of each unit in lent buffers
    for unit in runtime.units:
        keeps = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD) or not unit.name
        gathered = 0
        for flat in unit.flats:
            compute = precision.compute_dtype(flat.dtype)
            layout = by_elements(flat.layout.numels, shards)
            shard, buffer = layout.sizes[0] * flat.dtype.itemsize, layout.total * compute.itemsize
            in_buffer = compute == flat.dtype and (sharers == shards or keeps)
            parameters += 0 if in_buffer else shard
            if in_buffer or keeps:
                parameters += buffer // sharers
            else:
                gathered += buffer
            trained = sum(flat.layout.numels) * flat.dtype.itemsize // shards if flat.trains else 0
            gradients, state = gradients + trained, state + states * trained
        lent.append(gathered)
    in_turn = max(lent) * min(2, sum(map(bool, lent)))
    return FSDPMemoryStats(
        total_params=_count(runtime.flats),
        param_memory_bytes=parameters + in_turn // sharers,
        grad_memory_bytes=gradients,
        optim_memory_bytes=state,
        world_size=world,
        unsharded_bytes=_unsharded(runtime.flats, 1 + states),
    )


def _count(flats: Iterable[FlatParameter]) -> int:
    return sum(sum(flat.layout.numels) for flat in flats)


def _unsharded(flats: Iterable[FlatParameter], others: int) -> int:
    """Return the bytes of full parameters, and of `others` more numbers each: gradient and optimizer state."""
    copies = [(flat, 1 + others if flat.trains else 1) for flat in flats]
    return sum(sum(flat.layout.numels) * flat.dtype.itemsize * count for flat, count in copies)
