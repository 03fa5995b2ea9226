"""The collectives of CPUs: shared memory on each node, MPI between the nodes."""
