"""The backend of MPI ranks: its collectives go through `connection`, its messages by the MPI library."""
