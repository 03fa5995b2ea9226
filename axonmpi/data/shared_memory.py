"""An array or tensor that the ranks of a node share, as one copy in memory without a name.

Each node's first rank makes the data. All ranks learn dtype and shape, map the same memory, and wait until it is
filled. The memory is freed with the last mapping, however the processes end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..backends import all_gather_object, check_tensor
from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..utils.process_memory import available_memory
from .first_rank import raise_failures, text_of_error

Shared = TypeVar("Shared", NDArray[Any], Tensor)


def node_shared(fn: Callable[[], Shared], group: ProcessGroup | None = None) -> Shared:
    """Return the array or tensor that `fn()` gives on one rank of each node, one copy for the node; collective.

    The node's first rank of the group calls `fn`, and its result is copied into memory that the ranks of the node
    share. For a moment this rank holds both, so read a large file by `np.load(file, mmap_mode="r")`. The memory is
    freed when the last reference on all ranks is gone.

    Forked processes, such as the workers of a `DataLoader` on Linux, read the same memory. Pickling makes a copy,
    and workers that are started by `spawn` or `forkserver` get one each.

    Args:
        fn: Function without arguments that returns a numpy array (or `np.memmap`), or a tensor on the CPU. Its
            result may differ between nodes.
        group: The ranks; None means all.

    Returns:
        An array with the result's dtype and shape, in C order, that cannot be written to; or a contiguous tensor
        without autograd history, also for a parameter. Torch has no read-only tensors: changes of a tensor are seen
        by the node's other ranks.

    Raises:
        TypeError: `fn` cannot be called; on the ranks that call it: its result is neither, is of a subclass, or has
            objects or a dtype that cannot be shared.
        ValueError: This rank is not in the group; on the ranks that call `fn`: a tensor is sparse, nested or not on
            the CPU.
        RankFailedError: `fn` has raised an error, or its result one of those above; on all ranks but the one that
            called it, which raises the error itself. Names rank and error.
        MemoryError: A node has not enough memory; on the rank that called `fn`, or all ranks of the node.
    """
    backend = group_of_this_rank(group, "group").backend.control
    if not callable(fn):
        raise TypeError(f"fn: expected a function that returns an array or a tensor, got {type(fn).__name__}")
    first = backend.node_ranks[0]
    form: _Form | None = None
    problem: Exception | None = None
    if backend.rank == first:
        try:
            source = fn()
            form = _form_of(source, backend.name)
            _check_memory(form.nbytes)
        except Exception as error:  # the other ranks wait for it, whatever it is
            problem = error
    answers = all_gather_object(backend, (form, "" if problem is None else text_of_error(problem)))
    if problem is not None:
        raise problem
    raise_failures("fn of node_shared", [text for _, text in answers])
    forms = [each for each, _ in answers]
    memory = backend.node_empty((max(each.nbytes for each in forms if each is not None),), torch.uint8)
    if form is not None:
        form.fill(memory, source)
    backend.barrier()
    shared: Shared = forms[first].view(memory)
    return shared


class _Form(NamedTuple):
    """Dtype and shape of an array, or of a tensor."""

    dtype: np.dtype[Any] | torch.dtype
    shape: tuple[int, ...]
    nbytes: int

    def fill(self, memory: Tensor, source: Any) -> None:
        """Copy an array or tensor of this form to the beginning of some memory."""
        if isinstance(self.dtype, torch.dtype):
            self.view(memory).copy_(source.detach())
        else:
            np.ndarray(self.shape, self.dtype, memory.numpy().data)[...] = source

    def view(self, memory: Tensor) -> Any:
        """Return the beginning of some memory in this form; an array is read-only."""
        if isinstance(self.dtype, torch.dtype):
            return memory[: self.nbytes].view(self.dtype).view(self.shape)
        return np.ndarray(self.shape, self.dtype, memory.numpy().data.toreadonly())


def _form_of(source: object, backend: str) -> _Form:
    if type(source) in (np.ndarray, np.memmap):
        assert isinstance(source, np.ndarray)
        if source.dtype.hasobject:
            raise TypeError(f"fn: expected an array of numbers or fixed bytes, got dtype {source.dtype}")
        return _Form(source.dtype, source.shape, source.nbytes)
    if type(source) in (Tensor, nn.Parameter):
        assert isinstance(source, Tensor)
        check_tensor(source, backend, ("cpu",))
        return _Form(source.dtype, tuple(source.shape), source.nbytes)
    raise TypeError(
        f"fn: expected it to return a numpy.ndarray or a torch.Tensor, got {type(source).__name__}; convert it, "
        "and call node_shared once for each of several arrays"
    )


def _check_memory(nbytes: int) -> None:
    """Raise before the system ends processes to find memory."""
    if nbytes > (available := available_memory()):
        raise MemoryError(
            f"fn: expected at most {available >> 20} MiB, which this node has available, got {nbytes >> 20} MiB; "
            "give the job more memory, or leave the array in its file, as np.load(file, mmap_mode='r') does"
        )
