"""How the outcomes of one test on several ranks become one report.

    rank 0: passed                       failed
    rank 1: failed, assert 1 == 0   ->   ranks 1, 3: assert 1 == 0
    rank 2: failed, boom                 rank 2: boom
    rank 3: failed, assert 1 == 0        and what each of them printed

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
"""What pytest calls each kind, first the kind that decides where ranks differ."""
_STRICT = "[XPASS(strict)]"


@dataclass(frozen=True)
class RankOutcome:
    """How one phase of a test ended on one rank.

    Attributes:
        kind: One of `_REPORTED`.
        headline: One line that says what failed, or why it was skipped or expected to fail.
        key: Failures with the same key are the same failure.
        text: The failure in full.
        sections: Names and texts of what was captured.
    """

    kind: str
    headline: str = ""
    key: str = ""
    text: str = ""
    sections: tuple[tuple[str, str], ...] = ()

    def with_output(self) -> str:
        """Return the failure in full, with what was captured."""
        return "\n".join([self.text, *(f"---- {title} ----\n{text}" for title, text in self.sections)])


@dataclass(frozen=True)
class Verdict:
    """How one phase of a test ended, for all ranks together.

    Attributes:
        kind: One of `_REPORTED`.
        outcomes: The outcomes of the ranks that took part.
    """

    kind: str
    outcomes: Mapping[int, RankOutcome]

    @property
    def decisive(self) -> dict[int, RankOutcome]:
        """The outcomes of the verdict's own kind."""
        return {rank: outcome for rank, outcome in self.outcomes.items() if outcome.kind == self.kind}


class MergedFailure(TerminalRepr):
    """What pytest prints of a failed test: each different failure once, with the ranks that saw it.

    Args:
        outcomes: The failures, by rank.
        pictures: What to print in full for a rank in place of its outcome's text: pytest's own coloured form.
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
    """Return what this rank's own report says; local."""
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
    # What follows the first line shows the values involved, and among them often the rank itself.
    key = text if crash is None else f"{crash.path}:{crash.lineno}: {headline}"
    return RankOutcome(FAILED, headline, key, text, tuple(sections))


def merge_outcomes(given: Mapping[int, RankOutcome | None]) -> Verdict:
    """Merge the outcomes by rank; None from ranks that take no part; local."""
    outcomes = {rank: outcome for rank, outcome in given.items() if outcome is not None}
    kinds = {outcome.kind for outcome in outcomes.values()}
    return Verdict(next(kind for kind in _REPORTED if kind in kinds), outcomes)


def apply_verdict(report: pytest.TestReport, verdict: Verdict, rank: int) -> None:
    """Make this rank's report say what all ranks agreed on, in place; local."""
    own = verdict.outcomes.get(rank)
    if own is not None and len(verdict.outcomes) == 1:
        return  # the only rank of the test: its report says it all
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
        own_place = report.longrepr[:2] if isinstance(report.longrepr, tuple) else None
        report.longrepr = (*(own_place or (report.location[0], report.location[1] or 0)), reason)
    elif verdict.kind in (XFAILED, XPASSED):
        report.wasxfail = reason
    else:
        report.longrepr = None
    report.sections = _merge_sections(verdict.outcomes)


def _one_reason(reasons: Mapping[int, str]) -> str:
    """Join the ranks' reasons; the ranks are named only where they differ."""
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
