"""Programs of tests without torch's compiler: `import helpers.no_compiler` before the first step of an optimizer.

Optimizers import `torch._dynamo` to tell a compiler that may be at work where to break its graph. In each process
that takes longer than to import torch. Here it stays away until a program asks for more of it.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


class _Compiler(ModuleType):
    """Stands for `torch._dynamo` where nothing is compiled, and loads it for anything but what optimizers call."""

    @staticmethod
    def graph_break() -> None:
        """Do nothing: there is no graph."""

    @staticmethod
    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        """Return the function, which nobody compiles."""
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # as `inspect` asks of every module
            raise AttributeError(name)
        if sys.modules[_NAME] is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


if _NAME not in sys.modules:
    sys.modules[_NAME] = _Compiler(_NAME)
