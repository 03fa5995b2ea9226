"""Other libraries over MPI: the backend "axonmpi" of `torch.distributed`, and adapters for frameworks on top of it.

After `torch.distributed.init_process_group("axonmpi")`, torch's DDP, FSDP2, DTensor and other programs run on MPI.
Read first `torch_backend.py`, which makes groups, and `process_group.py`, torch's interface of a group over a
`Backend`. It imports `backends`, `launch`, `observe` and `utils`.

autoload              the entry point of `import torch`: registers the backend, and nothing else
torch_backend         creation of groups, each over a `Backend`
process_group         methods that torch calls on a group
torch_collectives     torch's collectives in terms of a `Backend`'s
work, reductions      torch's handles of operations, and its reductions
rendezvous            the store of "env://" and "mpi://", without an address
environment           torchrun's variables, for programs that insist on them
backend_override      one backend for all groups, whatever a program names
accelerate, lightning adapters for these frameworks
"""

from __future__ import annotations

from .environment import launch_env

__all__ = ["launch_env"]
