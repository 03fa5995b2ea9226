"""Where NCCL is found, and the errors where it is not."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.limits import limit
from helpers.placements import WITH_NCCL

import axonmpi
from axonmpi import NcclBackend, NcclError, NcclUniqueId
from axonmpi.backends.nccl import library

FIND = """
import ctypes, os, sys
from axonmpi.backends.nccl.library import load
if os.fork() == 0:
    ctypes.CDLL(sys.argv[1])
    print("loaded already:", load().core.get_version().libnccl.path, flush=True)
    os._exit(0)
os.wait()
print("on the path:", load().core.get_version().libnccl.path)
ctypes.CDLL(sys.argv[1])
load.cache_clear()
load()
"""
"""Two processes that import once look for NCCL: one has loaded a copy of it before, the other does so later."""


@WITH_NCCL
def test_version_and_id_without_a_gpu() -> None:
    assert NcclBackend.nccl_version() >= (2, 27, 0)
    unique_id = NcclBackend.generate_unique_id()
    assert NcclUniqueId.from_bytes(bytes(unique_id)) == unique_id != NcclBackend.generate_unique_id()


@pytest.mark.parametrize(
    ("nccl", "message"),
    [
        (None, r"(?s)nccl4py, .*, cannot be imported.*pip install 'axonmpi\[nccl\]'"),
        (SimpleNamespace(libnccl=None), r"libnccl\.so\.2 is in no package, not on LD_LIBRARY_PATH"),
    ],
)
def test_a_missing_package_is_an_error_that_says_what_to_install(monkeypatch, nccl, message: str) -> None:
    binding = nccl and Mock(**{"core.get_version.return_value": nccl})
    for name in ("nccl", "nccl.bindings", "nccl.bindings.nccl"):
        monkeypatch.setitem(sys.modules, name, binding)
    with pytest.raises(NcclError, match=message):
        library.load.__wrapped__()


@WITH_NCCL
def test_a_library_that_is_loaded_or_on_the_path_is_found_and_two_are_refused(tmp_path: Path) -> None:
    """Python sees all that is installed but the packages of NVIDIA's libraries."""
    (folder,) = importlib.util.find_spec("nvidia.nccl").submodule_search_locations
    packaged = Path(folder, "lib", "libnccl.so.2")
    for name in ("loaded", "on_path", "installed"):
        (tmp_path / name).mkdir()
    loaded, on_path = (Path(shutil.copy(packaged, tmp_path / name)) for name in ("loaded", "on_path"))
    for entry in packaged.parents[3].iterdir():
        if entry.name != "nvidia":
            (tmp_path / "installed" / entry.name).symlink_to(entry)
    search = [str(Path(axonmpi.__file__).parents[1]), str(tmp_path / "installed")]
    places = {"PYTHONPATH": os.pathsep.join(search), "LD_LIBRARY_PATH": str(on_path.parent)}
    command = [sys.executable, "-S", "-c", FIND, str(loaded)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **places}, timeout=limit(60))
    assert ended.stdout.splitlines() == [f"loaded already: {loaded}", f"on the path: {on_path}"], ended.stderr
    assert "NcclError: this process has loaded two libraries of NCCL" in ended.stderr
    assert f"{loaded} and {on_path}" in ended.stderr


def test_ids_are_128_bytes() -> None:
    content = bytes(range(128))
    assert bytes(NcclUniqueId.from_bytes(content)) == content
    assert NcclUniqueId(content) == NcclUniqueId(bytearray(content))
    with pytest.raises(ValueError, match="expected 128 bytes, got 5"):
        NcclUniqueId(b"short")
    with pytest.raises(TypeError, match="expected bytes, got str"):
        NcclUniqueId("text")
