"""Parts that wrappers of modules share: DDP, FSDP and tensor parallelism import them, users do not.

A wrapper keeps the names of the module in state dicts (`state_names.py`), hooks autograd to reduce gradients as
they become complete (`gradient_hooks.py`), and compares the ranks' training steps (`steps.py`). Parameters of
which a rank has a shard are tensors that refuse functions of the full tensor (`shard_tensors.py`, by the
classification in `elementwise.py`); `optimizer_hooks.py` shows torch's optimizers ordinary tensors during a step.
Dropout of tensors that ranks have in parts draws its blocks by `seeds.py`.

Read `gradient_hooks.py` and `shard_tensors.py` first. Files import `across_ranks`, `groups`, `backends` and
packages below these.
"""
