"""How what several ranks say becomes one report."""

import pytest

from axonmpi.testing.merged_texts import group_by_text, merge_texts
from axonmpi.testing.plugin.outcomes import RankOutcome, apply_verdict, merge_outcomes
from axonmpi.testing.plugin.verdict_channel import merge_collected
from axonmpi.utils.text import name_ranks

PASSED = RankOutcome("passed")
FAILED = RankOutcome("failed", "boom", "a.py:1: boom", "the whole of boom")
SKIPPED = RankOutcome("skipped", "Skipped: no")
XFAILED = RankOutcome("xfailed", "known")
XPASSED = RankOutcome("xpassed", "known")
STRICT = RankOutcome("xpassed strictly", text="[XPASS(strict)] known")


@pytest.mark.parametrize(
    ("outcomes", "kind"),
    [
        ([PASSED, PASSED], "passed"),
        ([PASSED, FAILED], "failed"),
        ([PASSED, SKIPPED], "passed"),
        ([SKIPPED, SKIPPED], "skipped"),
        ([SKIPPED, FAILED], "failed"),
        ([XPASSED, XFAILED], "xfailed"),
        ([STRICT, XFAILED], "xfailed"),
        ([XFAILED, FAILED], "failed"),
        ([STRICT, STRICT], "xpassed strictly"),
        ([XPASSED, XPASSED], "xpassed"),
        ([PASSED, None], "passed"),
        ([FAILED, None], "failed"),
    ],
)
def test_the_outcome_of_all_ranks(outcomes, kind):
    assert merge_outcomes(dict(enumerate(outcomes))).kind == kind


def _report(outcome, longrepr=None, sections=()):
    return pytest.TestReport(
        nodeid="test_a.py::test_a",
        location=("test_a.py", 3, "test_a"),
        keywords={},
        outcome=outcome,
        longrepr=longrepr,
        when="call",
        sections=list(sections),
    )


OTHER = RankOutcome("failed", "bang", "a.py:2: bang", "the whole of bang")


def test_each_different_failure_appears_once_with_its_ranks():
    report = _report("passed")
    apply_verdict(report, merge_outcomes({0: PASSED, 1: FAILED, 2: OTHER, 3: FAILED}), 0)
    assert (report.outcome, report.longrepr.reprcrash.message) == ("failed", "ranks 1, 3: boom; rank 2: bang")
    assert report.longreprtext.startswith("ranks 1, 3: boom\nrank 2: bang\n")
    assert [report.longreprtext.count(f"the whole of {each}") for each in ("boom", "bang")] == [1, 1]


def test_failures_that_differ_in_an_address_only_are_the_same():
    texts = {rank: f"<A at 0x7f{rank}0>" for rank in range(2)}
    report = _report("passed")
    apply_verdict(
        report,
        merge_outcomes({rank: RankOutcome("failed", text, f"a.py:1: {text}") for rank, text in texts.items()}),
        2,
    )
    assert report.longreprtext.startswith("ranks 0, 1: <A at 0x7f00>")


NOWHERE = RankOutcome("skipped", "Skipped: never")
DIFFERENT = "rank 0: Skipped: no; rank 1: Skipped: never"
VERDICTS = {
    "passed here, failed elsewhere": (
        PASSED,
        [PASSED, FAILED],
        ("failed", "rank 1: boom\nthe whole of boom", None),
    ),
    "failed here": (FAILED, [FAILED, PASSED], ("failed", "rank 0: boom\nboom", None)),
    "failed where it is no part": (FAILED, [None, PASSED], ("passed", "", None)),
    "the only rank": (FAILED, [FAILED, None], ("failed", "boom", None)),
    "elsewhere the only rank": (PASSED, [None, FAILED], ("failed", "rank 1: boom\nthe whole of boom", None)),
    "skipped": (SKIPPED, [SKIPPED, NOWHERE], ("skipped", ("test_a.py", 3, DIFFERENT), None)),
    "better than expected": (XPASSED, [XPASSED, XFAILED], ("skipped", "", "known")),
    "worse than expected": (XFAILED, [XFAILED, FAILED], ("failed", "rank 1: boom\nthe whole of boom", None)),
    "strictly": (STRICT, [STRICT, STRICT], ("failed", "[XPASS(strict)] known", None)),
}


@pytest.mark.parametrize(("own", "outcomes", "expected"), VERDICTS.values(), ids=VERDICTS)
def test_every_rank_takes_the_verdict_over(own, outcomes, expected):
    longrepr = {"failed": "boom", "skipped": ("test_a.py", 3, own.headline)}.get(own.kind)
    report = _report({"xfailed": "skipped", "xpassed": "passed"}.get(own.kind, own.kind.split()[0]), longrepr)
    if own.kind == "xfailed":
        report.wasxfail = own.headline
    apply_verdict(report, merge_outcomes(dict(enumerate(outcomes))), 0)
    reason = report.longrepr if own is SKIPPED else report.longreprtext.strip()
    assert (report.outcome, reason, getattr(report, "wasxfail", None)) == expected


def test_captured_output_of_all_ranks_is_kept_the_same_once():
    same = RankOutcome("passed", sections=(("Captured stdout call", "hello"),))
    other = RankOutcome("failed", "x", sections=(("Captured stdout call", "bye"), ("Captured log call", "l")))
    report = _report("passed", sections=[("Captured stdout call", "hello")])
    apply_verdict(report, merge_outcomes({0: same, 1: other, 2: same}), 0)
    assert report.sections == [
        ("Captured stdout call (ranks 0, 2)", "hello"),
        ("Captured stdout call (rank 1)", "bye"),
        ("Captured log call (rank 1)", "l"),
    ]


def test_texts_of_ranks():
    assert (name_ranks([2]), name_ranks([3, 1])) == ("rank 2", "ranks 1, 3")
    assert group_by_text({2: "a", 0: "b", 1: "a"}) == [([0], "b"), ([1, 2], "a")]
    assert merge_texts({0: "a\n", 1: "a\n"}, "stack of ") == "---- stack of ranks 0, 1 ----\na"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (["a", "c"], "rank 0: b\n  rank 1: c"),
        (["a"], "rank 0: b\n  rank 1: no further one"),
        (["b", "a"], "rank 0: a\n  rank 1: b"),
        (["x.py: cannot", "a", "b"], "rank 0: a\n  rank 1: x.py: cannot"),
    ],
)
def test_different_collections_say_where_they_differ(other, said):
    stop = merge_collected({0: ["a", "b"], 1: other})
    assert (stop.exit_code, merge_collected({0: other, 1: other})) == (4, None)
    assert stop.reason.endswith(f"The first difference is\n  {said}")
