"""Start and end of a rank: MPI, the launcher's variables, nodes, cores, threads and exit codes.

Packages above call `start.start_world` and `exit`; users see both through `axonmpi.init_process_group` and the way
a failed job ends. Read `start.py` first, then `exit.py` and `check.py`. The package imports `utils`, `errors`,
`types` and `record`.
"""
