"""Collectives of many sizes: ours, MPI's own, torch.distributed's, and a plain copy."""
