"""`--cases`: shares of the cases of tests that are the same code on all backends."""

import cases
import pytest


class Case:
    def __init__(self, nodeid, *markers):
        self.nodeid = nodeid
        self.markers = markers

    def get_closest_marker(self, name):
        return name if name in self.markers else None


COUNTS = {
    f"tests/fsdp/test_it.py::test_{number}_{count}": count for number in range(20) for count in (1, 2, 3, 4, 9)
}
ABOVE = [Case(f"{test}[{case}ranks-setting{case}]") for test, count in COUNTS.items() for case in range(count)]
BELOW = [Case(f"tests/conformance/test_bits.py::test_it[{case}]") for case in range(5)]


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


def test_each_half_has_every_setting():
    settings = [
        f"tests/train/test_it.py::test_it[{value}-{{}}ranks-{other}]" for value in "abcd" for other in "efgh"
    ]
    items = [Case(setting.format(ranks)) for setting in settings for ranks in (1, 2, 3, 4)]
    one, other = (cases.shared(items, (number, 2))[0] for number in (1, 2))
    assert sorted(item.nodeid for item in one + other) == sorted(item.nodeid for item in items)
    for half in (one, other):
        for setting in settings:
            assert len([item for item in half if item.nodeid in {setting.format(ranks) for ranks in range(5)}]) == 2
        for ranks in (1, 2, 3, 4):
            assert any(f"-{ranks}ranks-" in item.nodeid for item in half)
    alone = [Case(setting.format(2)) for setting in settings]
    assert cases.shared(alone, (2, 2)) == (alone, [])


def test_tests_below_are_not_shared():
    for number in (1, 2, 3, 4):
        assert cases.shared(BELOW, (number, 4)) == (BELOW, [])


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/0", "a/b", "1/4/2", "-1/4"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(pytest.UsageError, match="--cases: expected K/N"):
        cases.parse(text)


def test_a_share():
    assert cases.parse("3/4") == (3, 4)


def test_a_test_of_every_count_is_one_for_each():
    items = [Case(f"tests/train/test_it.py::test_it[{ranks}ranks]", "every_count") for ranks in range(1, 17)]
    assert cases.shared(items, (1, 2)) == (items, [])
    one, other = (cases.shared(items, (number, 8))[0] for number in (1, 2))
    assert sorted(item.nodeid for item in one + other) == sorted(item.nodeid for item in items)
    assert 4 <= len(one) <= 12
