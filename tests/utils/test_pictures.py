"""Pictures are drawn without a file in the home directory, and folders that variables name are used."""

from pathlib import Path

import pytest
from helpers.programs import run_alone

DRAWS = """
import os
from pathlib import Path
from axonmpi.pipeline import PipelineSchedule, make_schedule, simulate
from axonmpi.pipeline.schedule.chart import draw_chart

before = dict(os.environ)
draw_chart(simulate(make_schedule(PipelineSchedule.GPIPE, 2, 2)), Path({path!r}))
assert dict(os.environ) == before
"""


@pytest.mark.parametrize("named", [False, True])
def test_a_picture_leaves_the_home_directory_empty(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR"):
        monkeypatch.delenv(name, raising=False)
    if named:
        monkeypatch.setenv("MPLCONFIGDIR", str(cache))
    done = run_alone(DRAWS.format(path=str(tmp_path / "chart.png")))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "chart.png").stat().st_size > 1000
    assert [*home.rglob("*")] == []
    assert [path.name.startswith("fontlist") for path in cache.glob("*.json")] == ([True] if named else [])
