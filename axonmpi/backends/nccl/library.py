"""Finding NCCL: nccl4py, NVIDIA's binding, and the libnccl that it loads.

Both are loaded when they are first needed. nccl4py takes the libnccl that is loaded already, which is torch's if
torch has one, else that of the package `nvidia-nccl-cu13` or `-cu12`, else one on `LD_LIBRARY_PATH`.

Source: nccl4py 0.6, `nccl.core`; https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...errors import NcclError

UNIQUE_ID_BYTES = 128
"""NCCL_UNIQUE_ID_BYTES of nccl.h."""

_MENDS = {
    "unhandled cuda error": "check that the GPUs are free and visible: nvidia-smi, CUDA_VISIBLE_DEVICES",
    "unhandled system error": "check that the nodes reach each other; NCCL_SOCKET_IFNAME names the network device",
    "internal error": "another rank may have ended; run with NCCL_DEBUG=INFO to see more",
    "invalid argument": "the ranks may have made different calls; AXONMPI_DEBUG=1 compares them",
    "invalid usage": "the ranks may have made different calls, or two use one GPU; AXONMPI_DEBUG=1 compares calls",
    "remote process exited": "another rank has ended, or the network between nodes failed: look at its output",
}


class NcclUniqueId:
    """The unique id of a communicator's ranks; made by `NcclBackend.generate_unique_id`.

    Args:
        content: 128 bytes, as `bytes(unique_id)` gives them.

    Raises:
        TypeError: They are no bytes.
        ValueError: They are not 128.
    """

    __slots__ = ("_content",)

    def __init__(self, content: bytes | bytearray | memoryview) -> None:
        if not isinstance(content, bytes | bytearray | memoryview):
            raise TypeError(f"unique id: expected bytes, got {type(content).__name__}; use bytes(unique_id)")
        if len(content) != UNIQUE_ID_BYTES:
            raise ValueError(f"unique id: expected {UNIQUE_ID_BYTES} bytes, got {len(content)}")
        self._content = bytes(content)

    @classmethod
    def from_bytes(cls, content: bytes | bytearray | memoryview) -> NcclUniqueId:
        """Make the id of which these are the bytes; local."""
        return cls(content)

    def __bytes__(self) -> bytes:
        return self._content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NcclUniqueId) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    def __repr__(self) -> str:
        return f"NcclUniqueId({self._content[:8].hex()}...)"


@dataclass(frozen=True)
class Library:
    """NCCL as it was found.

    Attributes:
        core: nccl4py's module `nccl.core`.
        failures: The exceptions by which it reports an error.
    """

    core: Any
    failures: tuple[type[Exception], ...]


@cache
def load() -> Library:
    """Return NCCL, with a libnccl that fits torch; local, loads it the first time.

    Raises:
        NcclError: One of them is missing, or there are two, or the library is for another CUDA than torch's.
    """
    install = "12" if (torch.version.cuda or "13").startswith("12") else "13"
    extra = "nccl" if install == "13" else "nccl-cu12"
    if sys.platform != "linux":
        raise NcclError(f"NCCL exists for Linux only, and this is {sys.platform}; use init_process_group('mpi')")
    try:
        from nccl import core
        from nccl.bindings.nccl import NCCLError
    except ImportError as error:
        raise NcclError(
            f"nccl4py, through which NCCL is called, cannot be imported: {error}\n"
            f"Install it, with NCCL: pip install 'axonmpi[{extra}]'"
        ) from error
    try:
        found = core.get_version().libnccl
    except Exception as error:  # whatever a damaged library gives rise to
        raise NcclError(f"libnccl cannot be used: {error}") from error
    if found is None:
        raise NcclError(
            "libnccl.so.2 is in no package, not on LD_LIBRARY_PATH and not among the system's libraries\n"
            f"Install it: pip install nvidia-nccl-cu{install}, or set LD_LIBRARY_PATH to its folder"
        )
    _check_conflict(found, loaded_libraries())
    return Library(core, (NCCLError, core.NcclInvalid))


def loaded_libraries() -> list[str]:
    """Return the files named libnccl that this process has loaded; local."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    lines = maps.read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in lines if "/libnccl.so" in line}
    return sorted({str(Path(file).resolve()) for file in files})


def _check_conflict(found: Any, loaded: list[str]) -> None:
    if len(loaded) > 1:
        raise NcclError(
            f"this process has loaded two libraries of NCCL, which do not work together: {' and '.join(loaded)}\n"
            "Keep one of them: uninstall one of nvidia-nccl-cu12 and nvidia-nccl-cu13, or take one off "
            "LD_LIBRARY_PATH and LD_PRELOAD"
        )
    if found.cuda_variant is None or torch.version.cuda is None:
        return
    if int(torch.version.cuda.split(".")[0]) != found.cuda_variant.major:
        raise NcclError(
            f"NCCL {found} is for CUDA {found.cuda_variant.major}, and torch {torch.version.__version__} for CUDA "
            f"{torch.version.cuda}\nInstall the one for torch: pip install nvidia-nccl-cu{torch.version.cuda[:2]}"
        )


def nccl_version() -> tuple[int, int, int]:
    """Return the version of the libnccl that is used: major, minor, patch; local, needs no GPU.

    Raises:
        NcclError: NCCL cannot be loaded.
    """
    version = load().core.get_version().libnccl.version
    return version.major, version.minor, version.micro


def library_text() -> str:
    """Describe NCCL and its binding: versions, the CUDA that it is for, its path; local, needs no GPU.

    Raises:
        NcclError: NCCL cannot be loaded.
    """
    found = load().core.get_version()
    variant = "" if found.libnccl.cuda_variant is None else f" for CUDA {found.libnccl.cuda_variant}"
    return f"{found.libnccl.version}{variant} from {found.libnccl.path}, through nccl4py {found.nccl4py}"


def nccl_error(what: str, error: Exception, communicator: Any = None) -> NcclError:
    """Make the error with the failed operation, NCCL's own message and a likely remedy; local.

    Args:
        what: The operation and the rank.
        error: The exception of nccl4py.
        communicator: Asked for NCCL's own last error, if given.
    """
    lines = [f"{what}: {error}"]
    if communicator is not None and communicator.is_valid:
        last = str(communicator.get_last_error()).strip()
        if last and last not in lines[0]:
            lines.append(f"NCCL's last error: {last}")
    said = "\n".join(lines).lower()
    lines += [f"Likely mend: {mend}" for words, mend in _MENDS.items() if words in said][:1]
    return NcclError("\n".join(lines))
