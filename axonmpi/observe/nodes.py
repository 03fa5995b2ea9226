"""What the nodes of a job tell each other in a folder that they share: copies of their ranks' pages.

FOLDER/3fa2c1d0-n2/        of node n2
    3fa2c1d0-4             the page of rank 4, as it was
    standings.json         what became of the processes: {"4": "lives"}, and which ranks went on
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from ..utils.own_files import is_own_folder, open_own
from .board import Condition, RankPage
from .judgement import Standing

_STANDINGS = "standings.json"


def tell_others(folder: Path, standings: Mapping[int, Standing], going_on: Collection[int]) -> None:
    """Write what this node knows of its ranks; local.

    Args:
        folder: That the nodes share; it is made if it is not there.
        standings: Of this node's ranks, by rank.
        going_on: Those that have begun operations since the look before.

    Raises:
        OSError: It cannot be written.
    """
    first = next(iter(standings.values())).page
    own = folder / f"{first.job}-{first.host}"
    draft = own.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    draft.mkdir(mode=0o700)
    for standing in standings.values():
        shutil.copyfile(standing.page.path, draft / standing.page.path.name)
    told = {rank: standing.condition.value for rank, standing in standings.items()}
    (draft / _STANDINGS).write_text(json.dumps({"conditions": told, "going_on": sorted(going_on)}))
    shutil.rmtree(own, ignore_errors=True)
    draft.rename(own)


def read_others(folder: Path, own: RankPage) -> tuple[dict[int, Standing], set[int]]:
    """Read what other nodes have written of a job; local.

    Args:
        folder: That the nodes share.
        own: The page of a rank of this node.

    Returns:
        Where their ranks were, by rank, and those that went on.
    """
    standings: dict[int, Standing] = {}
    going_on: set[int] = set()
    for node in folder.glob(f"{own.job}-*"):
        is_told = node.suffix != ".draft" and node.name != f"{own.job}-{own.host}"
        if not is_told or not is_own_folder(node):  # other users may write to the folder
            continue
        with open(open_own(node / _STANDINGS), encoding="utf-8") as file:
            told = json.load(file)
        going_on |= set(told["going_on"])
        for path in node.glob(f"{own.job}-*"):
            page = RankPage(path)
            condition = Condition(told["conditions"][str(page.rank)])
            standings[page.rank] = Standing(page, condition, page.phase, page.latest, page.current())
    return standings, going_on
