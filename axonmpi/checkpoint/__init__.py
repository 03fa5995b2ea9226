"""Checkpoints: standard files that all ranks write together, and that any layout of ranks loads."""
