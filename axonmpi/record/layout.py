"""Layout of a rank's record: a header, a table of groups, and a ring of operations.

    header      the rank's identity, its phase, the number of its latest operation
    groups      256 entries: the group's key, the number of collectives that the rank has called in it
    operations  2,048 entries: the latest operations, and all that are unfinished

An operation's entry begins and ends with the operation's number, which is written first and last: a reader skips an
entry with two different numbers. Unfinished operations show where the rank is. All ranks of a group know it by the
same key, and a collective completes only once all of them have called as many collectives.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np


class Phase(IntEnum):
    """Phase of a rank's program, set by the parts of the library that know it."""

    OTHER = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    CHECKPOINT = 5
    ENDING = 6


class Header(IntEnum):
    """Words of the header, 8 bytes each.

    VERSION: version of the layout.
    IDENTITY_BYTES: length of the JSON text that identifies the rank; 0 while the record is being made.
    PHASE: phase of the program.
    LATEST: number of the latest operation.
    STACKS_BY: signal at which the rank writes its stacks to a file; 0 for none.
    LOOKED: number of checks that the rank's watchdog has made.
    THREAD: thread by which the rank is judged: the main thread, or after its end a thread that Python waits for.
    """

    VERSION = 0
    IDENTITY_BYTES = 1
    PHASE = 2
    LATEST = 3
    STACKS_BY = 4
    LOOKED = 5
    THREAD = 6


VERSION = 3
IDENTITY_AT = 512
GROUPS_AT = 4096
GROUPS, GROUP_BYTES = 256, 64
GROUP_ENTRY = np.dtype(
    [(name, "i8") for name in ("key", "count", "rank", "size", "first", "step", "gives_up", "closed")]
)
"""Fields of `reader.Group`. The entry of a closed group is reused."""
CLOSED = 7
"""Index of the field `closed`."""

OPERATIONS_AT = GROUPS_AT + GROUPS * GROUP_BYTES
OPERATIONS, OPERATION_BYTES = 2048, 160
RECORD_BYTES = OPERATIONS_AT + OPERATIONS * OPERATION_BYTES
SHAPE_SHOWN = 4
"""Number of sizes of a shape that an entry has."""
OPERATION = struct.Struct("=8q88sq")
"""Number, left (-1: unfinished), entered, started, thread, group, collective, failed; description; number."""
DESCRIPTION = struct.Struct("=20s12sbB2xii4xq4q")
"""Name, dtype, reduction, dimensions, peer, tag, bytes, shape."""
OPERATION_ENTRY = np.dtype(
    [
        ("number", "i8"), ("left", "i8"), ("entered", "i8"), ("started", "i8"), ("thread", "i8"), ("group", "i8"),
        ("call", "i8"), ("failed", "i8"), ("name", "S20"), ("dtype", "S12"), ("op", "i1"), ("dims", "u1"),
        ("_", "V2"), ("peer", "i4"), ("tag", "i4"), ("__", "V4"), ("nbytes", "i8"), ("shape", "i8", SHAPE_SHOWN),
        ("again", "i8"),
    ]
)  # fmt: skip
"""Fields of `OPERATION` and `DESCRIPTION`, to read many entries at once."""
assert (OPERATION_ENTRY.itemsize, GROUP_ENTRY.itemsize) == (OPERATION_BYTES, GROUP_BYTES)


def describe(
    name: str,
    dtype: str = "",
    shape: tuple[int, ...] = (),
    op: int | None = None,
    peer: int | None = None,
    tag: int = -1,
    nbytes: int = 0,
) -> bytes:
    """Return the description of an operation, made once for all calls of its kind; local.

    Args:
        name: Name of the operation.
        dtype: Name of the dtype, without `torch.`.
        shape: Shape of this rank's tensor; -1 for sizes that may differ between ranks.
        op: Number of the reduction.
        peer: Root, source or destination in the group, or the dimension of an operation that has one.
        tag: Tag of a message.
        nbytes: Bytes of this rank's tensor.
    """
    sizes = (*shape[:SHAPE_SHOWN], *(0,) * SHAPE_SHOWN)[:SHAPE_SHOWN]
    return DESCRIPTION.pack(
        name.encode(), dtype.encode(), -1 if op is None else op, min(len(shape), 255),
        -1 if peer is None else peer, tag, nbytes, *sizes,
    )  # fmt: skip
