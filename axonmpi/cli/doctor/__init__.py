"""`axonmpi doctor`: the facts that a user needs when a launch goes wrong, and what to do about them."""

from .report import main

__all__ = ["main"]
