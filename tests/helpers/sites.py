"""A site's installation of packages, for tests of axonmpi beside it."""

from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def link_packages(folder: Path, *names: str, metadata: bool = True) -> None:
    """Fill a new folder, for PYTHONPATH, with links to packages of this environment and to those that they need.

    Args:
        folder: The folder.
        *names: Names of packages.
        metadata: Whether the folders that describe packages to pip are linked, too.
    """
    folder.mkdir()
    for name in _with_requirements(names):
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            is_shared = (folder / top).exists()
            if not is_shared and (metadata or not top.endswith(".dist-info")):
                (folder / top).symlink_to(installed.locate_file(top))


def _with_requirements(names: tuple[str, ...]) -> set[str]:
    found: set[tuple[str, str]] = set()  # with the extra that is asked for
    new = {(name, "") for name in names}
    while new:
        found |= new
        needed: set[tuple[str, str]] = set()
        for name, extra in new:
            for each in map(Requirement, distribution(name).requires or ()):
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    needed |= {(each.name, wanted) for wanted in ("", *each.extras)}
        new = needed - found
    return {name for name, _ in found}
