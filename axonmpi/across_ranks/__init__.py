"""What is made of several collectives: norms of gradients, comparisons of all ranks."""
