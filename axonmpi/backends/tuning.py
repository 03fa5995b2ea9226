"""Sizes and times by which the backends choose between ways to do the same: bytes and seconds.

Measured with `axonmpi bench collectives` and `axonmpi bench overhead` on 2 to 8 ranks of x86 processors with 1 MiB
of cache a core; of values that did equally well, the smallest is taken.
"""

from __future__ import annotations

_PAGE = 4096

# ---- how data is cut -------------------------------------------------------------------------------------------

REPLICATED_BYTES = 32 << 10
"""The most that the ranks of a node together have of a tensor that each of them reduces whole. From here on a slice
for each is quicker: it costs a second barrier and moves less."""
REPLICATED_ORDINARY_BYTES = 6 << 20
"""The same for ordinary tensors, times the number of ranks: slices cost two copies more, and each rank reads less
by that number."""
REPLICATED_PAIR_BYTES = 2 << 20
"""The same for each of two ranks, for which slices would move as much."""
CHUNK_BYTES = 1 << 20
"""How much of a rank's ordinary tensor goes through staging at a time: chunks of all ranks should fit into the
cache."""
REPEATED_CHUNK_BYTES = 768 << 10
"""Size of a chunk if a tensor has several. Chunks of 512 KiB or 1 MiB took up to a fifth longer, perhaps
since buffers at power-of-two distances compete for cache lines."""
SLICE_BYTES = 256 << 10
"""How much of its slice a rank reduces at a time: as much of all ranks should fit into its core's cache."""
PIECE_BYTES = 1 << 20
"""How much of a tensor is reduced at a time, at most; the initial value of `MpiBackend.piece_bytes`."""
MAX_MESSAGE_BYTES = 1 << 30
"""The most that goes into one MPI call, whose counts and offsets may be 32-bit integers."""
AGREEMENT_BYTES = 64 << 10
"""The most that travels between nodes with the agreement on a call."""
WHOLE_BYTES = 16 << 10
"""The most that a reduce-scatter reduces whole with it."""
NETWORK_BUFFERS = 4
"""Buffers of each rank for chunks that go between nodes: one is written, two are under way, one is read."""
NETWORK_CHUNK_BYTES = 2 << 20
"""Chunk size of a rank's tensor between nodes, if its node has several ranks."""
ALONE_CHUNK_BYTES = 32 << 20
"""How much of a tensor a rank that is alone on its node sends at a time."""
SLICED_FROM_BYTES = 4 << 20
"""From here on slices are exchanged between more than two nodes with MPICH, whose own all-reduce of 25 MiB on four
takes 1.6 times as long on a link of 1 Gbit/s, and as long without a limit."""
SLICED_FROM_BYTES_OPEN_MPI = 512 << 10
"""The same for each node with Open MPI, whose blocking all-reduce takes half of a core that computes. It sends all
slices of an exchange at once: small ones of many nodes meet in the switch, and some are lost."""
WIDE_ELEMENTS = 1 << 17
"""How many elements of 16 bits are converted at a time: their float32 values should stay in the cache."""


def replicated_bytes(ranks: int, *, symmetric: bool) -> int:
    """Return the size up to which every one of so many ranks on a node reduces all of a tensor; local."""
    if symmetric:
        return max(REPLICATED_BYTES // ranks // _PAGE * _PAGE, _PAGE)
    if ranks == 2:
        return REPLICATED_PAIR_BYTES
    return max(REPLICATED_ORDINARY_BYTES // ranks**2 // _PAGE * _PAGE, replicated_bytes(ranks, symmetric=True))


# ---- memory ----------------------------------------------------------------------------------------------------

FIRST_SEGMENT_BYTES = 64 << 20
"""Addresses for each rank in a group's first segment of symmetric memory; pages come with the tensors."""
KEPT_FREE_BYTES = 64 << 20
"""Memory of all ranks of a node together that free ranges of symmetric memory keep for the next tensors."""
STAGING_BYTES = 32 << 20
"""Staging of all ranks together if each uses many buffers: more than their caches hold."""
PROBE_BYTES = 256 << 10
"""How much is written to find out how long a line takes."""
SLOW_LINE_SECONDS = 4e-9
"""From here on writing a cache line that another rank has read tells of caches that are far apart. Cores that share
a cache take 2 ns, those that do not 8 and more."""
MAX_CALLS = 4096
"""Kinds of calls that a group keeps the fingerprints of."""
MAX_GATHERS = 8
"""Sizes of small gathers between nodes that a group keeps memory for."""
MAX_PLANS = 256
"""Kinds of calls that a group keeps preparations for."""
MAX_VIEWS = 1 << 14
"""Views of tensors that a group keeps in all."""
GATHERED_BYTES = 64 << 20
"""The most memory of a GPU that the tensors of all ranks take at a time in a scan, which NCCL does not have."""

# ---- waiting ---------------------------------------------------------------------------------------------------

BARRIER_SPINS = 20
"""Looks of a rank with a core of its own before it yields: a microsecond or two, in which others mostly come."""
BARRIER_YIELDS = 400
BARRIER_NAP_SECONDS = 5e-5
LONGEST_BARRIER_NAP_SECONDS = 1e-3
PROGRESS_CALLS_PER_NAP = 16
"""Calls into MPI before each nap of a waiting rank; one takes 0.2 to 0.35 µs."""
BARRIER_CHECK_SECONDS = 0.1
"""How often a rank that naps looks whether the process of the other still lives."""
COUNTER_YIELDS = 2000
COUNTER_YIELDS_OVERSUBSCRIBED = 50
COUNTER_SLEEP_SECONDS = 1e-3
"""The longest sleep, since a wake-up may be missed."""
POLL_SECONDS = 5e-4
"""Between two looks at a message that is waited for with a time-out."""
