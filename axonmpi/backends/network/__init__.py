"""Collectives of several nodes, each of whose ranks share memory."""
