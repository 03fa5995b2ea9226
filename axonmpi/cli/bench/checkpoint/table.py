"""The figures as a table, each beside what it is compared with."""

from __future__ import annotations

from typing import Any

from ....utils.text import aligned
from .planning import FEW, MANY

_MIB = 1 << 20


def table(results: list[dict[str, Any]]) -> str:
    """Format the figures of several numbers of ranks."""
    return "\n\n".join(_of_ranks(result) for result in results)


def _of_ranks(result: dict[str, Any]) -> str:
    size = result["bytes"] / _MIB
    title = f"{result['ranks']} ranks on {result['cores']} cores, {size:.0f} MiB of parameters and AdamW's state"
    rows = [["", "s", "MiB/s", "axonmpi / this", "MiB more a rank"]]
    for what in ("save", "load"):
        own = result[what]["axonmpi"]
        for name, seconds in result[what].items():
            more = result["memory"].get(name) if what == "save" else None
            memory = "" if more is None else f"{more / _MIB:.0f}"
            rows.append(
                [f"{what}: {name}", f"{seconds:.2f}", f"{size / seconds:.0f}", f"{own / seconds:.2f}", memory]
            )
    lines = [f"{title}; {result['folder']}; medians", *aligned(rows, [0]), "", *_beside(result["asynchronous"])]
    return "\n".join([*lines, "", *_planning(result["planning"])])


def _beside(found: dict[str, float]) -> list[str]:
    copy = found["copy"]
    rows = [["saving beside training", "ms", "copies of the rank's part"]]
    rows += [[name, f"{seconds * 1e3:.0f}", f"{seconds / copy:.2f}"] for name, seconds in found.items()]
    return aligned(rows, [0])


def _planning(found: dict[str, dict[str, float]]) -> list[str]:
    rows = [["planning", f"ms, {FEW} ranks", f"{MANY}", "ratio"]]
    for turn, few in found[str(FEW)].items():
        many = found[str(MANY)][turn]
        rows.append([turn, f"{few * 1e3:.1f}", f"{many * 1e3:.1f}", f"{many / few:.2f}"])
    return aligned(rows, [0])
