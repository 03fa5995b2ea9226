"""The table of launchers is the one in the code, and the page of sites names the doctor's own lines."""

import json
import re

import pytest
from helpers import REPOSITORY

from axonmpi.launch.check import MpiLibrary, check_launch
from axonmpi.launch.launcher_variables import CONVENTIONS, detect_launchers
from axonmpi.testing import launch

SITES = (REPOSITORY / "docs" / "sites.md").read_text()
LAUNCHING = (REPOSITORY / "docs" / "launching.md").read_text()


def table() -> str:
    """Draw the table of launchers from the conventions."""
    rows = ["| launcher | rank, ranks | on its node | seen by | sets as well | inside |", "| --- " * 6 + "|"]
    for one in CONVENTIONS:
        numbers = (
            names(one.rank, one.size),
            names(one.local_rank, one.local_size),
            names(one.requires or one.key or one.size or one.rank),
        )
        rows.append("| " + " | ".join([one.name, *numbers, ", ".join(one.sets), ", ".join(one.inside)]) + " |")
    return re.sub(" +", " ", "\n".join(rows))


def names(*variables: str | None) -> str:
    return ", ".join(f"`{name}`" for name in variables if name)


def test_the_table_of_launchers_is_that_of_the_code() -> None:
    assert table() in LAUNCHING, table()


def test_the_message_about_two_launchers_is_the_real_one() -> None:
    shown = LAUNCHING.partition("axonmpi.errors.LaunchError: two launchers")[2].partition("\n```")[0]
    env = dict(re.findall(r"(\w+)=(\d+)", shown))
    library = MpiLibrary("MPICH", "5.0.2", "/opt/mpich/lib/libmpi.so.12", None)
    assert check_launch(detect_launchers(env), 0, 8, library) == "two launchers" + shown


@pytest.mark.parametrize("relation", ["sets", "inside"])
def test_launchers_that_are_related_are_in_the_table(relation: str) -> None:
    known = {one.name for one in CONVENTIONS}
    assert {name for one in CONVENTIONS for name in getattr(one, relation)} < known


def test_the_lines_that_sites_should_see_are_lines_of_the_doctor() -> None:
    named = set(re.findall(r"^\| `([\w ]+ / [\w -]+)` \|", SITES, re.MULTILINE))
    result = launch(2, "-m", "axonmpi", "doctor", "--json")
    sections = json.loads(result.stdout)["sections"]
    lines = {f"{section} / {line['name']}" for section, found in sections.items() for line in found}
    assert len(named) == 7
    assert sorted(named - lines) == []


def test_every_site_has_the_same_rows_and_says_that_nobody_has_tried_it() -> None:
    assert "**Not run by us:**" in SITES
    rows = ["modules", "mpi4py", "start", "binding", "fabric", "`MPI / library`", "`launch / seen`"]
    for site in SITES.split("\n## ")[1:]:
        found = re.findall(r"^\| ([^|]+?) \|", site, re.MULTILINE)
        assert [row for row in rows if row not in found] == [], site.partition("\n")[0]


def test_launchers_that_sites_should_see_are_those_of_the_table() -> None:
    known = {one.name: {one.rank, one.size, one.local_rank, one.local_size} for one in CONVENTIONS}
    seen = re.findall(r"^\| `launch / seen` \| (.*) \|$", SITES, re.MULTILINE)
    lines = [line for cell in seen for line in re.findall(r"`([\w ]+): ([^`]*)`", cell)]
    assert len(lines) > len(seen)
    for name, variables in lines:
        assert {text.partition("=")[0] for text in variables.split()} <= known[name], name
