"""The record of each rank: its phase, its groups and its latest operations, in a file in /dev/shm.

A rank writes its record with plain stores, and any process of the same user can read it, while the rank runs, hangs
or is gone. `axonmpi why`, `axonmpi top` and the watchdog (`axonmpi.observe`) do. Read `layout.py` first, then
`writer.py` and `reader.py`. A rank that is traced keeps all of its operations (`trace_file.py`), which
`axonmpi.tracing` reads. The package imports `utils` and `types` alone.
"""

from .files import enter_phase, own_record, phase, private_record, record_of_thread
from .layout import Phase, describe
from .writer import GroupLog, NoLog, OwnRecord

__all__ = [
    "GroupLog",
    "NoLog",
    "OwnRecord",
    "Phase",
    "describe",
    "enter_phase",
    "own_record",
    "phase",
    "private_record",
    "record_of_thread",
]
