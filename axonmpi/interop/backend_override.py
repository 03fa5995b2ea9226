"""One backend for all groups of `torch.distributed`, whatever a program names: for `axonmpi run --backend`."""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta
from importlib import import_module
from typing import Any

from .autoload import NAME, register


def override_backend(name: str) -> None:
    """Give all groups that `torch.distributed` makes from now on one backend; local.

    It replaces the function that makes all groups, also those of `init_device_mesh` and `new_group`: torch takes
    its own gloo whatever is registered under that name.

    Args:
        name: A backend of the CPU: `"axonmpi"` or `"gloo"`.
    """
    register()
    c10d: Any = import_module("torch.distributed.distributed_c10d")
    make_group = c10d._new_process_group_helper
    parameters = inspect.signature(make_group)

    @functools.wraps(make_group)
    def make_group_of_backend(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        given = call.arguments
        if given["group_size"] < 0:  # of "mpi", for which torch makes no store
            given["store"], given["group_rank"], given["group_size"] = next(c10d.rendezvous("env://"))
        given.update(backend=c10d.Backend(name), backend_options=None, device_id=None)
        return make_group(*call.args, **call.kwargs)

    c10d._new_process_group_helper = make_group_of_backend
    if name == NAME:
        _allow_monitored_barrier(c10d)


def _allow_monitored_barrier(c10d: Any) -> None:
    """Let `dist.monitored_barrier` ask the group: torch refuses all backends but gloo, which a script has named."""

    @functools.wraps(c10d.monitored_barrier)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        if c10d._rank_not_in_group(group):
            c10d._warn_not_in_group("monitored_barrier")
            return
        if isinstance(timeout, float):
            timeout = timedelta(seconds=timeout)
        called = c10d._get_default_group() if group is None else group
        called.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    c10d.monitored_barrier = monitored_barrier
    import_module("torch.distributed").monitored_barrier = monitored_barrier  # type: ignore[attr-defined]
