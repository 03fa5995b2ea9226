"""The process group for Accelerate, and for `transformers.Trainer` on top of it, on the CPU.

    from axonmpi.interop.accelerate import start_process_group

    start_process_group()             # first of all
    accelerator = Accelerator()       # or TrainingArguments(use_cpu=True) and Trainer, as ever

Accelerate has a list of backends, and takes gloo in place of any other, but it uses a group that exists already. It
reads ranks from the variables that torchrun sets.
"""

from __future__ import annotations

from datetime import timedelta

from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..launch.launcher_variables import set_variables
from .autoload import NAME, register
from .environment import launch_env


def start_process_group(timeout: timedelta = default_pg_timeout) -> None:
    """Start torch's group of all ranks, and tell Accelerate of it; collective over all ranks of the job.

    Args:
        timeout: Limit of each operation.

    Raises:
        LaunchError: The processes were not started as one MPI job.
    """
    register()
    launch_env()
    set_variables({"ACCELERATE_USE_CPU": "true"})
    dist.init_process_group(NAME, timeout=timeout)
