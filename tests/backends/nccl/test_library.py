"""Where NCCL is found, and what is said where it is not."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.placements import WITH_NCCL

import axonmpi
from axonmpi import NcclBackend, NcclUniqueId

SHOW = "import axonmpi as ax; print(ax.NcclBackend.nccl_version(), ax.NcclBackend.generate_unique_id())"
HIDDEN = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in {names}: raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def run(code: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **variables})


def packaged_library() -> Path:
    (folder,) = importlib.util.find_spec("nvidia.nccl").submodule_search_locations
    return Path(folder) / "lib" / "libnccl.so.2"


@WITH_NCCL
def test_version_and_id_without_a_gpu() -> None:
    assert NcclBackend.nccl_version() >= (2, 27, 0)
    assert NcclBackend.generate_unique_id() != NcclBackend.generate_unique_id()


def test_without_nccl4py_the_error_says_what_to_install() -> None:
    done = run(HIDDEN.format(names=("nccl",)) + SHOW)
    assert "NcclError: nccl4py, through which NCCL is called, cannot be imported" in done.stderr
    assert "pip install 'axonmpi[nccl]'" in done.stderr


@WITH_NCCL
def test_a_library_on_the_path_alone_is_found_and_none_is_an_error(tmp_path) -> None:
    """Python sees all that is installed but the packages of NVIDIA's libraries."""
    (tmp_path / "other").mkdir()
    shutil.copy(packaged_library(), tmp_path / "other")
    (tmp_path / "installed").mkdir()
    for entry in packaged_library().parents[3].iterdir():
        if entry.name != "nvidia":
            (tmp_path / "installed" / entry.name).symlink_to(entry)
    path = os.pathsep.join([str(Path(axonmpi.__file__).parents[1]), str(tmp_path / "installed")])
    found = run(SHOW, "-S", PYTHONPATH=path, LD_LIBRARY_PATH=str(tmp_path / "other"))
    assert found.returncode == 0, found.stderr
    missing = run(SHOW, "-S", PYTHONPATH=path)
    assert "NcclError: libnccl.so.2 is in no package, not on LD_LIBRARY_PATH" in missing.stderr


@WITH_NCCL
def test_the_library_that_is_loaded_already_is_used_and_two_are_refused(tmp_path) -> None:
    other = shutil.copy(packaged_library(), tmp_path)
    load = f"import ctypes; ctypes.CDLL({str(other)!r})\n"
    where = "from axonmpi.backends.nccl.library import load; print(load().core.get_version().libnccl.path)"
    assert run(load + where).stdout.strip() == str(other)
    second = f"\nctypes.CDLL({str(packaged_library())!r})\n"
    refused = run(load + second + SHOW)
    assert "NcclError: this process has loaded two libraries of NCCL" in refused.stderr
    assert str(other) in refused.stderr


def test_ids_are_128_bytes() -> None:
    content = bytes(range(128))
    assert bytes(NcclUniqueId.from_bytes(content)) == content
    assert NcclUniqueId(content) == NcclUniqueId(bytearray(content))
    with pytest.raises(ValueError, match="expected 128 bytes, got 5"):
        NcclUniqueId(b"short")
    with pytest.raises(TypeError, match="expected bytes, got str"):
        NcclUniqueId("text")
