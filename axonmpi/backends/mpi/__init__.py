"""Collectives and messages by the MPI library."""
