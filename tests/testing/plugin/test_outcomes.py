"""How what several ranks say becomes one report."""

import pytest

from axonmpi.testing.plugin.collection import merge_collected
from axonmpi.testing.plugin.outcomes import RankOutcome, apply_verdict, merge_outcomes
from axonmpi.testing.rank_text import group_by_text, merge_texts
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


def test_each_different_failure_appears_once_with_its_ranks():
    other = RankOutcome("failed", "bang", "a.py:2: bang", "the whole of bang")
    report = _report("passed")
    apply_verdict(report, merge_outcomes({0: PASSED, 1: FAILED, 2: other, 3: FAILED}), 0)
    assert report.outcome == "failed"
    text = report.longreprtext
    assert text.startswith("ranks 1, 3: boom\nrank 2: bang\n")
    assert text.count("the whole of boom") == 1
    assert text.count("the whole of bang") == 1
    assert report.longrepr.reprcrash.message == "ranks 1, 3: boom; rank 2: bang"


def test_failures_that_differ_in_an_address_only_are_the_same():
    first = RankOutcome("failed", "<A at 0x7f00>", "a.py:1: <A at 0x7f00>", "text")
    second = RankOutcome("failed", "<A at 0x7faa>", "a.py:1: <A at 0x7faa>", "text")
    report = _report("passed")
    apply_verdict(report, merge_outcomes({0: first, 1: second}), 2)
    assert report.longreprtext.startswith("ranks 0, 1: <A at 0x7f00>")


def test_every_rank_takes_the_verdict_over():
    verdict = merge_outcomes({0: PASSED, 1: FAILED})
    passed, failed = _report("passed"), _report("failed", "boom")
    apply_verdict(passed, verdict, 0)
    apply_verdict(failed, verdict, 1)
    assert passed.outcome == failed.outcome == "failed"
    all_pass = merge_outcomes({0: PASSED, 1: None})
    absent = _report("failed", "whatever")
    apply_verdict(absent, all_pass, 1)
    assert absent.passed
    assert absent.longrepr is None


def test_a_test_of_one_rank_keeps_its_own_report():
    report = _report("failed", "boom", sections=[("Captured stdout call", "hello")])
    apply_verdict(report, merge_outcomes({0: FAILED, 1: None}), 0)
    assert (report.outcome, report.longrepr) == ("failed", "boom")
    assert report.sections == [("Captured stdout call", "hello")]
    elsewhere = _report("passed")
    apply_verdict(elsewhere, merge_outcomes({0: FAILED, 1: None}), 1)
    assert elsewhere.failed


def test_skips_and_expected_failures_keep_their_reasons():
    report = _report("skipped", ("test_a.py", 3, "Skipped: no"))
    apply_verdict(report, merge_outcomes({0: SKIPPED, 1: RankOutcome("skipped", "Skipped: never")}), 0)
    assert report.longrepr == ("test_a.py", 3, "rank 0: Skipped: no; rank 1: Skipped: never")
    report = _report("passed")
    apply_verdict(report, merge_outcomes({0: XPASSED, 1: XFAILED}), 0)
    assert (report.outcome, report.wasxfail) == ("skipped", "known")
    report = _report("skipped")
    report.wasxfail = "known"
    apply_verdict(report, merge_outcomes({0: XFAILED, 1: FAILED}), 0)
    assert report.failed
    assert not hasattr(report, "wasxfail")
    report = _report("passed")
    apply_verdict(report, merge_outcomes({0: STRICT, 1: STRICT}), 0)
    assert (report.outcome, report.longrepr) == ("failed", "[XPASS(strict)] known")


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
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([3, 1]) == "ranks 1, 3"
    assert group_by_text({2: "a", 0: "b", 1: "a"}) == [([0], "b"), ([1, 2], "a")]
    assert merge_texts({0: "a\n", 1: "a\n"}, "stack of ") == "---- stack of ranks 0, 1 ----\na"


def test_equal_collections_agree():
    assert merge_collected({0: ["a", "b"], 1: ["a", "b"]}) is None


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
    assert stop.exit_code == 4
    assert stop.reason.endswith(f"The first difference is\n  {said}")
