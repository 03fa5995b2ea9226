"""`--cases`: shares of the cases of tests that are the same code on all backends."""

from types import SimpleNamespace

import cases
import pytest

COUNTS = {
    f"tests/fsdp/test_it.py::test_{number}_{count}": count for number in range(20) for count in (1, 2, 3, 4, 9)
}
ABOVE = [
    SimpleNamespace(nodeid=f"{test}[{case}ranks-setting{case}]")
    for test, count in COUNTS.items()
    for case in range(count)
]
BELOW = [SimpleNamespace(nodeid=f"tests/conformance/test_bits.py::test_it[{case}]") for case in range(5)]


@pytest.mark.parametrize("shares", [1, 2, 3, 4, 7])
def test_all_shares_have_every_case(shares):
    seen = set()
    for number in range(1, shares + 1):
        chosen, others = cases.shared(ABOVE + BELOW, (number, shares))
        assert [item for item in ABOVE + BELOW if item in chosen] == chosen
        assert len(chosen) + len(others) == len(ABOVE + BELOW)
        seen |= {item.nodeid for item in chosen}
    assert seen == {item.nodeid for item in ABOVE + BELOW}


def test_neighbours_have_every_test_and_each_has_a_part():
    one, other = (cases.shared(ABOVE + BELOW, (number, 4))[0] for number in (1, 2))
    assert {item.nodeid.partition("[")[0] for item in one + other} >= set(COUNTS)
    for test, count in COUNTS.items():
        runs = [sum(item.nodeid.startswith(f"{test}[") for item in chosen) for chosen in (one, other)]
        assert sorted(runs) == [0, 1] if count == 1 else min(runs) >= 1
        assert sum(runs) <= max(1, (count + 3) // 4 * 2)
    singles = [[item for item in chosen if item.nodeid.endswith("_1[0ranks-setting0]")] for chosen in (one, other)]
    assert min(map(len, singles)) >= 5  # of 20: neither has them all


def test_tests_below_are_not_shared():
    for number in (1, 2, 3, 4):
        assert cases.shared(BELOW, (number, 4)) == (BELOW, [])


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/0", "a/b", "1/4/2", "-1/4"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(pytest.UsageError, match="--cases: expected K/N"):
        cases.parse(text)


def test_a_share():
    assert cases.parse("3/4") == (3, 4)
