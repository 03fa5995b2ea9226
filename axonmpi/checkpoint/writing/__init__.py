"""Writing a checkpoint: who writes what, and in which order."""
