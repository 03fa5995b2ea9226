"""The rules of torch's functions for tensors that are cut over ranks: one file a family."""

from . import (  # noqa: F401  each fills the table
    along,
    attention,
    dropout,
    elementwise,
    facts,
    indices,
    losses,
    norms,
    pieces,
    products,
    reductions,
    resampling,
    shapes,
    windows,
)
