"""Collectives of many sizes: ours, MPI's own, gloo's, and a plain copy."""
