"""Observation of the exit code that a program chooses, before its process ends; `exit.py` acts on it.

A rank that ends with an error ends the whole job; one that ends well waits for the others. So a rank must know its
exit code before the process ends, and Python has no interface for that: programs and libraries raise SystemExit and
catch it again, `sys.excepthook` and `atexit` do not get it.

But the interpreter, at its very end, reads the exception's attribute `code` while no Python function runs. All
other reads come from a Python function. So the attribute becomes a property that looks for its caller; otherwise
SystemExit is unchanged.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from .launcher_variables import launched_ranks


def observe_exit_code(observer: Callable[[object], object]) -> None:
    """Call `observer(code)` when the interpreter ends because of a SystemExit; local.

    Args:
        observer: Function of the exception's argument; returns the argument for the interpreter to use.
    """
    member = SystemExit.__dict__["code"]

    def read(error: SystemExit) -> object:
        code: object = member.__get__(error)
        try:
            sys._getframe(1)
        except ValueError:
            return observer(code)
        return code

    attributes = gc.get_referents(SystemExit.__dict__)[0]  # a built-in class refuses setattr
    attributes["code"] = property(read, member.__set__, member.__delete__, member.__doc__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    if sys.version_info < (3, 12):
        sys.exit = _exit


def _exit(status: Any = None, /) -> NoReturn:
    """Replace `sys.exit`, which before Python 3.12 makes no exception object, so that no `code` is read."""
    raise SystemExit(status)


if sys.version_info < (3, 12) and launched_ranks() > 1:
    sys.exit = _exit  # now: `sys.exit(main())` looks it up before `main` starts MPI
