"""The module that torch's entry points name: it runs `axonmpi/interop/autoload.py` in its own namespace.

It is installed beside the package, so that `import torch` does not import `axonmpi`.
"""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path

_package = find_spec("axonmpi")
if _package is not None and _package.origin is not None:
    _file = Path(_package.origin).parent / "interop" / "autoload.py"
    SourceFileLoader(__name__, str(_file)).exec_module(sys.modules[__name__])
else:  # an editable installation whose folder is gone: `import torch` goes on without it

    def load() -> None:
        """Register nothing."""

    register = load
