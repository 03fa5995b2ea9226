"""The wheel and the sdist of axonmpi, built once."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.limits import limit


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: it builds the wheel and the sdist")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=REPOSITORY, check=True, timeout=limit(60)
    )
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist
