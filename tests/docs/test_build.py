"""The pages become a site without a single warning."""

import subprocess
import sys

import pytest
from helpers import REPOSITORY


@pytest.mark.slow
def test_sphinx_builds_the_site_without_warnings(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    build = subprocess.run(
        [*command, str(REPOSITORY / "docs"), str(site)], capture_output=True, text=True, timeout=180
    )
    assert build.returncode == 0, build.stdout + build.stderr
    assert "_static/code.css" in (site / "testing.html").read_text()  # room for long lines of code
    api = (site / "api.html").read_text()
    assert 'id="axonmpi.DistributedDataParallel.no_sync"' in api
    assert "Let gradients of backwards in this context accumulate" in api  # the method's docstring
