"""Whether a checkpoint is whole, by the safetensors package, zlib and json alone."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

MEBIBYTE = 1 << 20


def check_whole(folder: Path) -> dict[str, Any]:
    """Check every block and every tensor; all values are the number of the step. Return the state."""
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    sums = load_file(folder / "checksums.safetensors")
    assert {"model.safetensors", "optimizer.safetensors"} <= sums.keys()
    for name, expected in sums.items():
        data = (folder / name).read_bytes()
        found = [zlib.crc32(data[at : at + MEBIBYTE]) for at in range(0, len(data), MEBIBYTE)]
        assert found == expected.tolist(), f"{folder / name} is damaged"
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: value for name, value in load_file(folder / "optimizer.safetensors").items() if "exp" in name}
    wrong = [name for name, value in tensors.items() if not bool((value == state["step"]).all())]
    assert not wrong, f"{folder}: {wrong} are not those of step {state['step']}"
    return state
