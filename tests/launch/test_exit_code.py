"""The exit code that a program is about to end with: seen when the interpreter reads it, and at no other time."""

import subprocess
import sys
from pathlib import Path

import pytest

import axonmpi

WATCHED = """
import sys, types
package = types.ModuleType("axonmpi")
package.__path__ = [sys.argv[1]]
sys.modules["axonmpi"] = package  # a part of it, without torch
from axonmpi.launch.exit_code import observe_exit_code

def observer(code):
    print("seen", repr(code))
    return 4 if code == "changed" else code

observe_exit_code(observer)
try:
    raise SystemExit(8)
except SystemExit as caught:  # read, but by the program
    assert (caught.code, caught.args) == (8, (8,))
    caught.code = 9
    assert caught.code == 9
"""
ENDS = {
    "sys.exit(3)": ("seen 3\n", 3),
    "raise SystemExit(3)": ("seen 3\n", 3),
    "raise SystemExit": ("seen None\n", 0),
    "sys.exit('changed')": ("seen 'changed'\n", 4),
    "import argparse; argparse.ArgumentParser().error('wrong')": ("seen 2\n", 2),
    "raise type('Own', (SystemExit,), {})(5)": ("seen 5\n", 5),
    "raise caught_again": ("", 1),
    "pass": ("", 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_code_is_seen_when_the_interpreter_ends(end) -> None:
    command = [sys.executable, "-c", WATCHED + end, str(Path(axonmpi.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ENDS[end], done.stderr
