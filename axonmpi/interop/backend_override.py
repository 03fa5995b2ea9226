"""One backend for all groups of `torch.distributed`, whatever a program names: for `axonmpi run --backend`."""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from typing import Any

from .autoload import register


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
