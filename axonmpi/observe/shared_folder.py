"""The folder in which nodes exchange the states of their ranks, for `axonmpi why --run-folder`.

FOLDER/3fa2c1d0-n2/        of node n2
    3fa2c1d0-4             copy of the record of rank 4
    states.json            states of the processes, {"4": "lives"}, and the ranks that have gone on
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from ..record.reader import Condition, RankRecord
from ..utils.own_files import is_own_folder, open_own
from .waits import RankState

_STATES = "states.json"


def write_states(folder: Path, states: Mapping[int, RankState], going_on: Collection[int]) -> None:
    """Write the states of this node's ranks; local.

    Args:
        folder: Folder that the nodes share, made if necessary.
        states: States of this node's ranks, by rank.
        going_on: Ranks that have begun operations since the look before.

    Raises:
        OSError: The folder cannot be written to.
    """
    first = next(iter(states.values())).record
    own = folder / f"{first.job}-{first.host}"
    draft = own.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    draft.mkdir(mode=0o700)
    for state in states.values():
        shutil.copyfile(state.record.path, draft / state.record.path.name)
    conditions = {rank: state.condition.value for rank, state in states.items()}
    (draft / _STATES).write_text(json.dumps({"conditions": conditions, "going_on": sorted(going_on)}))
    shutil.rmtree(own, ignore_errors=True)
    draft.rename(own)


def read_states(folder: Path, own: RankRecord) -> tuple[dict[int, RankState], set[int]]:
    """Read the states that other nodes of a job have written; local.

    Args:
        folder: Folder that the nodes share.
        own: Record of a rank of this node.

    Returns:
        States of the other nodes' ranks, by rank, and the ranks that have gone on.
    """
    states: dict[int, RankState] = {}
    going_on: set[int] = set()
    for node in folder.glob(f"{own.job}-*"):
        is_complete = node.suffix != ".draft" and node.name != f"{own.job}-{own.host}"
        if not is_complete or not is_own_folder(node):  # other users may write to the folder
            continue
        with open(open_own(node / _STATES), encoding="utf-8") as file:
            told = json.load(file)
        going_on |= set(told["going_on"])
        for path in node.glob(f"{own.job}-*"):
            record = RankRecord(path)
            states[record.rank] = RankState.of(record, Condition(told["conditions"][str(record.rank)]))
    return states, going_on
