"""Merged outcomes: one report from the outcomes of a test on several ranks.

    rank 0: passed                       failed
    rank 1: failed, assert 1 == 0   ->   ranks 1, 3: assert 1 == 0
    rank 2: failed, boom                 rank 2: boom
    rank 3: failed, assert 1 == 0        and the output of each

A test fails if it fails on any rank, and passes if it passes on some and is skipped on the others. A test that is
expected to fail does so if any rank fails as expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter

from ...utils.text import name_ranks
from ..merged_texts import group_by_text

FAILED, XFAILED, XPASSED_STRICT, XPASSED = "failed", "xfailed", "xpassed strictly", "xpassed"
PASSED, SKIPPED = "passed", "skipped"
_REPORTED: dict[str, Literal["failed", "skipped", "passed"]] = {
    FAILED: "failed",
    XFAILED: "skipped",
    XPASSED_STRICT: "failed",
    XPASSED: "passed",
    PASSED: "passed",
    SKIPPED: "skipped",
}
"""pytest's outcome for each kind; where ranks differ, the first kind decides."""
_STRICT = "[XPASS(strict)]"


@dataclass(frozen=True)
class RankOutcome:
    """The outcome of one phase of a test on one rank.

    Attributes:
        kind: One of `_REPORTED`.
        headline: One line with the failure, or the reason of a skip or an expected failure.
        key: Failures with the same key are the same failure.
        text: The failure in full.
        sections: Names and texts of captured output.
    """

    kind: str
    headline: str = ""
    key: str = ""
    text: str = ""
    sections: tuple[tuple[str, str], ...] = ()

    def with_output(self) -> str:
        """Return the failure in full, with the captured output."""
        return "\n".join([self.text, *(f"---- {title} ----\n{text}" for title, text in self.sections)])


@dataclass(frozen=True)
class Verdict:
    """The outcome of one phase of a test, for all ranks together.

    Attributes:
        kind: One of `_REPORTED`.
        outcomes: The outcomes of the test's ranks.
    """

    kind: str
    outcomes: Mapping[int, RankOutcome]

    @property
    def decisive(self) -> dict[int, RankOutcome]:
        """The outcomes of the verdict's own kind."""
        return {rank: outcome for rank, outcome in self.outcomes.items() if outcome.kind == self.kind}


class MergedFailure(TerminalRepr):
    """pytest's representation of a failed test: each different failure once, with its ranks.

    Args:
        outcomes: The failures, by rank.
        pictures: pytest's own coloured representations, by rank, printed in place of the outcome's text.
    """

    def __init__(self, outcomes: Mapping[int, RankOutcome], pictures: Mapping[int, Any]) -> None:
        keys = {rank: outcome.key for rank, outcome in outcomes.items()}
        self._parts = [
            (f"{name_ranks(ranks)}: {outcomes[ranks[0]].headline}", _picture(ranks, outcomes, pictures))
            for ranks, _ in group_by_text(keys)
        ]
        # pytest takes the line of its short summary from here.
        crash = getattr(next(iter(pictures.values()), None), "reprcrash", None)
        self.reprcrash = ReprFileLocation(
            getattr(crash, "path", ""), getattr(crash, "lineno", 0), "; ".join(line for line, _ in self._parts)
        )

    def toterminal(self, tw: TerminalWriter) -> None:
        """Print the headlines, then each failure in full."""
        for headline, _ in self._parts:
            tw.line(headline, red=True, bold=True)
        for headline, picture in self._parts:
            if len(self._parts) > 1:
                tw.line()
                tw.sep("- ", headline.partition(":")[0])
            if hasattr(picture, "toterminal"):
                picture.toterminal(tw)
            else:
                tw.line(str(picture))


def _picture(ranks: list[int], outcomes: Mapping[int, RankOutcome], pictures: Mapping[int, Any]) -> Any:
    return next((pictures[rank] for rank in ranks if rank in pictures), outcomes[ranks[0]].text)


def outcome_of(report: pytest.TestReport) -> RankOutcome:
    """Return the outcome in this rank's own report; local."""
    sections = tuple(report.sections)
    expected = getattr(report, "wasxfail", None)
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        kind = SKIPPED if expected is None else XFAILED
        return RankOutcome(kind, reason if expected is None else str(expected), sections=sections)
    if report.passed:
        return RankOutcome(PASSED if expected is None else XPASSED, str(expected or ""), sections=sections)
    if isinstance(report.longrepr, str) and report.longrepr.startswith(_STRICT):
        return RankOutcome(XPASSED_STRICT, report.longrepr, text=report.longrepr, sections=sections)
    return failure_of(report.longrepr, report.longreprtext, sections)


def failure_of(longrepr: Any, text: str, sections: Iterable[tuple[str, str]] = ()) -> RankOutcome:
    """Return the outcome of a failure, given pytest's representation of it; local."""
    crash = getattr(longrepr, "reprcrash", None)
    message = text if crash is None else str(crash.message)
    headline = next((line for line in message.splitlines() if line.strip()), "failed")
    # The lines after the first show the values involved, often the rank itself.
    key = text if crash is None else f"{crash.path}:{crash.lineno}: {headline}"
    return RankOutcome(FAILED, headline, key, text, tuple(sections))


def merge_outcomes(of_ranks: Mapping[int, RankOutcome | None]) -> Verdict:
    """Merge the outcomes by rank; None from ranks without the test; local."""
    outcomes = {rank: outcome for rank, outcome in of_ranks.items() if outcome is not None}
    kinds = {outcome.kind for outcome in outcomes.values()}
    return Verdict(next(kind for kind in _REPORTED if kind in kinds), outcomes)


def apply_verdict(report: pytest.TestReport, verdict: Verdict, rank: int) -> None:
    """Write the verdict of all ranks into this rank's report; local."""
    own = verdict.outcomes.get(rank)
    if own is not None and len(verdict.outcomes) == 1:
        return  # the report of the test's only rank is complete
    pictures = {rank: report.longrepr} if own is not None and own.kind == FAILED else {}
    decisive = verdict.decisive
    reason = _one_reason({number: outcome.headline for number, outcome in decisive.items()})
    if hasattr(report, "wasxfail"):
        del report.wasxfail
    report.outcome = _REPORTED[verdict.kind]
    if verdict.kind == FAILED:
        report.longrepr = MergedFailure(decisive, pictures)
    elif verdict.kind == XPASSED_STRICT:
        report.longrepr = next(iter(decisive.values())).text
    elif verdict.kind == SKIPPED:
        own_location = report.longrepr[:2] if isinstance(report.longrepr, tuple) else None
        report.longrepr = (*(own_location or (report.location[0], report.location[1] or 0)), reason)
    elif verdict.kind in (XFAILED, XPASSED):
        report.wasxfail = reason
    else:
        report.longrepr = None
    report.sections = _merge_sections(verdict.outcomes)


def _one_reason(reasons: Mapping[int, str]) -> str:
    """Join the ranks' reasons; the ranks are named only if reasons differ."""
    groups = group_by_text(reasons)
    if len(groups) == 1:
        return groups[0][1]
    return "; ".join(f"{name_ranks(ranks)}: {text}" for ranks, text in groups)


def _merge_sections(outcomes: Mapping[int, RankOutcome]) -> list[tuple[str, str]]:
    """Return all ranks' captured output, the same output once."""
    by_name: dict[str, dict[int, str]] = {}
    for rank, outcome in sorted(outcomes.items()):
        for name, text in outcome.sections:
            texts = by_name.setdefault(name, {})
            texts[rank] = texts.get(rank, "") + text
    return [
        (f"{name} ({name_ranks(ranks)})", text)
        for name, texts in by_name.items()
        for ranks, text in group_by_text(texts)
    ]
