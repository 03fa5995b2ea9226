"""The entry point that torch calls at the end of `import torch`: it registers "axonmpi" with `torch.distributed`.

The entry point names `axonmpi_autoload`, a module beside the package that runs this file. It imports neither
`axonmpi` nor mpi4py, and it never raises, since that would break `import torch`. All other files are imported when
a program asks for the backend.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

NAME = "axonmpi"
_BY_TORCH = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def load() -> None:
    """Register the backend when torch is imported; local, never raises."""
    with suppress(Exception):  # accelerate.py and lightning.py register once more, and raise the error
        register()


def register() -> None:
    """Register the backend and its rendezvous; local, does nothing the second time."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
        _serve_env()
        dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=["cpu"])


def _create_group(options: Any, backend_options: Any) -> Any:
    return import_module("axonmpi.interop.torch_backend").create_group(options, backend_options)


def _serve_env() -> None:
    """Serve "mpi://", and "env://" if the group is ours and the variables of "env://" are not all set."""
    # torch has no public way to replace a handler. This is not in torch_internals.py, since that would import all
    # of `axonmpi` at the end of every `import torch`.
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    by_torch = handlers["env"]

    def by_mpi(url: str, **options: Any) -> Any:
        return import_module("axonmpi.interop.rendezvous").meet(url, **options)

    def by_either(url: str, **options: Any) -> Any:
        has_address = all(os.environ.get(name) for name in _BY_TORCH)
        return by_mpi(url, **options) if _is_ours() and not has_address else by_torch(url, **options)

    handlers.update(env=by_either, mpi=by_mpi)


def _is_ours() -> bool:
    """Return True if `init_process_group`, which passes no backend to its handlers, was called for this one."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and NAME in str(frame.f_locals.get("backend")).lower()
