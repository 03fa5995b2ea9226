"""Records of operations in the form that torch's own tools for flight recordings read."""

import re
from types import SimpleNamespace
from typing import Any

from helpers import REPOSITORY
from torch.distributed.flight_recorder.components.types import COLLECTIVES

from axonmpi.observe.flight_recorder import _NAMES, _entry


def test_an_operation_that_has_begun_is_an_entry_of_torchs_form():
    operation: Any = SimpleNamespace(dtype="float32", number=7, entered=100, started=200, left=None)
    entry = _entry(operation, "default", "all ranks", "gloo:all_reduce", 3, [4], [4])
    assert entry == {
        "process_group": ("default", "all ranks"),
        "pg_id": 0,
        "collective_seq_id": 3,
        "p2p_seq_id": 0,
        "op_id": 7,
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "input_dtypes": ["float32"],
        "output_dtypes": ["float32"],
        "state": "started",
        "time_created_ns": 100,
        "time_discovered_started_ns": 200,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 0,
        "frames": [],
    }


def test_torchfrtrace_knows_the_name_of_every_collective():
    """Of those that `Backend` makes calls of; the analyser refuses a trace with any other name."""
    contract = (REPOSITORY / "axonmpi" / "backends" / "contract.py").read_text()
    operations = {*re.findall(r'(?:_call|Call|_allocate)\("(\w+)"', contract)}
    operations |= {"scan", "exscan", "reverse_scan", "reverse_exscan"}
    assert {"all_reduce", "split", "node_empty"} < operations
    assert {name for name in operations if _NAMES.get(name, name) not in COLLECTIVES} == set()
