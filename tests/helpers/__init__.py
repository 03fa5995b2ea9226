"""What the tests share; nothing of it is a test."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent
WITH_HELPERS = {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))}
"""Variables of a job whose ranks import these helpers."""
