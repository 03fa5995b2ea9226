"""What knows torch at most, and nothing of ranks."""
