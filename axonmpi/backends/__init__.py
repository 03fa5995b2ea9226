"""Backends: one communicator each for a fixed set of ranks (layers 1 and 2)."""
