"""Other libraries over MPI: a backend of `torch.distributed`, and what frameworks on top of it have to be told.

autoload           what torch runs at the end of `import torch`: it registers the backend, and nothing else
torch_backend      `init_process_group("axonmpi")`: starts MPI, checks the launch, makes groups
process_group      torch's interface of a group, over a `Backend`
work, reductions   torch's words for operations under way and for reductions
rendezvous         where the ranks meet without an address
environment        what torchrun would have set, for programs that insist
accelerate, lightning      each framework's own name for all this
"""

from __future__ import annotations

from .environment import launch_env

__all__ = ["launch_env"]
