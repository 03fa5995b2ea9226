"""A program for jobs in place of the trainer: says how it was called, and where its ranks are.

With `--fail` the last rank ends with code 5 while the others wait for it.
"""

import ctypes
import json
import os
import sys

import axonmpi as ax

# What a program has freed is not zero. MPICH over UCX sends such memory to srun, which does not read lines so long.
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
blocks = [libc.malloc(size) for size in range(4096, 16384, 8)]
for block, size in zip(blocks, range(4096, 16384, 8), strict=True):
    ctypes.memmove(block, os.urandom(size), size)
for block in blocks[::2]:
    libc.free(block)

world = ax.init_process_group()
if "--fail" in sys.argv and world.rank == world.size - 1:
    sys.exit(5)
gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
places = ax.all_gather_object((world.node_rank, world.local_rank, os.uname().nodename, gpus))
if world.rank == 0:
    print(json.dumps({"arguments": sys.argv[1:], "places": places}), flush=True)
ax.destroy_process_group()
