"""Memory that the ranks of a node share, and collectives in it."""
