"""The page about the backends is about today's code: its picture, its lists of operations and of files."""

import re
from dataclasses import fields
from typing import get_args, get_type_hints

from helpers import REPOSITORY

from axonmpi.backends.connection.connection import Connection
from axonmpi.backends.contract import Backend

PAGE = (REPOSITORY / "docs" / "backends.md").read_text()
PACKAGE = REPOSITORY / "axonmpi"
ON_THE_NODE, BETWEEN_NODES = ("barrier", "staging", "arena"), ("rounds", "lane")
OUTSIDE = {"abort", "close", "invalidate", "on", "set_timeout", "stop_worker", "waiting", "give_up", "give_way"}
"""Methods of a group's life, not of its data; other pages have them."""


def parts() -> dict[str, str]:
    """The fields of a connection that are objects of classes in its folder, with the file of each."""
    hints = get_type_hints(Connection)
    found = {}
    for field in fields(Connection):
        kind = next(iter(get_args(hints[field.name])), hints[field.name])
        folder, _, file = getattr(kind, "__module__", "").rpartition(".")
        if folder.endswith("backends.connection") and file != "connection":
            found[field.name] = f"{field.name:<10} {file}.py"
    return found


def picture() -> str:
    """Draw a connection: the parts on the node and between nodes side by side, those of both above."""
    of = parts()
    both = [of.pop(name) for name in list(of) if name not in ON_THE_NODE + BETWEEN_NODES]
    left, right = [of.pop(name) for name in ON_THE_NODE], [of.pop(name) for name in BETWEEN_NODES]
    assert not of
    rows = ["Connection    " + "    ".join(both), ""]
    rows += [f"{'the ranks on my node':<32}│ the ranks with my local rank on other nodes", f"{'─' * 32}┼{'─' * 44}"]
    right += [""] * (len(left) - len(right))
    rows += [f"{one:<32}│ {other}".rstrip() for one, other in zip(left, right, strict=True)]
    return "\n".join(rows)


def test_the_picture_has_every_part_of_a_connection() -> None:
    assert f"```text\n{picture()}\n```" in PAGE, picture()


def test_every_operation_has_a_row() -> None:
    table = PAGE.partition("## Which file has an operation")[2].partition("\n## ")[0]
    operations = {name for name, method in vars(Backend).items() if callable(method) and name[0] != "_"} - OUTSIDE
    assert {"all_reduce", "scan", "node_counters"} < operations
    assert sorted(operations - {*re.findall(r"`(\w+)`", table)}) == []


def test_every_file_that_is_named_is_there() -> None:
    """And each file of `backends/` but the tables of names is named."""
    named = {*re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE)}
    places = (PACKAGE, PACKAGE / "backends", PACKAGE / "backends" / "connection", REPOSITORY)
    assert sorted(name for name in named if not any((place / name).exists() for place in places)) == []
    ours = {path.name for path in (PACKAGE / "backends" / "connection").glob("[a-z]*.py")}
    assert sorted(ours - {name.rpartition("/")[2] for name in named}) == []


def test_the_worked_example_is_in_the_files_that_the_page_names() -> None:
    table = PAGE.partition("## Adding a collective")[2].partition("\n1. ")[0]
    files = [
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall("`(.*?)`", row)
    ]
    assert len(files) == 7
    assert [name for name in files if not re.search(r"\bscan\b", (PACKAGE / name).read_text())] == []
