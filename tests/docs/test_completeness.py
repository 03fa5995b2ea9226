"""Completeness of the pages: public names, errors, settings, packages, links."""

import re

import pytest
from helpers import REPOSITORY
from helpers.fences import PAGES

import axonmpi
from axonmpi import errors
from axonmpi.cli.bench.command import BENCHMARKS
from axonmpi.train.config import Config

DOCS = REPOSITORY / "docs"


def missing(page: str, names, pattern: str = "{}"):
    """Return the names that do not stand on a page as whole words."""
    text = (DOCS / page).read_text()
    return [name for name in names if not re.search(rf"(?<!\w){re.escape(pattern.format(name))}(?!\w)", text)]


def test_every_public_name_is_looked_up_in_the_api_page():
    modules = {"autograd", "comm", "errors", "testing"}
    entries = re.findall(
        r"(?:function|class|exception|module|data):: (?:[\w.]+\.)?(\w+)", (DOCS / "api.md").read_text()
    )
    assert set(axonmpi.__all__) - set(entries) - modules == set()
    assert set(axonmpi.testing.__all__) | set(axonmpi.autograd.__all__) <= set(entries)


def test_every_error_is_explained():
    assert missing("errors.md", errors.__all__, "| `{}` |") == []


def test_every_setting_of_the_trainer_is_a_flag_on_its_page():
    page = (DOCS / "trainer.md").read_text()
    flags = [name.replace("_", "-") for name in Config().flat()]
    assert [flag for flag in flags if f"`--{flag}`" not in page and f"`--no-{flag}`" not in page] == []


def test_every_benchmark_is_shown():
    assert missing("benchmarks.md", BENCHMARKS, "axonmpi bench {}") == []


def test_every_package_is_in_the_picture():
    package = REPOSITORY / "axonmpi"
    picture = (DOCS / "architecture.md").read_text().split("```")[1]
    there = {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    there |= {
        path.parent.name for path in [*package.glob("*/__init__.py"), *package.glob("backends/*/__init__.py")]
    }
    assert sorted(name for name in there if not re.search(rf"^( *|.*  ){name}\b", picture, re.MULTILINE)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text())
    assert [target for target, _ in links if not (page.parent / target).exists()] == []
    anchors = [(page.parent / target if target else page, anchor) for target, anchor in links if anchor]
    assert [(path.name, anchor) for path, anchor in anchors if anchor not in anchors_of(path)] == []


def anchors_of(page):
    """Return the anchors of a page's headings, as Sphinx and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
