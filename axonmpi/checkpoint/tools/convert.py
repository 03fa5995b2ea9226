"""`axonmpi checkpoint convert`: checkpoints to and from the formats of other programs; one function a format.

SOURCE                                    TARGET
checkpoint                                checkpoint: a folder
.safetensors, a folder of transformers    safetensors: one file with the model alone
.pt, .pth, .bin of torch.save             torch: one file
folder of PyTorch DCP                     dcp: a folder
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..files.folders import partial_of
from .checkpoint_data import (
    DCP_METADATA,
    FORMATS,
    TORCH_SUFFIXES,
    CheckpointData,
    Format,
    Progress,
    format_of,
    from_safetensors,
)
from .dcp import from_dcp, write_dcp
from .single_process_writer import write_folder, write_safetensors
from .torch_files import from_torch_file, write_torch_file


def open_checkpoint(path: Path, *, trust: bool = False, only_model: bool = False) -> CheckpointData:
    """Read a file or folder of any known format, without the values of tensors; local.

    Args:
        path: The file or folder.
        trust: Allow code in it to run, which reading folders of DCP does.
        only_model: Leave the optimizer's state in a dict of torch alone.

    Raises:
        CheckpointError: Its format is unknown, or it is not trusted or damaged.
    """
    with _errors_named(path, "read"):
        kind = format_of(path)
        if kind == "torch":
            return from_torch_file(path, only_model=only_model)
        if kind == "dcp":
            return from_dcp(path, trust=trust, only_model=only_model)
        return from_safetensors(path)


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Format | None = None,
    only_model: bool = False,
    optimizer: str | None = None,
    trust: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> CheckpointData:
    """Convert a checkpoint, or a file or folder of another program, to another format; local, for one process.

    At most 256 MiB, or one larger tensor, are in memory at once, except that torch writes its own formats from
    tensors in memory.

    Args:
        source: A checkpoint, a `.safetensors` file, a folder of `transformers`, a file of `torch.save`, a folder of
            DCP.
        target: The file or folder; it has this name when it is complete.
        to: `"checkpoint"`, `"safetensors"`, `"torch"` or `"dcp"`; None chooses by the name of the target.
        only_model: Convert the model's state dict alone.
        optimizer: Name of the optimizer's class, needed for a checkpoint from another program's.
        trust: Allow code in `source` to run, which reading folders of DCP does.
        overwrite: Replace an earlier target.
        progress: Called with the number of bytes that are done, and of all bytes.

    Returns:
        The content of the source, with a list of what was left out.

    Raises:
        ValueError: `to` is none of these.
        CheckpointError: The source cannot be read, or the target cannot be written.
    """
    of, into = (Path(os.path.abspath(os.fspath(path))) for path in (source, target))
    chosen: Format = _format_by_name(into) if to is None else to
    if chosen not in FORMATS:
        raise ValueError(f"to: expected one of {', '.join(map(repr, FORMATS))}, got {to!r}")
    if os.path.lexists(into) and not overwrite:
        raise CheckpointError(f"{into}: it is there already: choose another name, or replace it by --overwrite")
    data = open_checkpoint(of, trust=trust, only_model=only_model)
    if only_model:
        data.optimizer, data.optimizer_state, data.random, data.values = {}, None, {}, {}
    _list_left_out(data, chosen)
    if data.optimizer_state is not None and chosen == "checkpoint":
        _set_class(of, data.optimizer_state, optimizer)
    with _errors_named(into, "written"):
        _write(data, into, chosen, progress)
    return data


def _format_by_name(path: Path) -> Format:
    if path.suffix == ".safetensors":
        return "safetensors"
    return "torch" if path.suffix in TORCH_SUFFIXES else "checkpoint"


def _list_left_out(data: CheckpointData, to: Format) -> None:
    if to == "safetensors" and (data.optimizer_state is not None or data.values):
        data.left_out.append("everything but the model, since a file of safetensors has tensors alone")
    elif data.random and to != "checkpoint":
        data.left_out.append("the ranks' random states")


def _set_class(source: Path, state: dict[str, Any], given: str | None) -> None:
    state["class"] = given or state["class"]
    if state["class"] is None:
        raise CheckpointError(
            f"{source}: does not say of which class its optimizer is, which a checkpoint does: give the name, as "
            "--optimizer AdamW, or take the model alone by --only-model"
        )


def _write(data: CheckpointData, path: Path, to: Format, progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if to == "checkpoint":
        write_folder(data, path, progress)
        return
    if path.is_dir() and not (to == "dcp" and (path / DCP_METADATA).exists()):
        raise CheckpointError(f"{path}: it is another folder, so it is not replaced: choose another name")
    writers = {"safetensors": write_safetensors, "torch": write_torch_file, "dcp": write_dcp}
    partial = partial_of(path)
    if os.path.lexists(partial):
        raise CheckpointError(f"{partial}: it is in the way: move it away, or choose another name than {path.name}")
    try:
        writers[to](data, partial, progress)
        if path.is_dir():
            _remove(path)
        partial.rename(path)
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _errors_named(path: Path, action: str) -> Iterator[None]:
    """Raise any error as a CheckpointError that names the file: other programs' files can have anything in them."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: cannot be {action}: {error.strerror or error}") from error
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be {action}: {type(error).__name__}: {error}") from error
