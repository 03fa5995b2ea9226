"""What the wrappers of modules have in common: same models on all ranks, outputs, state dicts."""
