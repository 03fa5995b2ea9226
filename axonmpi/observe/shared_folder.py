"""What the nodes of a job tell each other in a folder that they share: copies of their ranks' records.

FOLDER/3fa2c1d0-n2/        of node n2
    3fa2c1d0-4             the record of rank 4, as it was
    states.json         what became of the processes: {"4": "lives"}, and which ranks went on
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
    """Write what this node knows of its ranks; local.

    Args:
        folder: That the nodes share; it is made if it is not there.
        states: Of this node's ranks, by rank.
        going_on: Those that have begun operations since the look before.

    Raises:
        OSError: It cannot be written.
    """
    first = next(iter(states.values())).record
    own = folder / f"{first.job}-{first.host}"
    draft = own.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    draft.mkdir(mode=0o700)
    for state in states.values():
        shutil.copyfile(state.record.path, draft / state.record.path.name)
    told = {rank: state.condition.value for rank, state in states.items()}
    (draft / _STATES).write_text(json.dumps({"conditions": told, "going_on": sorted(going_on)}))
    shutil.rmtree(own, ignore_errors=True)
    draft.rename(own)


def read_states(folder: Path, own: RankRecord) -> tuple[dict[int, RankState], set[int]]:
    """Read what other nodes have written of a job; local.

    Args:
        folder: That the nodes share.
        own: The record of a rank of this node.

    Returns:
        Where their ranks were, by rank, and those that went on.
    """
    states: dict[int, RankState] = {}
    going_on: set[int] = set()
    for node in folder.glob(f"{own.job}-*"):
        is_told = node.suffix != ".draft" and node.name != f"{own.job}-{own.host}"
        if not is_told or not is_own_folder(node):  # other users may write to the folder
            continue
        with open(open_own(node / _STATES), encoding="utf-8") as file:
            told = json.load(file)
        going_on |= set(told["going_on"])
        for path in node.glob(f"{own.job}-*"):
            record = RankRecord(path)
            condition = Condition(told["conditions"][str(record.rank)])
            states[record.rank] = RankState(record, condition, record.phase, record.latest, record.current())
    return states, going_on
