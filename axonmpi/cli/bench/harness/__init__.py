"""The parts that all benchmarks share: options, clocks, tables, and groups of torch.distributed."""
