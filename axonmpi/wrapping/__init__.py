"""What wrappers of modules have in common: autograd, a backward that reduces gradients, state dicts, marked parts."""
