"""Helpers that know nothing of ranks: partitions of a length, argument checks, devices, waiting, processes.

All packages use them. `partition.py` and `device.py` are the two to read first. They import torch at most.
"""
