"""`axonmpi bench`: comparisons with torch, with MPI itself and with the ideal, each measured in one run.

    axonmpi bench collectives    collectives of many sizes: ours, MPI's own, gloo's, and a plain copy
    axonmpi bench network        collectives between nodes: ours, the MPI library's own, gloo's
    axonmpi bench ddp            step overhead of data parallelism, ours and torch's on gloo
    axonmpi bench fsdp           a step of fully sharded training, ours and torch's on gloo
    axonmpi bench pipeline       a step of a pipeline by each schedule, ours, torch's on gloo, and the ideal
    axonmpi bench tensor         two blocks sharded over the ranks, ours, torch's on gloo, and the ideal
    axonmpi bench domain         a step of a sample cut over the ranks: ours, one process, and the ideal
    axonmpi bench torch          torch.distributed on axonmpi's backend and on gloo
    axonmpi bench checkpoint     saving and loading a checkpoint: ours, plain writes, torch's on gloo
    axonmpi bench overhead       the time that Python adds to MPI's own all-reduce of 4 bytes

Started plainly, a benchmark runs itself under `mpirun` once for each number of ranks; under `mpirun` it measures
the ranks that it finds. Variants take turns in short blocks, so that a busy machine slows all of them alike.
Medians of the blocks are shown, and their ratios, which are steadier than times.

`command.py` has the command line, `harness/` the parts that all benchmarks share; `overhead.py` is the shortest of
the benchmarks and shows what one consists of: the variants, the columns of its table, and its options.
"""

from __future__ import annotations

from .command import main

__all__ = ["main"]
