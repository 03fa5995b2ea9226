"""Segments of the MPI library: which names are removed, and when."""

import mmap
from pathlib import Path

import pytest

from axonmpi.launch import segments
from axonmpi.utils import processes

MAPPED = ("mpich_shm_1", "sm_segment.n1.7", "vader_segment.n1.7", "mine_mpich_shm_1", "with space mpich_shm_")


def in_file(path: Path) -> mmap.mmap:
    """Map a new file."""
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


CASES = {
    "once mapped": (False, "/proc/self/maps", MAPPED[:1]),
    "at abort": (True, "/proc/self/maps", MAPPED[:3]),
    "without /proc": (True, "/nowhere", ()),
}


@pytest.mark.parametrize(("at_abort", "maps", "removed"), CASES.values(), ids=CASES)
def test_files_of_the_library_that_this_process_has_mapped(tmp_path, monkeypatch, at_abort, maps, removed) -> None:
    monkeypatch.setattr(segments, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(processes, "Path", lambda path: Path(path.replace("/proc/self/maps", maps)))
    (tmp_path / "mpich_shm_of_another_job").touch()
    elsewhere = tmp_path / "folder" / "mpich_shm_1"
    elsewhere.parent.mkdir()
    mappings = [in_file(path) for path in (elsewhere, *(tmp_path / name for name in MAPPED))]
    segments.remove_segments(at_abort=at_abort)
    segments.remove_segments(at_abort=at_abort)  # the names are gone already
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*MAPPED, "mpich_shm_of_another_job", "folder"} - {*removed}
    assert elsewhere.exists(), mappings


def test_a_name_that_has_become_another_files_stays(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(segments, "SHARED_MEMORY", tmp_path)
    names = [tmp_path / name for name in ("mpich_shm_1", "mpich_shm_2")]
    mappings = [in_file(path) for path in names]
    files = segments._mapped(("mpich_shm_",))
    names[0].rename(tmp_path / "away")
    names[0].touch()
    segments._remove(files)
    assert ({path.name for path in tmp_path.iterdir()}, len(mappings)) == ({"away", "mpich_shm_1"}, 2)
