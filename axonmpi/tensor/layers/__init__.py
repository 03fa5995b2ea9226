"""Layers whose parameters are cut over the ranks of a group."""
