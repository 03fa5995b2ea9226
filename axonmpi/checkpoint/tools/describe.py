"""Descriptions of files and folders of weights, without reading the values of tensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...utils.text import aligned, counted, printable
from ..files.values import decoded, encoded
from .checkpoint_data import CheckpointData
from .convert import open_checkpoint

_FORMATS = {
    "checkpoint": "a checkpoint of axonmpi",
    "safetensors": "safetensors of another program",
    "torch": "a file of torch.save",
    "dcp": "a folder of torch.distributed.checkpoint",
}
_MOST_LETTERS = 200


def describe_checkpoint(path: str | os.PathLike[str], *, trust: bool = False) -> dict[str, Any]:
    """Describe a checkpoint, or a file or folder of weights of `safetensors`, `transformers` or torch; local.

    Args:
        path: The file or folder.
        trust: Allow code in it to run, which reading folders of DCP does.

    Returns:
        JSON values: `format`, `step`, `epoch`, `layout`, `versions`, `extra`, `config`, `optimizer`, `files`,
        `tensors` and more; None or empty if they are unknown.

    Raises:
        CheckpointError: Its format is unknown, or it is not trusted or damaged.
    """
    data = open_checkpoint(Path(os.path.abspath(os.fspath(path))), trust=trust, only_model=True)
    values = data.values
    return {
        "path": os.fspath(path),
        "format": data.format,
        "step": values.get("step"),
        "epoch": values.get("epoch"),
        "layout": data.layout,
        "versions": data.versions,
        "extra": _as_json(values.get("extra")),
        "states": [name for name in ("scheduler", "scaler", "sampler") if values.get(name) is not None],
        "config": data.config,
        "optimizer": _optimizer(data.optimizer_state),
        "aliases": data.aliases,
        "others": data.left_out,
        "files": [{"name": name, "bytes": nbytes} for name, nbytes in data.files],
        "tensors": list(_tensors(data)),
    }


def _as_json(value: Any) -> Any:
    try:
        return encoded(value, "extra")
    except ValueError:  # of another program: shown as it is
        return repr(value)


def _optimizer(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    sizes = Counter(label for label, *_ in state["parameters"].values())
    groups = [{"parameters": sizes[label], "options": options} for label, options in state["groups"].items()]
    return {"class": state["class"], "groups": groups}


def _tensors(data: CheckpointData) -> Iterable[dict[str, Any]]:
    for kind, tensors in data.tensors.items():
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield {"kind": kind, "name": name, "dtype": dtype, "shape": list(tensor.shape), "bytes": tensor.nbytes}


# ---- words ------------------------------------------------------------------------------------------------------


def description_text(described: Mapping[str, Any], *, all_tensors: bool) -> str:
    """Return a description as text.

    Args:
        described: Result of `describe_checkpoint`.
        all_tensors: Add a line for each tensor.
    """
    described = _on_one_line(described)
    blocks = [[f"{described['path']}: {_FORMATS[described['format']]}", *_facts(described)]]
    blocks.append(
        aligned([["file", "size"], *([file["name"], _size(file["bytes"])] for file in described["files"])], [0])
    )
    blocks.append(_summary(described["tensors"]))
    if all_tensors and described["tensors"]:
        rows = [[each["kind"], each["name"], each["dtype"], str(each["shape"])] for each in described["tensors"]]
        blocks.append(aligned([["in", "tensor", "dtype", "shape"], *rows], [0, 1, 2, 3]))
    return "\n\n".join("\n".join(block) for block in blocks)


def _on_one_line(value: Any) -> Any:
    """Return values with line ends and control characters in texts escaped, since any file may have them."""
    if isinstance(value, str):
        return printable(value.replace("\n", "\\n"))
    if isinstance(value, Mapping):
        return {_on_one_line(key): _on_one_line(item) for key, item in value.items()}
    return [_on_one_line(item) for item in value] if isinstance(value, list) else value


def _facts(described: Mapping[str, Any]) -> Iterable[str]:
    layout, optimizer, config = described["layout"], described["optimizer"], described["config"]
    if described["step"] is not None:
        yield f"step {described['step']}, epoch {described['epoch'] or 0}"
    if layout:
        model = f", model {layout['model']}" if layout.get("model") else ""
        yield f"saved by {counted(layout['ranks'], 'rank')} on {counted(layout['nodes'], 'node')}{model}"
    if described["versions"]:
        yield "versions: " + ", ".join(f"{name} {version}" for name, version in described["versions"].items())
    if config is not None:
        yield f"config: {config.get('model_type') or 'of a model'}, {counted(len(config), 'entry', 'entries')}"
    if optimizer is not None:
        yield f"optimizer: {optimizer['class']}, {', '.join(map(_group, optimizer['groups'])) or 'no parameters'}"
    if described["states"]:
        yield f"states of: {', '.join(described['states'])}"
    if described["extra"] is not None:
        yield f"extra: {_short(repr(decoded(described['extra'])))}"
    if described["aliases"]:
        yield "tied: " + _short(", ".join(f"{name} = {of}" for name, of in described["aliases"].items()))
    if described["others"]:
        yield f"also there: {_short(', '.join(described['others']))}"


def _group(group: Mapping[str, Any]) -> str:
    rate = decoded(group["options"].get("lr"))
    shown = f" at lr {float(rate):g}" if rate is not None else ""
    return f"{counted(group['parameters'], 'parameter')}{shown}"


def _summary(tensors: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = []
    of_kind: dict[str, list[Mapping[str, Any]]] = {}
    for each in tensors:
        of_kind.setdefault(each["kind"], []).append(each)
    for kind, each_of in of_kind.items():
        dtypes = Counter(each["dtype"] for each in each_of)
        shown = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
        rows.append([kind, str(len(each_of)), _size(sum(each["bytes"] for each in each_of)), shown])
    return aligned([["in", "tensors", "size", "dtypes"], *rows], [0, 3])


def _short(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} ..."


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
