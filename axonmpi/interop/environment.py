"""The variables that torchrun sets, for programs that insist on them."""

from __future__ import annotations

__all__ = ["launch_env"]


def launch_env() -> dict[str, str]:
    return {}
