"""Findings of the doctor: lines with a state and, unless it is ok, a remedy; as text and as JSON.

memory
  ok    /dev/shm      16,384 MiB, 16,380 MiB free
  warn  left there    2 files of jobs that have ended, 4 MiB: mpich_shm_5b1c_0, mpich_shm_77a0_0
                      do: rm /dev/shm/mpich_shm_5b1c_0 /dev/shm/mpich_shm_77a0_0
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from ...utils.text import counted

State = Literal["ok", "warn", "fail"]
_NAME_WIDTH = 13


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        name: The subject.
        text: The facts; further lines are indented below the first.
        state: `"warn"`: ranks can be started, but are slower or less safe than they might be; `"fail"`: they
            cannot be started.
        todo: The remedy, unless the state is ok.
    """

    name: str
    text: str
    state: State = "ok"
    todo: str = ""


Report = Mapping[str, Sequence[Finding]]
"""Findings by section."""


def problem_of(report: Report) -> str:
    """Return the text of the first finding whose state is `"fail"`; empty if there is none."""
    failed = (finding for findings in report.values() for finding in findings if finding.state == "fail")
    return next((finding.text for finding in failed), "")


def as_text(report: Report) -> str:
    """Return the report for people, with a verdict at its end."""
    lines = []
    for section, findings in report.items():
        lines += [section, *(line for finding in findings for line in _lines(finding))]
    warnings = sum(finding.state == "warn" for findings in report.values() for finding in findings)
    well = f"All works, with {counted(warnings, 'warning')}." if warnings else "All is well."
    problem = problem_of(report)
    return "\n".join([*lines, "", f"PROBLEM: {problem}" if problem else well, ""])


def _lines(finding: Finding) -> list[str]:
    first, *others = finding.text.splitlines()
    below = [line.strip() for line in others] + ([f"do: {finding.todo}"] if finding.todo else [])
    return [
        f"  {finding.state:4}  {finding.name:{_NAME_WIDTH}} {first}",
        *(" " * (9 + _NAME_WIDTH) + line for line in below),
    ]


def as_json(report: Report) -> str:
    """Return the report for programs: `problem`, which is empty if ranks can run, and `sections` of findings."""
    sections = {title: [asdict(finding) for finding in findings] for title, findings in report.items()}
    return json.dumps({"problem": problem_of(report), "sections": sections}, indent=1)
