"""Data paths of collectives on the CPU: shared memory on each node, MPI between the nodes."""
