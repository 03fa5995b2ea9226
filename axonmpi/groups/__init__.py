"""Groups of ranks, as `torch.distributed` has process groups, and the world of all ranks.

A `ProcessGroup` numbers some ranks from 0 and has every collective as a method; a `World` has the default group
and makes further groups. Read `world.py` first, then `process_group.py`. The package imports `backends`, which
moves the data, `launch`, which starts MPI, and `observe`, which watches the ranks.
"""
