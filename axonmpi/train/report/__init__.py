"""The metrics of a run, its files, and its output on the terminal."""
