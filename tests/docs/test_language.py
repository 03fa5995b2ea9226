"""The language of docstrings, comments and pages: two words in place of nouns, first lines, the table of words."""

import re
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.prose import opens_with_a_question, rate, words_of

PACKAGE = REPOSITORY / "axonmpi"
MOST_WHAT, MOST_WHERE = 1.0, 2.5
"""Among 1,000 words: a clause with "what" or "where" mostly stands for a noun of the field."""


def files_of_each_package() -> dict[str, list[Path]]:
    """Return the files of each package, of the files beside them, of the pages and of the READMEs."""
    others = {
        "README.md": [REPOSITORY / "README.md"],
        "tests/README.md": [REPOSITORY / "tests" / "README.md"],
        "docs": sorted((REPOSITORY / "docs").glob("*.*")),
        "axonmpi": sorted(PACKAGE.glob("*.py")),
    }
    folders = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    return others | {f"axonmpi/{folder.name}": sorted(folder.rglob("*.py")) for folder in folders}


FILES = files_of_each_package()


@pytest.mark.parametrize("package", FILES)
def test_sentences_name_the_thing(package: str) -> None:
    words = [word for path in FILES[package] for word in words_of(path)]
    rates = {word: round(rate(words, word), 1) for word in ("what", "where")}
    assert rates["what"] <= MOST_WHAT, rates
    assert rates["where"] <= MOST_WHERE, rates


@pytest.mark.parametrize("package", FILES)
def test_no_file_opens_with_a_question(package: str) -> None:
    questions = [str(path.relative_to(REPOSITORY)) for path in FILES[package] if opens_with_a_question(path)]
    assert questions == []


def rows_of_words() -> list[list[str]]:
    """Return the cells of the table in docs/architecture.md: word, meaning, other words."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*)\|$", section, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def test_each_word_of_the_table_is_in_use() -> None:
    words = [word.strip("`") for word, _, _ in rows_of_words()]
    assert len(words) == len(set(words)) > 20
    sources = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert [word for word in words if not re.search(rf"(?<![a-z]){word}(?![a-z])", sources)] == []


def test_files_are_not_named_by_words_that_the_table_gives_up() -> None:
    rows = rows_of_words()
    given_up = {other.strip() for _, _, others in rows for other in others.split(",")} - {""}
    given_up -= {word.strip("`") for word, _, _ in rows}
    assert {"board", "meeting", "piece"} <= given_up
    named = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.stem in given_up}
    assert named == set()


SOURCE = '''
"""Which file this is."""
# what a comment says
size = 1  # noqa: what
"""What the `what` is, beside

    what   │ a picture
"""
def f():
    """Do it.

    Args:
        what: The name of an argument.
    """
    print("what is printed")
'''
PAGE = "# What it is\n\n```python\nwhat = 1\n```\n\n| what | `what` |\n| --- | --- |\n"


def test_docstrings_and_comments_are_prose_and_code_is_not(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(SOURCE.lstrip())
    (tmp_path / "page.md").write_text(PAGE)
    assert words_of(tmp_path / "file.py").count("what") == 2
    assert words_of(tmp_path / "page.md").count("what") == 2
    assert opens_with_a_question(tmp_path / "file.py")
    assert opens_with_a_question(tmp_path / "page.md")
