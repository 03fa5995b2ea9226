"""Saving and loading a checkpoint: ours, plain writes, `torch.distributed.checkpoint` on gloo."""
