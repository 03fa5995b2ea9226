"""The text: bytes read from files, split into a training text and a held-out text.

    files in sorted order ──► one string of bytes ──► equal blocks   T T T H T T T H ...
                                                       T joined: train      H joined: held out

Contiguous blocks are held out, spread over the text, so no held-out sequence overlaps a training sequence, and both
texts are of the same kind. Everything is deterministic: each rank reads the text itself, and all ranks get the
same. The default text is Python's standard library, which every machine that runs this has.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .config import TextConfig

_BLOCK_BYTES = 1 << 16
_MEGABYTE = 1_000_000
# in the folder of the library, but no part of it: installed packages, and the tests, which some vendors leave out
_NOT_LIBRARY = {"__pycache__", "dist-packages", "idlelib", "site-packages", "test", "tests"}


@dataclass(frozen=True)
class Corpus:
    """A training text and a held-out text.

    Attributes:
        source: Origin of the text, in words.
        train: The bytes to train on, uint8 `[N]`.
        held_out: The bytes never trained on, uint8 `[M]`.
        digest: SHA-256 of both, to compare between ranks.
    """

    source: str
    train: Tensor
    held_out: Tensor
    digest: str

    @property
    def unigram_entropy(self) -> float:
        """Mean of -ln p(byte) over the held-out bytes, in nats per byte, with p from counts of the training bytes.

        It is the cross-entropy of the best model without context, which a trained model must be below. One is added
        to each count (Laplace), so that a byte that is never trained on costs much but not infinitely much.
        """
        counts = torch.bincount(self.train.long(), minlength=256).double() + 1
        log_chances = (counts / counts.sum()).log()
        frequencies = torch.bincount(self.held_out.long(), minlength=256).double() / len(self.held_out)
        return float(-(frequencies * log_chances).sum())


def load_corpus(config: TextConfig, sequence_length: int) -> Corpus:
    """Read and split the text. Local: every rank reads for itself, nothing is communicated.

    Args:
        config: The text, its limit, and the fraction held out.
        sequence_length: Bytes of a training sequence; each text must have one, and the byte after it.

    Raises:
        ValueError: The file or folder is missing, cannot be read, or holds too little text.
    """
    source = "Python's standard library" if config.data is None else f"--data {config.data}"
    try:
        files = _library() if config.data is None else _files(config.data)
        text = _read(files, math.ceil(config.data_limit * _MEGABYTE))
        train, held_out = split_blocks(text, config.held_out_fraction, sequence_length + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error
    digest = hashlib.sha256(train.numpy().tobytes() + held_out.numpy().tobytes()).hexdigest()
    return Corpus(source, train, held_out, digest)


def _library() -> Iterator[Path]:
    files = _below(sysconfig.get_paths()["stdlib"], left_out=_NOT_LIBRARY)
    return (file for file in files if file.suffix == ".py")


def _files(path: Path) -> Iterable[Path]:
    if path.is_dir():
        return _below(str(path))
    if path.exists() and not path.is_file():
        raise ValueError("expected a file or a folder, got something else")
    return [path]


def _below(folder: str, left_out: Collection[str] = ()) -> Iterator[Path]:
    """Yield the files below a folder in the order of their paths; look into a folder only when it is needed."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:  # else the files of that folder would be left out
        raise ValueError(f"cannot read {folder}: {error.strerror}") from error
    for entry in entries:
        if entry.name in left_out:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path, left_out)
        elif entry.is_file():
            yield Path(entry.path)


def _read(files: Iterable[Path], limit: int) -> Tensor:
    """Join the files up to `limit` bytes."""
    content = bytearray()
    for file in files:
        try:
            with file.open("rb") as stream:
                content += stream.read(limit - len(content))
        except OSError as error:
            raise ValueError(f"cannot read {file}: {error.strerror}") from error
        if len(content) >= limit:
            break
    if not content:
        raise ValueError("expected text, found none: give a file, or a folder of files, that is not empty")
    return torch.frombuffer(content, dtype=torch.uint8)


def split_blocks(text: Tensor, held_out_fraction: float, shortest: int) -> tuple[Tensor, Tensor]:
    """Split a text into contiguous blocks, and hold out every k-th of them.

    Args:
        text: Bytes, uint8 `[N]`.
        held_out_fraction: Fraction to hold out, more than 0 and at most 0.5; met as nearly as blocks allow.
        shortest: Smallest number of bytes of a block.

    Returns:
        The training text and the held-out text, each the blocks in their order, joined.

    Raises:
        ValueError: There are not two blocks of `shortest` bytes.
    """
    period = round(1 / held_out_fraction)
    if len(text) < 2 * shortest:
        raise ValueError(
            f"expected at least {2 * shortest} bytes, one sequence to train on and one to hold out, got "
            f"{len(text)}: give more text or a smaller sequence_length"
        )
    # a short text is cut finer, so that there are some periods, and then only whole ones
    count = len(text) // max(shortest, min(_BLOCK_BYTES, len(text) // (2 * period)))
    period = min(period, count)
    blocks = text.tensor_split(count - count % period)
    train = [block for number, block in enumerate(blocks, 1) if number % period]
    return torch.cat(train), torch.cat(blocks[period - 1 :: period])
