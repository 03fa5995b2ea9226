"""Runs blocks of a page one after the other in this interpreter: `run_fences.py FILE` with {page, fences} as JSON.

A traceback shows the page and its line.
"""

import json
import sys
from pathlib import Path

given = json.loads(Path(sys.argv[1]).read_text())
namespace = {"__name__": "__main__"}
for line, code in given["fences"]:
    exec(compile("\n" * line + code, given["page"], "exec"), namespace)
