#!/usr/bin/env python3
"""Random changes of a checkpoint's files: each is an error that names the file, before anything is changed.

The exit code is 0 if that holds.
"""

import random
import tempfile
from collections import Counter
from pathlib import Path

from jobs.changes.changing import STATE, Changes
from jobs.job import command_parser, parse_with_seed

if __name__ == "__main__":
    numbers = {
        "--state": {"type": int, "default": 500, "help": "changes of state.json (default: 500)"},
        "--others": {"type": int, "default": 200, "help": "changes of other files (default: 200)"},
    }
    options = parse_with_seed(command_parser(__doc__, numbers))
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        changes = Changes(Path(folder), chance)
        others = [name for name in changes.names if name != STATE]
        names = [STATE] * options.state + [chance.choice(others) for _ in range(options.others)]
        for name in names:
            changes.check(name)
    for name, count in sorted(Counter(names).items()):
        print(f"{count:5} changes of {name}")
    print(f"{len(names)} changes: none was silent, each error named the file, nothing was changed")
