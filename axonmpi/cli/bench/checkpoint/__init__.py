"""The benchmark of checkpoints: `axonmpi bench checkpoint`.

`saving.py` saves and loads a sharded model (`models.py`) by each of `savers.py`. Then `while_training.py` measures
saves beside training, and `planning.py` the time that one of thousands of ranks needs to plan a save.
"""
