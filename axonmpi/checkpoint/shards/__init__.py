"""What a rank has of a model, of an optimizer's state and of random states."""
