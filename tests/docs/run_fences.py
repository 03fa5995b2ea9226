"""The program that runs examples of pages, one after the other, in this interpreter: `run_fences.py FILE`.

The file is JSON: a list of {page, folder, fences}; fences are pairs of a line and code. A traceback shows the page
and its line. Each page starts afresh, in its own folder.
"""

import gc
import json
import os
import random
import sys
from pathlib import Path

import torch

import axonmpi as ax

gc.freeze()  # optimizers load a compiler, and garbage would be looked for in all of torch at that
for given in json.loads(Path(sys.argv[1]).read_text()):
    os.chdir(given["folder"])
    torch.manual_seed(0)
    random.seed(0)
    namespace = {"__name__": "__main__"}
    for line, code in given["fences"]:
        exec(compile("\n" * line + code, given["page"], "exec"), namespace)
    namespace.clear()
    ax.destroy_process_group()
