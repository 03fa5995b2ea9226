"""Writing a checkpoint: the plan of each rank, its copies, its bytes, and the order in which all ranks proceed."""
