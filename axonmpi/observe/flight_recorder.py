"""Files with the latest operations of each rank, in the format of torch's flight recorder for `torchfrtrace`.

    FOLDER/trace_rank_0     {"version", "pg_config": {group: ranks}, "entries": [{"collective_seq_id", ...}]}
    FOLDER/trace_rank_1     ...

torchfrtrace pairs the collectives of the ranks of a group by number. Messages of two ranks in one direction and
with one tag form a group. It knows NCCL's operations only, so this library's operations get names of NCCL's.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..record.reader import RECEIVES, SENDS, Group, Operation, RankRecord

VERSION = "2.10"
"""Version of the format, major and minor."""
FILE_NAME = "trace_rank_{}"
_NAMES = {
    "all_gather": "_all_gather_base",
    "all_gather_into": "_all_gather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "reduce_scatter_into": "_reduce_scatter_base",
    **dict.fromkeys(("scan", "exscan", "reverse_scan", "reverse_exscan"), "all_reduce"),
    "exchange_rows": "all_to_all",
    "split": "barrier",
    "partition": "barrier",
    "symmetric_empty": "barrier",
    "node_empty": "barrier",
}
"""Names that torchfrtrace knows, for operations with other names here; it has none for scans and exchanges."""

Members = Mapping[int, Mapping[int, int]]
"""World ranks of each group: by the group's key, then by the number in the group."""


def dump(records: Iterable[RankRecord], folder: Path) -> list[Path]:
    """Write the latest operations of ranks to a folder, one file for each rank; local.

    Args:
        records: Records of the ranks, which may have ended.
        folder: Folder for the files, made if necessary. Nodes may write to the same folder.

    Returns:
        The files.

    Raises:
        OSError: A file cannot be written.
    """
    ranks = list(records)
    members = _members(ranks)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for record in ranks:
        file = folder / FILE_NAME.format(record.rank)
        file.write_bytes(pickle.dumps(trace_of(record.operations(), record.groups, record.rank, members)))
        files.append(file)
    return files


def trace_of(
    operations: Sequence[Operation], groups: Sequence[Group], rank: int, members: Members
) -> dict[str, Any]:
    """Return the contents of one rank's file; local.

    Args:
        operations: Operations of the rank, oldest first.
        groups: Groups of the rank.
        rank: World rank.
        members: World ranks of all groups.
    """
    config: dict[str, dict[str, str]] = {}
    entries = []
    for operation in operations:
        group = operation.group
        if group is None or len(members.get(group.key, {})) < group.size or operation.name.startswith("wait"):
            continue
        if operation.call and operation.name not in ("stage send", "stage recv"):
            entries.append(_collective(operation, group))
            config[f"{group.key:x}"] = _config(str(group), members[group.key].values())
    if operations and operations[0].number == 1:  # the record has all operations of the rank
        entries += _messages(operations, members, config)
    entries.sort(key=lambda entry: int(entry["time_created_ns"]))
    # Torchfrtrace drops entries older than the first entry of any rank: all ranks count back from the same number.
    called = max(len(entries), sum(group.count for group in groups))
    for index, entry in enumerate(entries):
        entry["record_id"] = called - len(entries) + index
    return {"version": VERSION, "pg_config": config, "entries": entries, "rank": rank}


def _members(records: Sequence[RankRecord]) -> dict[int, dict[int, int]]:
    """Return the known members of groups: all of a group with even steps, else the ranks with a record."""
    members: dict[int, dict[int, int]] = defaultdict(dict)
    for record in records:
        for group in record.groups:
            members[group.key].update(enumerate(group.members or ()))
            members[group.key][group.rank] = record.rank
    return members


def _config(text: str, ranks: Iterable[int]) -> dict[str, str]:
    return {"name": text, "desc": text, "ranks": str(sorted(ranks))}


def _collective(operation: Operation, group: Group) -> dict[str, Any]:
    inputs, outputs = _sizes(operation, group.size)
    name = _NAMES.get(operation.name, operation.name)
    return _entry(operation, f"{group.key:x}", str(group), f"gloo:{name}", operation.call, inputs, outputs)


def _sizes(operation: Operation, ranks: int) -> tuple[list[int], list[int]]:
    """Return the shapes of input and output, with 0 for free sizes; flat and even if shards may be uneven."""
    shape = [max(0, size) for size in operation.shape]
    if operation.name.startswith("all_gather"):
        return shape, [ranks, *shape]
    if operation.name.startswith("reduce_scatter"):
        shard = -(-math.prod(shape) // ranks)
        return [shard * ranks], [shard]
    return shape, shape


def _messages(
    operations: Sequence[Operation], members: Members, config: dict[str, dict[str, str]]
) -> list[dict[str, Any]]:
    """Return entries for messages, numbered in each direction, so that both ranks have the same numbers."""
    entries = []
    numbers: dict[str, int] = defaultdict(int)
    for operation in operations:
        group, peer = operation.group, operation.peer
        if group is None or peer is None or operation.name not in SENDS + RECEIVES:
            continue
        of_group = members.get(group.key, {})
        if peer not in of_group or peer == group.rank:
            continue
        sends = operation.name in SENDS
        source, target = (group.rank, peer) if sends else (peer, group.rank)
        key = f"{group.key:x}:{source}:{target}:{operation.tag}"
        numbers[key] += 1
        ranks = sorted((of_group[source], of_group[target]))
        own, other = ranks.index(of_group[group.rank]), ranks.index(of_group[peer])
        text = f"messages from rank {of_group[source]} to rank {of_group[target]} with tag {operation.tag}"
        config[key] = _config(text, ranks)
        name = f"gloo:send {own}->{other}" if sends else f"gloo:recv {own}<-{other}"
        size = [operation.nbytes]
        entries.append(_entry(operation, key, text, name, numbers[key], size, size))
    return entries


def _entry(
    operation: Operation, group: str, text: str, name: str, number: int, inputs: list[int], outputs: list[int]
) -> dict[str, Any]:
    dtypes = [operation.dtype] if operation.dtype else []
    return {
        "process_group": (group, text),
        "pg_id": 0,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": operation.number,
        "is_p2p": False,
        "profiling_name": name,
        "input_sizes": [inputs],
        "output_sizes": [outputs],
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": "completed" if operation.left is not None else "started" if operation.started else "scheduled",
        "time_created_ns": operation.entered,
        "time_discovered_started_ns": operation.started or None,
        "time_discovered_completed_ns": operation.left,
        "retired": operation.left is not None,
        "timeout_ms": 0,
        "frames": [],
    }
