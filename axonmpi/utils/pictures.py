"""The import of matplotlib for pictures, which writes nothing below the home directory."""

from __future__ import annotations

import os
import tempfile
from importlib import import_module


def import_matplotlib() -> None:
    """Import matplotlib, with its list of fonts and fontconfig's in a temporary folder; local.

    `MPLCONFIGDIR` and `XDG_CACHE_HOME` name folders that keep the lists from one process to the next.
    """
    with tempfile.TemporaryDirectory(prefix="axonmpi-") as folder:
        unset = {"MPLCONFIGDIR", "XDG_CACHE_HOME"} - os.environ.keys()
        os.environ.update(dict.fromkeys(unset, folder))
        try:
            import_module("matplotlib.font_manager")
        finally:
            for name in unset:
                os.environ.pop(name, None)
