#!/usr/bin/env python3
"""Accelerate's own scripts of tests, over MPI.

    tests/others/run accelerate [-n 2] [test_script ...]

They run in the ranks of the mpirun that belongs to this Python; 0 is the exit code if all of them pass.
"""

import argparse
import sys
from functools import partial

from helpers.tried import try_each

from axonmpi.testing import launch

SCRIPTS = ("test_script", "test_ops", "test_sync", "test_distributed_data_loop")
SECONDS = 280
START = """
import runpy, sys
from axonmpi.interop.accelerate import start_process_group
start_process_group()
name, left_out = sys.argv.pop(1), sys.argv.pop(1).split()
script = runpy.run_module("accelerate.test_utils.scripts." + name, run_name="script", alter_sys=True)
for test in left_out:
    script["main"].__globals__[test] = lambda *_: None
script["main"]()
"""
LEFT_OUT = {
    "test_distributed_data_loop": (
        "test_can_join_uneven_inputs",
        "test_join_can_override_even_batches",
        "test_join_can_override_for_mixed_type_dataloaders",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches",
    ),
}
"""Tests that Accelerate cannot pass on CPUs, whatever the backend: it joins uneven inputs on accelerators alone.
Without that the ranks call different things, and hang over gloo."""
FOR_TWO_RANKS = {
    "test_script": ("test_split_between_processes_tensor",),
}
"""Tests that need exactly two ranks: of two rows the third rank is expected to get one, and gets none."""
SCRIPTS_FOR_TWO_RANKS = ("test_distributed_data_loop",)
"""They say themselves that they expect two."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"some of {', '.join(SCRIPTS)}")
    options = parser.parse_args()
    programs = {}
    for name in options.scripts or SCRIPTS:
        if options.ranks != 2 and name in SCRIPTS_FOR_TWO_RANKS:
            print(f"left out         {name}: for 2 ranks")
            continue
        of_two = FOR_TWO_RANKS.get(name, ()) if options.ranks != 2 else ()
        left_out = " ".join((*LEFT_OUT.get(name, ()), *of_two))
        programs[name] = partial(launch, options.ranks, START, name, left_out, timeout=SECONDS)
    return try_each(programs)


if __name__ == "__main__":
    sys.exit(main())
