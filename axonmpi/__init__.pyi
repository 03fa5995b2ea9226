"""The public names of `axonmpi` and their files: `__init__.py` imports each at its first use."""

from . import autograd, comm, errors, testing
from . import backends as backends
from . import checkpoint as checkpoint
from . import data as data
from . import ddp as ddp
from . import domain as domain
from . import fsdp as fsdp
from . import interop as interop
from . import mesh as mesh
from . import pipeline as pipeline
from . import tensor as tensor
from . import types as types
from .across_ranks.gradient_norm import clip_grad_norm
from .backends import Backend, MockBackend, MpiBackend, NcclBackend, NcclUniqueId
from .checkpoint import CheckpointFolder, CheckpointInfo, PreemptionGuard, load_checkpoint, save_checkpoint
from .comm import (
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_product,
    all_reduce_sum,
    all_to_all,
    barrier,
    broadcast,
    broadcast_from,
    broadcast_object,
    destroy_process_group,
    gather_tensor,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_num_nodes,
    get_rank,
    get_world,
    get_world_size,
    init_process_group,
    irecv,
    is_initialized,
    is_main_process,
    isend,
    new_group,
    rank,
    recv,
    reduce,
    reduce_scatter_mean,
    reduce_scatter_sum,
    scan,
    scatter_tensor,
    send,
    symmetric_empty,
    sync_gradient,
    sync_gradients,
    trace,
    world_size,
)
from .data import DistributedSampler, main_process_first, node_shared
from .ddp import DistributedDataParallel, GradientBucket, GradientSynchronizer
from .ddp import DistributedDataParallel as DDP
from .domain import Domain, DomainTensor
from .errors import (
    AxonmpiError,
    CheckpointError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorError,
    LaunchError,
    NcclError,
    RankFailedError,
)
from .fsdp import (
    CPUOffload,
    FSDPMemoryStats,
    FullyShardedDataParallel,
    MixedPrecision,
    ScatteredParameterError,
    ShardedGradScaler,
    ShardingStrategy,
)
from .fsdp import FullyShardedDataParallel as FSDP
from .groups.process_group import ProcessGroup
from .groups.world import World
from .launch.exit import REQUEUE_EXIT_CODE
from .mesh import DeviceMesh
from .pipeline import Pipeline, PipelineMemoryStats, PipelineSchedule, PipelineStage
from .tensor import (
    ColumnParallelLinear,
    ParallelGatedMLP,
    ParallelMLP,
    RowParallelLinear,
    ShardedDropout,
    VocabParallelEmbedding,
    parallel_cross_entropy,
    sequence_parallel_norm,
    tensor_parallel_attention,
    tensor_parallelize,
)
from .types import GradSyncStrategy, ReduceOp, Work

__version__: str

__all__ = [
    "DDP",
    "FSDP",
    "REQUEUE_EXIT_CODE",
    "AxonmpiError",
    "Backend",
    "CPUOffload",
    "CheckpointError",
    "CheckpointFolder",
    "CheckpointInfo",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ColumnParallelLinear",
    "CommunicatorError",
    "DeviceMesh",
    "DistributedDataParallel",
    "DistributedSampler",
    "Domain",
    "DomainTensor",
    "FSDPMemoryStats",
    "FullyShardedDataParallel",
    "GradSyncStrategy",
    "GradientBucket",
    "GradientSynchronizer",
    "LaunchError",
    "MixedPrecision",
    "MockBackend",
    "MpiBackend",
    "NcclBackend",
    "NcclError",
    "NcclUniqueId",
    "ParallelGatedMLP",
    "ParallelMLP",
    "Pipeline",
    "PipelineMemoryStats",
    "PipelineSchedule",
    "PipelineStage",
    "PreemptionGuard",
    "ProcessGroup",
    "RankFailedError",
    "ReduceOp",
    "RowParallelLinear",
    "ScatteredParameterError",
    "ShardedDropout",
    "ShardedGradScaler",
    "ShardingStrategy",
    "VocabParallelEmbedding",
    "Work",
    "World",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_product",
    "all_reduce_sum",
    "all_to_all",
    "autograd",
    "barrier",
    "broadcast",
    "broadcast_from",
    "broadcast_object",
    "clip_grad_norm",
    "comm",
    "destroy_process_group",
    "errors",
    "gather_tensor",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_num_nodes",
    "get_rank",
    "get_world",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_initialized",
    "is_main_process",
    "isend",
    "load_checkpoint",
    "main_process_first",
    "new_group",
    "node_shared",
    "parallel_cross_entropy",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter_mean",
    "reduce_scatter_sum",
    "save_checkpoint",
    "scan",
    "scatter_tensor",
    "send",
    "sequence_parallel_norm",
    "symmetric_empty",
    "sync_gradient",
    "sync_gradients",
    "tensor_parallel_attention",
    "tensor_parallelize",
    "testing",
    "trace",
    "world_size",
]
