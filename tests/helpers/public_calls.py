"""Every public callable of the package, with arguments for which a call of it is right."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import axonmpi as ax
from axonmpi.launch.topology import Topology
from axonmpi.pipeline import make_schedule
from axonmpi.utils.rows import Exchange
from helpers import REPOSITORY

DOCS = REPOSITORY / "docs"
RESULTS = {"Group", "LaunchResult", "Operation", "RankState", "Summary"}
"""Classes that the package makes itself, for users to read."""


@dataclass(frozen=True)
class PublicCall:
    """A function, a class, or a method of one.

    Attributes:
        name: As users write it, without `axonmpi.`.
        owner: The class that a method is of.
        function: What has the signature.
    """

    name: str
    owner: type | None
    function: Callable[..., Any]

    @property
    def flags(self) -> list[inspect.Parameter]:
        """Parameters that are True or False."""
        return [parameter for parameter in self.parameters if re.search(r"\bbool\b", str(parameter.annotation))]

    @property
    def group(self) -> str | None:
        """The name of the parameter for the group."""
        return next((p.name for p in self.parameters if p.name in ("group", "process_group")), None)

    @property
    def parameters(self) -> list[inspect.Parameter]:
        is_bound = inspect.ismethod(self.function) or self.owner is None
        return list(inspect.signature(self.function).parameters.values())[0 if is_bound else 1 :]


def public_modules() -> list[Any]:
    """The package, and what it has modules for that the docs name; of the backends users see the classes alone."""
    text = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    named = set(re.findall(r"\b(?:axonmpi|ax)\.(\w+)", text))
    below = [
        found.name for found in pkgutil.iter_modules(ax.__path__) if found.name in named - {"backends"} | {"train"}
    ]
    return [ax, *(importlib.import_module(f"axonmpi.{name}") for name in sorted(below))]


def public_calls() -> list[PublicCall]:
    """All of them, each once."""
    calls: dict[Any, PublicCall] = {}
    for module in public_modules():
        prefix = module.__name__.removeprefix("axonmpi").removeprefix(".")
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            is_error = inspect.isclass(thing) and issubclass(thing, Exception)
            if is_error or not (inspect.isclass(thing) or inspect.isfunction(thing)) or thing in calls:
                continue
            calls[thing] = PublicCall(f"{prefix}.{name}".lstrip("."), None, thing)
            if inspect.isclass(thing):
                calls.update({(thing, call.name): call for call in _methods(name, thing)})
    return [call for call in calls.values() if call.name.rpartition(".")[2] not in RESULTS]


def _methods(name: str, owner: type) -> Iterator[PublicCall]:
    foreign = {
        method for base in owner.__mro__ if not base.__module__.startswith("axonmpi") for method in vars(base)
    }
    for method, function in inspect.getmembers(owner, callable):
        ours = getattr(function, "__module__", None) or ""
        if not method.startswith("_") and method not in foreign and ours.startswith("axonmpi"):
            yield PublicCall(f"{name}.{method}", owner, function)


def _of_ones(module: nn.Module) -> nn.Module:
    """Give the parameters values that all ranks have."""
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


class Arguments:
    """Right arguments on one rank, by the name of a call, or by what comes last in it."""

    def __init__(self, world: ax.World, folder: Path) -> None:
        self.group = group = world.new_group(range(world.size))
        self.under_way: list[ax.Work] = []
        own, ranks = group.rank, group.size
        t = torch.ones(ranks, ranks)
        memory = group.node_empty((ranks,), torch.float32)
        stages = [nn.Linear(4, 4) for _ in range(ranks)]
        self.fsdp = ax.FSDP(nn.Linear(4, 4), group)
        optimizer = torch.optim.SGD(self.fsdp.parameters(), lr=0.1)
        whole = self.fsdp.full_state_dict()
        divided = ax.ColumnParallelLinear(4, ranks, process_group=group)
        synchronizer = ax.GradientSynchronizer()

        def begin_round() -> tuple[()]:
            synchronizer.prepare(0)
            return ()

        folder = group.broadcast_object(folder)
        ax.save_checkpoint(folder / "saved", _of_ones(nn.Linear(4, 4)), group=group)
        self.owners = {
            "CheckpointFolder": ax.CheckpointFolder(folder / "run", group=group),
            "Backend": group.backend,
            "DDP": ax.DDP(nn.Linear(4, 4), group),
            "FSDP": self.fsdp,
            "GradientSynchronizer": synchronizer,
            "MockBackend": group.backend,
            "MpiBackend": group.backend,
            "Pipeline": ax.Pipeline.from_modules(stages, group),
            "ProcessGroup": group,
            "World": world,
        }
        self.keywords = {"CheckpointFolder.save": {"step": 1}}
        self.of: dict[str, tuple[Any, ...] | Callable[[], tuple[Any, ...]]] = {
            # collectives, also as methods
            "all_gather": (t,),
            "all_gather_into": (memory, None, [1] * ranks),
            "all_gather_object": (1,),
            **{f"all_reduce{kind}": (t,) for kind in ("", "_sum", "_mean", "_min", "_max", "_product")},
            "all_to_all": ([t] * ranks,),
            "barrier": (),
            "broadcast": (t,),
            "broadcast_from": (t, 0),
            "broadcast_object": (1, 0),
            "exchange_rows": ([t[:0]], [], Exchange((0,) * ranks, ((),) * ranks)),
            "gather": (t,),
            "gather_tensor": (t,),
            "irecv": lambda: (torch.empty(ranks, ranks), own),
            "is_main_process": (),
            "isend": (t, own),
            "rank": (),
            "recv": (t, own),
            "reduce": (t, 0),
            "reduce_scatter": (t,),
            "reduce_scatter_into": (memory[own : own + 1].clone(), [ranks], [1] * ranks),
            "reduce_scatter_mean": (t,),
            "reduce_scatter_sum": (t,),
            "scan": (t,),
            "scatter": (t,),
            "scatter_tensor": (t,),
            "send": (t, own),
            "symmetric_empty": ((4,), torch.float32),
            "sync_gradient": (t,),
            "sync_gradients": ([t],),
            "trace": (folder / "trace",),
            "tracing.Trace": lambda: (group.backend, Topology.of([0] * ranks, own), folder / "trace"),
            "waiting": ("wait",),
            "world_size": (),
            "autograd.all_to_all": (t,),
            "autograd.copy": (t,),
            "autograd.fetch": (t, 0, 1),
            "autograd.reduce": (t,),
            # data parallelism
            "DDP": lambda: (nn.Linear(4, 4),),
            "DDP.join": (),
            "DistributedSampler": (8, 2, 0),
            "main_process_first": (),
            "node_shared": (lambda: torch.ones(2),),
            "FSDP": lambda: (nn.Linear(4, 4),),
            "FSDP.full_optimizer_state_dict": (optimizer,),
            "FSDP.full_parameters": (),
            "FSDP.full_state_dict": (),
            "FSDP.load_full_state_dict": (whole,),
            "FSDP.memory_estimate": (),
            "GradientSynchronizer.sync_all": begin_round,
            "ShardedGradScaler": (),
            "FSDP.clip_grad_norm": (1.0,),
            "Pipeline.clip_grad_norm": (1.0,),
            "clip_grad_norm": (nn.Linear(4, 4), 1.0),
            # pipeline parallelism
            "Pipeline": ([ax.PipelineStage(stage, rank, rank) for rank, stage in enumerate(stages)],),
            "Pipeline.from_modules": (stages,),
            "Pipeline.record_times": (),
            "pipeline.simulate": (make_schedule(ax.PipelineSchedule.GPIPE, 2, 2),),
            "pipeline.split_module": lambda: (nn.Sequential(nn.Linear(4, 4)), 1),
            # tensor parallelism
            "ColumnParallelLinear": (4, ranks),
            "ParallelGatedMLP": (4, ranks),
            "ParallelMLP": (4, ranks),
            "RowParallelLinear": (ranks, 4),
            "ShardedDropout": (),
            "VocabParallelEmbedding": (8, 4),
            "VocabParallelEmbedding.from_embedding": (nn.Embedding(8, 4),),
            "from_linear": (nn.Linear(ranks, ranks),),
            "parallel_cross_entropy": (t, torch.zeros(ranks, dtype=torch.int64)),
            "sequence_parallel_norm": lambda: (nn.LayerNorm(4),),
            "tensor.Column": (),
            "tensor.Divide": (("num_heads",),),
            "tensor.Dropout": (),
            "tensor.ParallelSelfAttention": (4 * ranks, ranks),
            "tensor.Region": (),
            "tensor.Vocabulary": (),
            "tensor.enter": (t,),
            "tensor.full_state_dict": (divided,),
            "tensor.join_sequence": (t,),
            "tensor.leave": (t,),
            "tensor.load_full_state_dict": (divided, nn.Linear(4, ranks).state_dict()),
            "tensor.split_sequence": (t,),
            "tensor_parallel_attention": (4 * ranks, ranks),
            "tensor_parallelize": lambda: (_of_ones(nn.Sequential(nn.Linear(4, ranks))), {"0": "column:gather"}),
            # domain parallelism
            "domain.Resample": ("linear",),
            "domain.Window": (1,),
            "domain.attention": (t, t, t),
            # checkpoints
            "CheckpointFolder": (folder / "run",),
            "CheckpointFolder.latest": (),
            "CheckpointFolder.load_latest": (nn.Linear(4, 4),),
            "CheckpointFolder.path_of": (1,),
            "CheckpointFolder.save": lambda: (_of_ones(nn.Linear(4, 4)),),
            "PreemptionGuard": ((),),
            "load_checkpoint": (folder / "saved", nn.Linear(4, 4)),
            "save_checkpoint": lambda: (folder / "again", _of_ones(nn.Linear(4, 4))),
            # the rest
            "testing.parallel_assert": (True,),
            "tensor.Shard": (0, 1, (((0, 1),),), 1),
            "train.MeshConfig": (),
            "train.ModelConfig": (),
            "train.RunConfig": (),
        }

    def finish(self) -> None:
        """Wait until all is done that was called, and meet the other ranks."""
        for work in self.under_way:
            work.wait()
        self.group.barrier()

    def call(self, call: PublicCall, **named: Any) -> None:
        """Call it with right arguments, apart from those that are named here."""
        owner, _, name = call.name.rpartition(".")
        function = call.function
        if call.owner is not None and not inspect.ismethod(function):
            function = getattr(self.owners[owner], name)
        given = self.of[call.name] if call.name in self.of else self.of[name]
        right = given() if callable(given) else given
        bound = inspect.signature(function).bind_partial(*right)
        known = {name: value for name, value in named.items() if name in inspect.signature(function).parameters}
        bound.arguments.update(self.keywords.get(call.name, {}) | known)
        others = {name: value for name, value in named.items() if name not in known}
        result = function(*bound.args, **bound.kwargs, **others)
        if isinstance(result, ax.Work):
            self.under_way.append(result)
        elif isinstance(result, AbstractContextManager) and not isinstance(result, nn.Module):
            with result:
                pass
