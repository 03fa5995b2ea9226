"""A folder that nodes share, and other users of the machine may write to."""

import json
from types import SimpleNamespace

import pytest

from axonmpi.observe.shared_folder import read_states

OWN = SimpleNamespace(job="job", host="n1")


@pytest.mark.parametrize(("mode", "expected"), [(0o777, set()), (0o700, {3})], ids=["open", "own"])
def test_only_folders_that_nobody_else_can_open_are_read(tmp_path, mode, expected) -> None:
    node = tmp_path / "job-n2"
    node.mkdir()
    (node / "states.json").write_text(json.dumps({"conditions": {}, "going_on": [3]}))
    node.chmod(mode)
    (tmp_path / "job-n3").symlink_to("/")
    assert read_states(tmp_path, OWN) == ({}, expected)
