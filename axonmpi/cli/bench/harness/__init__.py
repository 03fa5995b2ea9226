"""The harness of the benchmarks: what a benchmark consists of, its options, clocks, tables, and torch's groups.

`benchmark.py` comes first: a benchmark measures variants on the ranks of a job, and shows their figures as tables.
`timing.py` times variants in turns, `options.py` and `table.py` turn data into command-line options and text, and
`torch_groups.py` starts torch.distributed. The benchmarks import these files; these import no benchmark.
"""
