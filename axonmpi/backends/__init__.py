"""Collectives and messages of the ranks of one group: the contract of a backend, and the backends."""

from .call_site import at_step
from .checks import MAX_TAG, Sizes, check_shape, check_sizes, check_tensor, wrap_dim
from .coalesced import all_reduce_coalesced, broadcast_coalesced, by_kind
from .connection.connection import path_of
from .connection.segment import remedy
from .contract import Backend
from .counters import NodeCounters
from .local import LocalBackend
from .mock.mock_backend import LoggedCall, MockBackend
from .mpi.mpi_backend import MpiBackend
from .nccl.devices import check_choices, choose_device
from .nccl.library import NcclUniqueId, library_text
from .nccl.nccl_backend import NcclBackend
from .objects import all_gather_number, all_gather_object, broadcast_object, gather_if_different, parts_by_node
from .ranks import check_different, check_parts, check_rank, check_ranks, integer_array
from .reduction import wide_dtype
from .worker import AtOnce, Worker, WorkerWork

__all__ = [
    "MAX_TAG",
    "AtOnce",
    "Backend",
    "LocalBackend",
    "LoggedCall",
    "MockBackend",
    "MpiBackend",
    "NcclBackend",
    "NcclUniqueId",
    "NodeCounters",
    "Sizes",
    "Worker",
    "WorkerWork",
    "all_gather_number",
    "all_gather_object",
    "all_reduce_coalesced",
    "at_step",
    "broadcast_coalesced",
    "broadcast_object",
    "by_kind",
    "check_choices",
    "check_different",
    "check_parts",
    "check_rank",
    "check_ranks",
    "check_shape",
    "check_sizes",
    "check_tensor",
    "choose_device",
    "gather_if_different",
    "integer_array",
    "library_text",
    "parts_by_node",
    "path_of",
    "remedy",
    "wide_dtype",
    "wrap_dim",
]
