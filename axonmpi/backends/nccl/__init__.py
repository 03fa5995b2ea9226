"""Communicators of GPUs, by NCCL, whose unique id travels over another backend."""
