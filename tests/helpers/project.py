"""The project's metadata: pyproject.toml, parsed."""

import sys
from importlib import import_module
from typing import Any

from packaging.requirements import Requirement

from helpers import REPOSITORY

_TOML = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PYPROJECT: dict[str, Any] = _TOML.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]


def requirements(extra: str | None = None) -> dict[str, str]:
    """Return the versions, such as `>=2.0`, of each package that the library needs, or an extra adds."""
    return _versions(PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra])


def build_requirements() -> dict[str, str]:
    """Return the versions of each package that builds the wheel."""
    return _versions(PYPROJECT["build-system"]["requires"])


def _versions(lines: list[str]) -> dict[str, str]:
    return {needed.name: str(needed.specifier) for needed in map(Requirement, lines)}
