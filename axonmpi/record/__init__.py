"""The record that each rank keeps in /dev/shm: its phase, its groups, and its latest operations.

A rank writes its record with plain stores, and any process of the same user can read it, while the rank runs, hangs
or is gone. `axonmpi why`, `axonmpi top` and the watchdog (`axonmpi.observe`) read it. Start with `writer.py`, which
has the layout, then `files.py` and `reader.py`. The package imports `utils` and `types` alone.
"""

from .files import enter_phase, own_record, phase
from .writer import GroupLog, NoLog, Phase, describe

__all__ = ["GroupLog", "NoLog", "Phase", "describe", "enter_phase", "own_record", "phase"]
