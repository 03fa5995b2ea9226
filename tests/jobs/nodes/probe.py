"""Stands for axonmpi's commands, and starts sooner: says how it was called, and on which nodes its ranks are."""

import json
import os
import sys

from mpi4py import MPI

nodes = MPI.COMM_WORLD.gather(os.uname().nodename)
if nodes:
    print(json.dumps({"arguments": sys.argv[1:], "nodes": nodes}), flush=True)
