"""What wrappers of modules have in common: autograd, reductions in a backward, state dicts, marked parts."""
