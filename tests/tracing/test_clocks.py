"""Clocks of nodes, aligned from collectives and messages with delays that are drawn."""

import numpy as np
import pytest

from axonmpi.record.layout import OPERATION_ENTRY
from axonmpi.tracing.clocks import BACK, THERE, align
from axonmpi.tracing.rank_trace import RankTrace

SECOND = 1_000_000_000
BOOT = 5_000_000 * SECOND
"""Time since the machine's start, beside which the offset of another machine is large."""


def entries(names: object, started: np.ndarray, left: np.ndarray, **fields: object) -> np.ndarray:
    made = np.zeros(len(started), OPERATION_ENTRY)
    made["name"], made["started"], made["left"], made["group"] = names, started, left, 7
    for name, value in fields.items():
        made[name] = value
    return made


def traces_of(seconds: float, draw: np.random.Generator, shift: object) -> tuple[list[RankTrace], np.ndarray]:
    """Return two ranks on two nodes with a barrier each 50 ms and messages at both ends, and the true times."""
    count = int(seconds / 0.05)
    meet = BOOT + np.sort(draw.integers(0, int(seconds * SECOND), count))
    begun = meet + draw.integers(0, 2_000_000, (2, count))
    ended = begun.max(0) + draw.exponential(30_000, (2, count)).astype(np.int64) + 25_000
    sent = np.concatenate([np.arange(64) * 1_000_000 + BOOT + at for at in (-SECOND, int(seconds * SECOND))])
    there = sent + 20_000 + draw.exponential(10_000, len(sent)).astype(np.int64)
    back = there + 20_000 + draw.exponential(10_000, len(sent)).astype(np.int64)
    tags = np.arange(len(sent))
    own = [
        np.concatenate([entries(b"barrier", begun[0], ended[0], call=np.arange(count) + 1),
                        entries(THERE, sent, back, peer=1, tag=tags)]),
        np.concatenate([entries(b"barrier", begun[1], ended[1], call=np.arange(count) + 1),
                        entries(BACK, there, there + 9000, peer=0, tag=tags)]),
    ]  # fmt: skip
    true = own[1]["started"].copy()
    for name in ("started", "left"):
        own[1][name] = shift(own[1][name])
    groups = {7: (0, 2, 0, 1)}
    identities = [{"rank": rank, "node": rank, "thread": 0, "wall_clock": 0} for rank in range(2)]
    return [
        RankTrace(identity, each, each[:0], groups) for identity, each in zip(identities, own, strict=True)
    ], true


@pytest.mark.parametrize("seconds", [2.0, 600.0])
@pytest.mark.parametrize("changes", [False, True], ids=["even", "changing"])
def test_clocks_are_aligned_to_20_us(seed: int, seconds: float, changes: bool) -> None:
    draw = np.random.default_rng(seed)
    offset, drift = int(draw.integers(-(10**15), 10**15)), float(draw.uniform(-1e-4, 1e-4))

    def shift(times: np.ndarray) -> np.ndarray:
        since = (times - BOOT) / SECOND
        curve = 100.0 * since**2 / max(seconds, 100) if changes else 0.0  # ns: the drift grows by 0.2 us a second
        return times + offset + np.rint(drift * (times - BOOT) + curve).astype(np.int64)

    traces, true = traces_of(seconds, draw, shift)
    aligned, clocks = align(traces)
    assert np.abs(aligned[1].operations["started"] - true).max() < 20_000
    assert clocks[1].drift == pytest.approx(-drift, abs=1e-6)
    assert list(clocks) == [1]


def test_without_a_meeting_the_system_clocks_are_used() -> None:
    first, second = (
        RankTrace(
            {"rank": rank, "node": rank, "thread": 0, "wall_clock": wall},
            entries(b"send", np.array([BOOT]), np.array([BOOT + 5])),
            entries(b"", np.zeros(0), np.zeros(0)),
        )
        for rank, wall in enumerate((1000, 400))
    )
    aligned, clocks = align([first, second])
    assert aligned[1].operations["started"][0] == BOOT - 600
    assert clocks[1].error == float("inf")
