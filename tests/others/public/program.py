"""A public program: its source, command and results, as one row of docs/programs.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OVER_GLOO = {"gloo": "axonmpi run --backend gloo", "axonmpi": "axonmpi run --backend axonmpi"}
OVER_MPI4PY = {"mpi4py": "", "axonmpi": "axonmpi run"}


@dataclass(frozen=True)
class Program:
    """A program that is run whole, once for each variant and round, in a copy of its checkout.

    Attributes:
        command: The script, or `-m` and a module, with arguments, as a user types it after `python`.
        results: Pattern of printed figures that are compared: one group or more, each a number.
        compared: Words for the figures, such as "losses of 20 steps".
        repository: GitHub repository of the checkout; "" if the packages are all.
        packages: Arguments of `pip install`, beside the packages that this Python has.
        changes: Triples of a file, its old and its new text, made for all variants; each with its reason beside it.
        prepare: Commands of the shell to run once in the checkout, before the variants.
        files: Contents of files to add to the checkout, by name.
        ranks: Number of ranks.
        variants: Prefix of the command by name: the first is the reference, the last is compared with it.
        tolerance: Largest relative difference of two figures; 0 compares digit for digit.
        seconds: Time limit of a run.
        env: Variables to set in addition.
    """

    command: str
    results: str
    compared: str
    repository: str = ""
    packages: Sequence[str] = ()
    changes: Sequence[tuple[str, str, str]] = ()
    prepare: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 2
    variants: Mapping[str, str] = field(default_factory=lambda: dict(OVER_GLOO))
    tolerance: float = 0.0
    seconds: float = 900.0
    env: Mapping[str, str] = field(default_factory=dict)
