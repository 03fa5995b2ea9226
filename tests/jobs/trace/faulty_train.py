"""`axonmpi train` with a fault on one rank: faulty_train.py core|loader|stage [flags of axonmpi train]."""

import os
import subprocess
import sys
import time
from typing import Any

from axonmpi.cli import main
from axonmpi.launch.launcher_variables import detect_launchers
from axonmpi.train.batches import BatchPlan

fault, flags = sys.argv[1], sys.argv[2:]
rank = detect_launchers()[0].rank
spinner = None
if fault == "core":
    core = sorted(os.sched_getaffinity(0))[rank or 0]
    os.sched_setaffinity(0, {core})
    os.environ["AXONMPI_BIND"] = "none"
    if rank == 1:
        spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on this rank's core
if fault == "loader" and rank == 2:
    plain = BatchPlan.batches

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2)
        return plain(*args, **kwargs)

    BatchPlan.batches = slow  # type: ignore[method-assign]
try:
    code = main(["train", *flags])
finally:
    if spinner is not None:
        spinner.kill()
        spinner.wait()
sys.exit(code)
