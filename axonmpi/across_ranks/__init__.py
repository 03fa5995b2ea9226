"""Checks and sums in which all ranks of a group take part, each made of several collectives.

A mistake that only one rank finds would leave the others waiting in their next collective: `comparison.py`, the
file to read first, turns it into the same error on every rank. `model_checks.py` compares models before they are
wrapped. `sharded_parameters.py` marks a parameter with the ranks that hold its shards, and `gradient_norm.py` reads
these marks to count every parameter once. Only the norm runs in a training step; the others run when a model is
wrapped or a state is loaded. The package imports `groups` and `backends`, and knows no wrapper.
"""
