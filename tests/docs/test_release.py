"""A release: contents of the wheel and of the sdist, one version everywhere, a version for each public name."""

import email
import json
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.api_page import entries
from helpers.project import PROJECT

import axonmpi as ax

DOCS = REPOSITORY / "docs"
SINCE: dict[str, list[str]] = json.loads((DOCS / "since.json").read_text(encoding="utf-8"))
VERSIONS = re.findall(r"^## (\d+\.\d+\.\d+)$", (DOCS / "changelog.md").read_text(encoding="utf-8"), re.MULTILINE)
AT_THE_TOP = {
    *("LICENSE", "PKG-INFO", "README.md", ".axonmpi_autoload.py", "constraints.txt", "pyproject.toml", "setup.cfg"),
    *("axonmpi", "docs", "slurm", "tests", ".ci", ".gitignore"),
}
LEFT_OVER = re.compile(r"__pycache__|\.pyc$|_cache/|\.hypothesis|axonmpi-runs|_build/|\.egg-info|\.venv")


def sources() -> set[str]:
    """Return the files of the package in the repository."""
    paths = (path for path in (REPOSITORY / "axonmpi").rglob("*") if path.is_file())
    return {str(path.relative_to(REPOSITORY)) for path in paths if "__pycache__" not in path.parts}


def test_the_wheel_has_the_package_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[0]) as wheel:
        names = set(wheel.namelist())
        info = f"axonmpi-{PROJECT['version']}.dist-info"
        described = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    of_pip = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    assert names == sources() | {"axonmpi_autoload.py"} | of_pip
    assert {"axonmpi/__init__.pyi", "axonmpi/py.typed"} <= names
    assert (described["Name"], described["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert (described["License-Expression"], described["License-File"]) == ("Apache-2.0", "LICENSE")


def test_the_sdist_has_the_sources_and_no_leftovers(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert sources() <= names
    assert {name.partition("/")[0] for name in names} == AT_THE_TOP
    assert {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "slurm").iterdir()} <= names
    assert [name for name in names if LEFT_OVER.search(name)] == []


def test_one_version_everywhere() -> None:
    assert {PROJECT["version"], ax.__version__} == {VERSIONS[0]}
    assert sorted(VERSIONS, key=lambda version: [*map(int, version.split("."))], reverse=True) == VERSIONS


def test_each_public_name_has_the_version_since_which_it_is_there() -> None:
    known = [name for names in SINCE.values() for name in names]
    assert sorted(known) == sorted(entry.name for entry in entries())
    assert all(names == sorted(names) for names in SINCE.values())
    assert SINCE.keys() <= set(VERSIONS)


@pytest.mark.parametrize("entry", [entry for entry in entries() if not entry.is_automatic], ids=lambda e: e.name)
def test_entries_without_a_docstring_show_their_version(entry) -> None:
    (version,) = (version for version, names in SINCE.items() if entry.name in names)
    assert f".. versionadded:: {version}\n" in entry.text
