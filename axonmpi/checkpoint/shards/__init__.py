"""This rank's shards of a model, of an optimizer's state and of random states."""
