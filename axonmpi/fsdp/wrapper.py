"""Module wrapper of fully sharded data parallelism: the public class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..across_ranks.gradient_norm import ClipsGradients, Copies, copy_counts, sharding_axes
from ..across_ranks.model_checks import check_same_model
from ..backends import broadcast_coalesced
from ..groups.process_group import ProcessGroup
from ..utils.arguments import check_flags, check_functions, member
from ..utils.device import device_at
from ..utils.torch_internals import outside_compile
from ..wrapping.gradient_hooks import accumulating
from ..wrapping.state_names import Wrapper
from . import full_state, memory
from .construction import (
    Choices,
    UnitPlan,
    build_flats,
    devices_of,
    find_units,
    initialise,
    initialise_buffers,
    lend_buffers,
    plan_units,
)
from .gradient_queue import FlatGradient
from .groups import checked_groups, sharding_groups
from .memory import FSDPMemoryStats
from .offload import Files, PinnedMemory
from .optimizers import watch_optimizers
from .options import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    checked_precision,
    keep_precision,
    kept_modules,
)
from .runtime import FSDPRuntime
from .unit import Unit


class FullyShardedDataParallel(Wrapper, ClipsGradients):
    """A model whose parameters, gradients and optimizer state are sharded over the ranks of a group.

    The model's parameters become this rank's shards, under the same names; any `torch.optim` optimizer on
    `fsdp.parameters()` updates these. Parameters are full while their unit computes. Ranks of one node compute
    with one copy in shared memory, and nothing is gathered. Gradients are averaged over all ranks, as in data
    parallelism: with equal slices of the batch, a step equals one of a single process on the joined batch.

    Construction, forward, backward and the methods that say so are collective: all ranks of the group call them in
    the same order. Parameters and buffers begin with rank 0's values.

    Args:
        module: The model, built in the same way on all ranks, with its parameters on one device that the group
            takes. A model on the meta device is initialised unit by unit, on this rank's GPU if the world began
            with "nccl" or "mpi+nccl", and else on the CPU.
        process_group: The ranks; None means all. For HYBRID_SHARD also a pair: the group that shards a replica, and
            the group of ranks with the same shard.
        sharding_strategy: A `ShardingStrategy`, or its name.
        cpu_offload: A `CPUOffload`, or its name.
        mixed_precision: True computes in bfloat16 and sums gradients in float32; or a `MixedPrecision`.
        units: The submodules that are gathered together: classes, names (with wildcards) or functions of a module;
            None finds repeated blocks.
        shard_by: `"elements"` cuts every unit into equal shards; `"parameters"` gives each rank full parameters,
            for optimizers that need matrices. A shard of a parameter has as many dims as the parameter.
        offload_folder: Folder of the files of `cpu_offload`, for a model on the CPU; None: the system's folder for
            temporary files, or `/var/tmp` or the current folder if that is memory.
        param_init_fn: Initialises a module of a model on the meta device; None: its `reset_parameters()`.

    Attributes:
        module: The model, with its parameters replaced.
        process_group: The ranks that shard the parameters.
        replicate_group: The ranks with the same shard; None if there are no others.
        sharding_strategy: The strategy; `strategy` is the same.
        runtime: The units and parameters of the model; for checkpoints.
        unit_names: Names of the units; the model itself, with all parameters of no other unit, is the empty name.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: The model has no parameters, differs between ranks, or an argument does not fit.

    Source: Rajbhandari et al., ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None,
        *,
        sharding_strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
        cpu_offload: CPUOffload | str = CPUOffload.NONE,
        mixed_precision: bool | MixedPrecision = False,
        units: Any = None,
        shard_by: str = "elements",
        offload_folder: str | os.PathLike[str] | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
    ) -> None:
        super().__init__()
        self.check_module(module, "; wrap the whole model once, and say with units= what is gathered together")
        precision = checked_precision(mixed_precision)
        strategy = member("sharding_strategy", ShardingStrategy, sharding_strategy)
        cpu_offload = member("cpu_offload", CPUOffload, cpu_offload)
        if shard_by not in ("elements", "parameters"):
            raise ValueError(f"shard_by: expected 'elements' or 'parameters', got {shard_by!r}")
        check_functions(param_init_fn=param_init_fn)
        given = checked_groups(process_group, strategy)
        plans = plan_units(module, find_units(module, units))
        devices = devices_of(module)
        arguments = {
            "sharding_strategy": strategy,
            "cpu_offload": cpu_offload,
            "shard_by": shard_by,
            "mixed_precision": precision,
            "units": [plan.name for plan in plans],
            "devices": sorted(device.type for device in devices),
        }
        device = device_at(next(iter(devices), given[0].backend.place))
        # Before the ranks meet: each notes the folders that are missing, and removes them with the model.
        offload: Files | PinnedMemory | None = None
        if cpu_offload is not CPUOffload.NONE:
            offload = PinnedMemory(device) if device.is_asynchronous else Files(offload_folder)
        for group in given:
            check_same_model(module, group, arguments)
        if next(module.parameters(), None) is None:
            raise ValueError("module: it has no parameters, so there is nothing to shard")
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"module: expected parameters on one device, got them on {names}; move it to one")
        self._groups = sharding_groups(given, strategy, device.place)
        self._offload, self._precision = cpu_offload, precision
        self._offloaded_to = offload  # files' folder goes with the model
        self.module = module
        self.process_group, self.replicate_group = self._groups.shard, self._groups.replicas
        self.sharding_strategy = self.strategy = strategy
        self.unit_names = [plan.name for plan in plans]
        choices = Choices(
            groups=self._groups,
            keeps=strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD),
            precision=precision,
            kept=kept_modules(module, precision),
            by_parameters=shard_by == "parameters",
            offload=offload,
            param_init_fn=param_init_fn,
        )
        self._build(plans, choices)

    def _build(self, plans: Sequence[UnitPlan], choices: Choices) -> None:
        flats = build_flats(plans, choices)
        buffers = lend_buffers(plans, flats, self._groups)
        # A gradient is on its shard's device: with pinned memory that is the CPU, with files it is anyhow.
        is_offloaded = isinstance(choices.offload, PinnedMemory) or self._offload is CPUOffload.FULL
        offload = choices.offload if is_offloaded else None
        units = []
        for plan, own, buffer in zip(plans, flats, buffers, strict=True):
            initialise(plan, own, choices)
            unit = Unit(plan.name, plan.module, own, buffer)
            if isinstance(offload, Files):
                for parameter in unit.parameters:
                    parameter.offload_state(offload)
            unit.show_sharded()
            units.append(unit)
        initialise_buffers(self.module, choices)
        self._init_buffers(choices)
        # Backward computes the gradients of the first layer last, and the outermost unit may own that layer.
        gradients = [
            FlatGradient(unit, flat, self._precision.sum_dtype(flat.compute_dtype), self._groups.replicas, offload)
            for unit in [*reversed(units[1:]), units[0]]
            for flat in unit.flats
            if flat.trains
        ]
        self.runtime = FSDPRuntime(self._groups, units, gradients, self._precision.param_dtype)
        runtime, computes_in = self.runtime, self._precision.param_dtype
        if computes_in is not None:
            keep_precision(dict.fromkeys(choices.kept.values()), computes_in, lambda: runtime.shows_copies)
        watch_optimizers(self.runtime)

    def _init_buffers(self, choices: Choices) -> None:
        """Broadcast rank 0's buffers, in the dtype of mixed precision."""
        dtype = self._precision.buffer_dtype
        for part in self.module.modules() if dtype is not None else ():
            for name, buffer in part._buffers.items() if part not in choices.kept else ():
                if buffer is not None and buffer.is_floating_point():
                    part._buffers[name] = buffer.to(dtype)
        buffers = [buffer for buffer in self.module.buffers() if buffer.numel()]
        for group in self._groups.both:
            broadcast_coalesced(group.backend, buffers, 0)

    # ---- training -------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; collective."""
        return self.module(*args, **kwargs)

    def call_method(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call another method of the module, which computes as forward does; collective."""
        return self.runtime.call(getattr(self.module, name), args, kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let full gradients of backwards in this context accumulate on each rank; local.

        The next backward outside reduces them, as does `sync_gradients()`.
        """
        return accumulating(self.runtime)

    @property
    def needs_whole_backward(self) -> bool:
        """True if gradients of inputs and of parameters have to be computed together, since units are gathered."""
        return not all(unit.is_resident for unit in self.runtime.units)

    @outside_compile
    def sync_gradients(self) -> None:
        """Average gradients that backward has not averaged; collective. Does nothing if there are none."""
        self.runtime.reduce_accumulated()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that have accumulated in `no_sync()`; local."""
        super().zero_grad(set_to_none)
        self.runtime.queue.discard()

    def _gradient_copies(
        self, group: ProcessGroup | None, copies: Copies | None
    ) -> tuple[list[tuple[Tensor, float]], list[ProcessGroup]]:
        named = [(parameter.name, parameter.sharded) for parameter in self.runtime.parameters]
        replicas = self._groups.replicas_in(group)
        if group is not None:
            asked = [group]
        elif copies is not None:
            asked = [self._groups.shard]
        else:
            asked = [axis.group for axis in sharding_axes(sharded for _, sharded in named)]
        times = 1 if copies is None else replicas  # else the sharded parameters know
        counts = copy_counts(named, copies, asked)
        return [(sharded, count * times) for (_, sharded), count in zip(named, counts, strict=True)], asked

    # ---- full parameters ------------------------------------------------------------------------------------

    def gather_parameters(self) -> None:
        """Show full parameters, a copy on every rank, until `reshard_parameters()`; collective.

        Forward, backward, optimizers and `zero_grad()` go on as always: gradients are this rank's shards of the
        averages, and a step changes the full parameters. Forwards without gradients need no other rank.
        """
        if not self._is_gathered:
            self.runtime.gather_full()
            self._is_gathered = True

    def reshard_parameters(self) -> None:
        """Show this rank's shards again, with the changes of the full parameters; collective."""
        if self._is_gathered:
            self._is_gathered = False
            self.runtime.reshard()

    _is_gathered = False

    @contextmanager
    def full_parameters(self, *, writeback: bool = True) -> Iterator[None]:
        """Show full parameters, a copy on every rank, during a `with` block; collective at both ends.

        Args:
            writeback: Take changes of the values over, each rank those of its shard.
        """
        check_flags(writeback=writeback)
        self.runtime.gather_full(writeback=writeback)
        try:
            yield
        finally:
            self.runtime.reshard()

    # ---- state ----------------------------------------------------------------------------------------------

    def full_state_dict(
        self, *, rank0_only: bool = False, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """Return the state dict of the module without sharding; collective, one parameter at a time.

        Args:
            rank0_only: Rank 0 gets the state dict; the others get an empty dict.
            device: Device of its tensors, such as `"cpu"` for more memory than a GPU has; None: that of the shards.
        """
        with self.runtime.between_steps():
            return full_state.full_state_dict(self.module, self.runtime, rank0_only=rank0_only, device=device)

    def load_full_state_dict(self, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Take the values of a state dict of the module without sharding; collective.

        Args:
            state_dict: On rank 0; ignored on other ranks, where it may be empty.
            strict: Missing and unexpected names are an error.

        Raises:
            ValueError: Names or shapes do not fit; on all ranks, and nothing is changed.
        """
        with self.runtime.between_steps():
            full_state.load_full_state_dict(self.module, self.runtime, state_dict, strict=strict)

    def full_optimizer_state_dict(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        rank0_only: bool = False,
        device: torch.device | str | None = None,
    ) -> dict[str, Any]:
        """Return an optimizer's state without sharding, by parameter name; collective.

        Args:
            optimizer: An optimizer of parameters of this model.
            rank0_only: Rank 0 gets the state; the others get an empty dict.
            device: Device of the returned tensors; None: the shards' device. Tensors without dims are on the CPU.

        Returns:
            `"state"`: the full state of each parameter, by name; `"param_groups"`: the options, with names.
        """
        with self.runtime.between_steps():
            return full_state.full_optimizer_state_dict(
                self.runtime, optimizer, rank0_only=rank0_only, device=device
            )

    def load_full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load the state in a dict of `full_optimizer_state_dict` into an optimizer of this model; collective.

        Args:
            optimizer: The optimizer, with the same parameters in its groups as the dict has.
            state_dict: The dict on rank 0; ignored on other ranks.

        Raises:
            ValueError: The parameters do not fit; on all ranks.
        """
        with self.runtime.between_steps():
            full_state.load_full_optimizer_state_dict(self.runtime, optimizer, state_dict)

    # ---- memory ---------------------------------------------------------------------------------------------

    def memory_stats(self) -> FSDPMemoryStats:
        """Measure the memory of this rank's parameters, gradients and optimizer state; local.

        Shared memory of a node counts in equal shares for its ranks.
        """
        return memory.measured(self.runtime)

    def memory_estimate(
        self,
        sharding_strategy: ShardingStrategy | str | None = None,
        world_size: int | None = None,
        *,
        ranks_per_node: int | None = None,
        optimizer_states: int = 2,
        mixed_precision: bool | MixedPrecision | None = None,
    ) -> FSDPMemoryStats:
        """Compute the memory of a rank's parameters, gradients and optimizer state; local.

        Args:
            sharding_strategy: The strategy; None: that of this model.
            world_size: Number of ranks; None: that of this model.
            ranks_per_node: Ranks that share memory; None: as now, or `world_size` if that is set.
            optimizer_states: Numbers that the optimizer keeps for each parameter: 2 for Adam, 1 for momentum, 0
                for SGD.
            mixed_precision: Dtypes; None: those of this model.
        """
        precision = self._precision if mixed_precision is None else checked_precision(mixed_precision)
        given = self.strategy if sharding_strategy is None else sharding_strategy
        return memory.estimated(
            self.runtime,
            member("sharding_strategy", ShardingStrategy, given),
            world_size,
            ranks_per_node,
            optimizer_states,
            precision,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        raise TypeError("FullyShardedDataParallel cannot be copied: wrap a copy of the model instead")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("FullyShardedDataParallel cannot be pickled: save its .full_state_dict() instead")
