"""The exceptions that this package raises for a fault of the launch, of the machine or of another rank.

A mistake in a call is a `ValueError` or `TypeError`, as everywhere in Python. An `AxonmpiError` has another cause:
the launch, the machine or another rank is at fault, and the code at the call site may be right.

    AxonmpiError (RuntimeError)
    ├── LaunchError               the processes were not started as one MPI job
    ├── CommunicatorError         a group is closed, inherited by a fork, or MPI itself failed
    ├── CollectiveMismatchError   the ranks of a group made different calls
    ├── CollectiveTimeoutError    the other ranks did not call the operation in time
    ├── RankFailedError           another rank failed while this one waited for it
    ├── UnusedParameterError      (also a ValueError) parameters got no gradient under data parallelism
    ├── CheckpointError           a checkpoint cannot be written or read
    └── NcclError                 NCCL reported an error

Two classes are for mistakes in a call: `DtypeError` is both a `TypeError` and a `ValueError`, `DimensionError` a
`ValueError` and, as torch's own, an `IndexError`.
"""

from __future__ import annotations

__all__ = [
    "AxonmpiError",
    "CheckpointError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicatorError",
    "DimensionError",
    "DtypeError",
    "LaunchError",
    "NcclError",
    "RankFailedError",
    "UnusedParameterError",
]


class AxonmpiError(RuntimeError):
    """Base of every error that is not a mistake in the arguments of the call."""


class LaunchError(AxonmpiError):
    """The processes were not started as one MPI job; the message has the command to type."""


class CommunicatorError(AxonmpiError):
    """A group cannot be used: closed, inherited by a forked process, or failed in MPI."""


class CollectiveMismatchError(AxonmpiError):
    """The ranks of a group made different calls; raised on every rank, with the calls and their ranks.

    Attributes:
        calls: Each rank's call as text; empty if the ranks have not exchanged them.
    """

    calls: tuple[str, ...] = ()


class CollectiveTimeoutError(AxonmpiError, TimeoutError):
    """An operation was not completed by the other ranks within its time-out."""


class RankFailedError(AxonmpiError):
    """Another rank failed while this rank waited for it."""


class UnusedParameterError(AxonmpiError, ValueError):
    """Parameters have no gradient after a backward that data parallelism reduces; the message names them."""


class CheckpointError(AxonmpiError):
    """A checkpoint cannot be written, or is incomplete or damaged."""


class NcclError(AxonmpiError):
    """NCCL reported an error."""


class DomainError(ValueError):
    """A function cannot be computed on parts of tensors that are cut over ranks; nothing was sent."""


class DtypeError(TypeError, ValueError):
    """A tensor's dtype does not allow the operation; the message lists the dtypes that do."""


class DimensionError(ValueError, IndexError):
    """A tensor does not have the dimension that a call names."""
