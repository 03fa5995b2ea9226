"""Records of operations in the form that torch's own tools for flight recordings read."""

from types import SimpleNamespace
from typing import Any

from axonmpi.observe.flight_recorder import _entry


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
