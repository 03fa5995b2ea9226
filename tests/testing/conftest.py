"""Fixtures for tests of the test harness: sessions of pytest inside a test, alone and under mpirun."""

import hypothesis
import pytest

from axonmpi.testing import LaunchResult, launch

# A session inside a test forgets what it has imported itself; what this one has imported stays.
IMPORTED_ONCE = (hypothesis,)


@pytest.fixture
def mpirun_pytest(tmp_path):
    """Return a function that runs pytest under mpirun on the source of a test file."""

    def run(n: int, source: str, *args: str, ini: str = "", cache: bool = False) -> LaunchResult:
        (tmp_path / "test_it.py").write_text("import pytest\nimport axonmpi as ax\n" + source)
        (tmp_path / "pytest.ini").write_text("[pytest]\n" + ini)
        threads = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        unused = [] if cache else ["-p", "no:cacheprovider"]
        if "hypothesis" not in source:  # it takes long to import
            unused += ["-p", "no:hypothesispytest"]
        return launch(n, "-m", "pytest", "test_it.py", *args, *unused, cwd=tmp_path, timeout=240, env=threads)

    return run
