"""The benchmarks of collectives: of many sizes on any ranks, and between nodes.

`cases.py` has a collective of one dtype and size, and the variants that carry it out. `comparison.py` measures it
beside a plain copy, `between_nodes.py` beside MPI's and gloo's on several nodes, `mpi_alone.py` in a job of MPI
without threads.
"""
