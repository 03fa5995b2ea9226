"""Distributed PyTorch training where MPI starts the ranks.

    import axonmpi as ax

    ax.init_process_group()                         # under mpirun or srun; alone it is a world of one rank
    model = ax.DistributedDataParallel(model)       # gradients are averaged while backward runs

`comm` has the collectives; `ddp`, `fsdp`, `tensor` and `pipeline` distribute a model, and `mesh` combines them;
`checkpoint` saves and loads at any number of ranks. docs/architecture.md lists the packages in the order in which
they may import each other.

Importing this package starts nothing: no MPI, no CUDA, no thread. `__init__.pyi` lists the public names, also for
editors and type checkers; the file of a name is imported when the name is first used.
"""

from __future__ import annotations

import ast
import pkgutil
from importlib import import_module
from typing import Any

from .interop import autoload

__version__ = "0.1.0"


def _read_names() -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return the module of each name in `__init__.pyi` and its name there, "" for a module, and `__all__`."""
    stub = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
    origins, public = {}, []
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                origin = (node.module, alias.name) if node.module else (alias.name, "")
                origins[alias.asname or alias.name] = origin
        elif isinstance(node, ast.Assign):
            public = ast.literal_eval(node.value)
    return origins, public


_ORIGINS, __all__ = _read_names()


def __getattr__(name: str) -> Any:
    if name not in _ORIGINS:
        raise AttributeError(f"module 'axonmpi' has no attribute {name!r}")
    module, name_there = _ORIGINS[name]
    found: Any = import_module(f".{module}", __name__)
    globals()[name] = value = getattr(found, name_there) if name_there else found
    return value


def __dir__() -> list[str]:
    return sorted({"__version__", *_ORIGINS})


autoload.load()  # does nothing if torch has called it as an entry point
