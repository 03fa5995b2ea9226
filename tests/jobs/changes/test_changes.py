"""Some random changes of the files of a checkpoint; `tests/jobs/run changes` makes more."""

import random
from pathlib import Path

from jobs.changes.changing import STATE, Changes


def test_a_changed_file_is_refused_by_name_before_anything_is_changed(seed: int, tmp_path: Path) -> None:
    changes = Changes(tmp_path, random.Random(seed))
    for name in (*changes.names, *[STATE] * 22):
        changes.check(name)
