"""Checks of tensors, ranks and sizes given to a backend's operations, with messages of one form.

They run before anything is sent, on the rank that made the mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import CommunicatorError, DimensionError, DtypeError
from ..utils.arguments import hint
from ..utils.cache import BoundedCache
from .reduction import DTYPES

MAX_TAG = 32767
"""The largest tag that every MPI library has to support (MPI 4.1, section 9.1.2)."""
MAX_SIZES = 1 << 17
"""Sizes of parts, of all groups together, that are kept to be the same objects in many calls."""

_DTYPES = frozenset(DTYPES)


def check_tensor(tensor: object, backend: str, device_types: tuple[str, ...]) -> None:
    """Raise unless `tensor` is a dense tensor that the backend can carry."""
    if not isinstance(tensor, Tensor):
        raise TypeError(_no_tensor(tensor))
    if hasattr(tensor, "to_local"):  # a DomainTensor, a DTensor
        raise TypeError(
            f"expected an ordinary tensor, got a {type(tensor).__name__}, of which this rank has a part; give its "
            "to_local() or full_tensor()"
        )
    if tensor.device.type not in device_types:
        raise ValueError(
            f"the {backend} backend takes tensors on {' or '.join(device_types)}, "
            f"got one on {tensor.device}; move it with .{device_types[0]}()"
        )
    if tensor.is_nested:
        raise ValueError("expected a dense tensor, got a nested one; use .to_padded_tensor(), or send its parts")
    if tensor.layout is not torch.strided:
        raise ValueError(f"expected a dense tensor, got layout {tensor.layout}; use .to_dense()")
    if tensor.dtype not in _DTYPES:
        raise DtypeError(f"tensors of dtype {tensor.dtype} cannot be sent; convert them first")
    if type(tensor) in (Tensor, Parameter) and tensor.numel():
        _check_storage(tensor)


def _no_tensor(given: object) -> str:
    todo = "wrap it in torch.as_tensor()"
    if isinstance(given, list | tuple):
        todo = "give one tensor; results are returned, none is written into a list"
    return f"expected a torch.Tensor, got {type(given).__name__}{hint(given) or '; ' + todo}"


def _check_storage(tensor: Tensor) -> None:
    try:
        held = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # those of torch.func have no storage of their own
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    if held < needed:
        raise RuntimeError(
            f"expected a tensor whose storage holds its elements, {needed} bytes, got a storage of {held} bytes; "
            "its memory has been given back, as by untyped_storage().resize_()"
        )


def check_readable(tensor: object, backend: str, device_types: tuple[str, ...]) -> Tensor:
    """Check a tensor that is only read; return it without autograd history, its values as they lie in memory."""
    if (
        isinstance(tensor, Tensor)
        and _is_plain(tensor, device_types)
        and not tensor.is_conj()
        and not tensor.is_neg()
    ):
        return tensor
    check_tensor(tensor, backend, device_types)
    assert isinstance(tensor, Tensor)
    return tensor.detach().resolve_conj().resolve_neg()


def _is_plain(tensor: Tensor, device_types: tuple[str, ...]) -> bool:
    """Return True if a tensor certainly passes all checks; quickly, since a small collective waits for it."""
    return (
        tensor.__class__ is Tensor
        and ((tensor.is_cpu and device_types[0] == "cpu") or tensor.device.type in device_types)
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and tensor.dtype in _DTYPES
        and not tensor.is_nested
        and not tensor.is_inference()
        and (
            (held := tensor.untyped_storage().nbytes()) == tensor.nbytes
            or held >= tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        )
    )


def check_writable(tensor: Tensor, backend: str, device_types: tuple[str, ...]) -> Tensor:
    """Check a tensor that the operation writes into and return it without its autograd history."""
    if _is_plain(tensor, device_types):
        return tensor
    check_tensor(tensor, backend, device_types)
    if getattr(tensor, "is_shard", False):
        raise ValueError(
            "this operation would write over a shard of a parameter or gradient, of which other ranks have other "
            "shards; FSDP averages gradients by itself, and values are set within `with fsdp.full_parameters():`"
        )
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError("this operation writes into an expanded tensor, whose elements share memory; .clone() it")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "this operation writes into a tensor that was made in torch.inference_mode(), which can be changed "
            "only there; call it there, or .clone() the tensor"
        )
    if not tensor.requires_grad:
        return tensor
    if torch.is_grad_enabled():
        raise ValueError(
            "this operation writes into a tensor that requires grad, which autograd cannot follow; use "
            "axonmpi.autograd for differentiable collectives, or torch.no_grad() if no gradient is wanted"
        )
    return tensor.detach()


def check_tensor_list(tensors: object, size: int) -> None:
    """Raise unless `tensors` is a sequence of `size` entries."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"all_to_all: expected a list of tensors, one a rank, got {type(tensors).__name__}")
    if len(tensors) != size:
        raise ValueError(f"all_to_all: expected {size} tensors, one for each rank of the group, got {len(tensors)}")


def check_dtype(dtype: object) -> None:
    """Raise unless `dtype` is one that can be sent."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    if dtype not in _DTYPES:
        raise DtypeError(f"dtype: tensors of dtype {dtype} cannot be sent; use another one")


def check_shape(shape: object) -> tuple[int, ...]:
    """Check the shape of a new tensor and return it as a tuple; an integer is a shape of one dimension."""
    sizes = (shape,) if isinstance(shape, int) else shape
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise TypeError(f"shape: expected a sequence of integers, got {shape!r}")
    checked = tuple(sizes)
    if set(map(type, checked)) <= {int} and min(checked, default=0) >= 0:  # the quickest way, for many
        return checked
    for size in checked:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"shape: expected integers, got {checked!r}")
        if size < 0:
            raise ValueError(f"shape: expected sizes of at least 0, got {checked!r}")
    return checked


class Sizes(tuple[int, ...]):
    """The size of each rank's part, checked and hashed once, however many calls they are used in.

    Args:
        sizes: The sizes.

    Attributes:
        total: Their sum.
    """

    total: int
    _hash: int

    def __new__(cls, sizes: Iterable[int]) -> Sizes:
        """Check the sizes, unless they are `Sizes` already; local."""
        if isinstance(sizes, Sizes):
            return sizes
        made = super().__new__(cls, check_shape(sizes))
        made.total = sum(made)
        made._hash = super().__hash__(made)
        return _known_sizes.get(made) or _known_sizes.add(made, made, len(made))

    def __hash__(self) -> int:
        return self._hash


_known_sizes: BoundedCache[Sizes, Sizes] = BoundedCache(MAX_SIZES)
"""Equal sizes are one object, which many calls and many layers of a model have in common."""


def check_sizes(sizes: Iterable[int], ranks: int) -> Sizes:
    """Raise unless `sizes` has one size for each of `ranks` ranks; return them."""
    checked = Sizes(sizes)
    if len(checked) != ranks:
        raise ValueError(f"sizes: expected {ranks} sizes, one for each rank of the group, got {len(checked)}")
    return checked


def check_flat(tensor: Tensor, numel: int, what: str, backend: str, device_types: tuple[str, ...]) -> Tensor:
    """Check a contiguous tensor of one dimension and return it without its autograd history."""
    check_tensor(tensor, backend, device_types)
    if tensor.shape != (numel,) or not tensor.is_contiguous():
        raise ValueError(f"{what}: expected a contiguous tensor of shape [{numel}], got {list(tensor.shape)}")
    return tensor.detach()


def check_tag(tag: object) -> None:
    """Raise unless `tag` is a message tag that every MPI library has."""
    if not isinstance(tag, int) or isinstance(tag, bool) or not 0 <= tag <= MAX_TAG:
        raise ValueError(f"tag: expected an int from 0 to {MAX_TAG}, got {tag!r}{hint(tag)}")


def check_named(src: int | None, backend: str) -> int:
    """Return the rank to receive from, for a backend that has to know it.

    Raises:
        CommunicatorError: `src` is None, any rank.
    """
    if src is None:
        raise CommunicatorError(f"the {backend} backend receives from a named rank only")
    return src


def wrap_dim(dim: object, dims: int, name: str = "dim") -> int:
    """Turn a dimension, negative ones from the end, into an index."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{name}: expected an int, got {dim!r}{hint(dim)}")
    if dims == 0:
        raise DimensionError(f"{name}: expected a tensor of at least 1 dimension, got a 0-d one; use .reshape(1)")
    if not -dims <= dim < dims:
        raise DimensionError(f"{name}: expected {-dims} to {dims - 1} for a tensor of {dims} dimensions, got {dim}")
    return dim % dims
