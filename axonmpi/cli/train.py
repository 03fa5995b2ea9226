"""`axonmpi train`: a training run with settings from flags and a file.

Errors in the flags, the file and the text are found before MPI starts, since they need no other rank.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ..backends import NcclBackend
from ..checkpoint import PreemptionGuard
from ..comm import destroy_process_group, init_process_group
from ..errors import CheckpointError, NcclError
from ..groups.world import World
from ..launch.exit import REQUEUE_EXIT_CODE
from ..launch.launcher_variables import detect_launchers
from ..launch.user_variables import widen_terminal
from ..train.config import Config
from ..train.config_file import load_config
from ..train.corpus import Corpus, load_corpus
from ..train.trainer import Trainer
from ..utils.device import gpu_identity
from ..utils.text import lines_of_ranks, ranks_by_text, text_of_problems
from .output import print_on_first_rank, printed_once, refuse

_PROGRAM = "axonmpi train"
_FAILED = 1
_NARROWEST = 40


@dataclass(frozen=True)
class _Flags(Config):
    """Train a small GPT on text, on as many ranks as there are.

    With the default settings it takes about a minute on two cores. The same seed and global batch give the same
    loss curve, to rounding, on any number of ranks.
    """

    config: Path | None = None
    """A .toml, .yaml or .yml file with settings named as the flags below; flags override it."""

    def __post_init__(self) -> None:
        """Check nothing: tyro would print errors in a box, `Config` prints them in one line."""


def main(argv: Sequence[str]) -> int:
    """Train; collective over all ranks of the job.

    Args:
        argv: The flags.

    Returns:
        0; 85 if the run was stopped and can go on; 2 if the text or the settings cannot be used; 1 if training
        diverged or a checkpoint cannot be read or written.

    Raises:
        SystemExit: A flag or a setting in the file is unknown or bad (code 2), or help was asked for (code 0), or
            the text, the settings or the GPUs cannot be used, maybe on this rank only (code 2).
    """
    config = parse(argv)
    try:
        guard = PreemptionGuard(time_limit=config.checkpoint.time_limit or None)
    except ValueError as error:
        return refuse(_PROGRAM, str(error))
    code = _FAILED
    try:
        code = _run(config, guard)
    finally:
        if code != REQUEUE_EXIT_CODE:  # else signals do nothing to the end: launchers repeat them
            guard.close()
    return code


def _run(config: Config, guard: PreemptionGuard) -> int:
    try:
        corpus = load_corpus(config.text, config.model.sequence_length)
    except ValueError as error:
        return _refuse_file(str(error))
    world = _start(config.run.device)
    code = _train(config, world, corpus, guard)
    destroy_process_group()  # not after an exception: it waits for the other ranks, who may wait for this one
    return code


def _start(wanted: str) -> World:
    """Start the world, of GPUs if the setting `device` means GPUs on all ranks; collective.

    Raises:
        SystemExit: It means different devices on different ranks, or the GPUs cannot be used; on all ranks.
    """
    world = init_process_group()
    _check_files(world)
    kinds, reasons = zip(*world.default_group.all_gather_object(_device_type(wanted)), strict=True)
    if len(set(kinds)) > 1:
        ranks = ranks_by_text({rank: "".join(found) for rank, found in enumerate(zip(kinds, reasons, strict=True))})
        message = f"device: the ranks compute on different devices:\n  {lines_of_ranks(ranks.items())}\n"
        todo = "Take --device cpu, or start all ranks where there are GPUs and NCCL"
        raise SystemExit(refuse(_PROGRAM, message + todo))
    if kinds[0] == "cpu":
        if reason := next(filter(None, reasons), ""):
            print_on_first_rank(f"on the CPU{reason}")
        return world
    destroy_process_group()
    try:
        return init_process_group("nccl")
    except NcclError as error:
        raise SystemExit(refuse(_PROGRAM, f"{error}\nOr train on the CPU: --device cpu")) from None


def _device_type(wanted: str) -> tuple[str, str]:
    """Return the type of device on this rank, and the reason if it does not use a GPU that it sees; local."""
    if wanted != "auto":
        return wanted, ""
    if not NcclBackend.device_count():
        return "cpu", ""
    try:
        NcclBackend.nccl_version()
        gpu_identity(0)  # starts CUDA, or raises
    except (NcclError, RuntimeError) as error:
        return "cpu", f", though there is a GPU: {error}"
    return "cuda", ""


def _refuse_file(message: str) -> int:
    """Refuse a file that this rank cannot use, before anything is sent; other nodes may have it."""
    if _on_several_nodes():
        # Else ranks of other nodes would wait for this rank in MPI_Init for ever.
        _check_files(init_process_group(), message)
    return refuse(_PROGRAM, message)


def _check_files(world: World, problem: str = "") -> None:
    """End on all ranks, with code 2 and one message, if a rank has a problem with a file; collective."""
    text = text_of_problems(world.default_group.all_gather_object(problem))
    if text:
        raise SystemExit(refuse(_PROGRAM, text))


def _on_several_nodes() -> bool:
    """Return True if the launcher may have started ranks on other nodes."""
    return any(one.size is None or one.size > (one.local_size or 1) for one in detect_launchers()[:1])


def _train(config: Config, world: World, corpus: Corpus, guard: PreemptionGuard) -> int:
    try:
        trainer = Trainer(config, world, corpus=corpus, guard=guard)
        gc.freeze()  # the model, and the compiler that optimizers load, stay to the end
        summary = trainer.run()
    except ValueError as error:
        return refuse(_PROGRAM, str(error))
    except (FloatingPointError, CheckpointError) as error:
        refuse(_PROGRAM, str(error))
        return _FAILED
    return 0 if summary.complete else REQUEUE_EXIT_CODE


def parse(argv: Sequence[str]) -> Config:
    """Read the flags, and the file that `--config` names; flags override it. Local.

    Args:
        argv: The flags.

    Returns:
        The configuration.

    Raises:
        SystemExit: Code 2, after an error on stderr, for anything unknown or bad; code 0 after help.
    """
    import tyro

    try:
        base = _from_file(argv)
    except ValueError as error:
        raise SystemExit(_refuse_file(str(error))) from None
    widen_terminal(_NARROWEST)  # tyro never ends on a terminal of one or two columns
    groups = [group.name for group in fields(base)]
    default = _Flags(*(getattr(base, name) for name in groups))
    with printed_once():
        flags = tyro.cli(
            _Flags, prog=_PROGRAM, args=list(argv), default=default, config=(tyro.conf.OmitArgPrefixes,)
        )
    try:
        return Config(*(getattr(flags, name) for name in groups))
    except ValueError as error:
        raise SystemExit(refuse(_PROGRAM, str(error))) from None


def _from_file(argv: Sequence[str]) -> Config:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", nargs="?")  # without its value it is an error of the whole command line
    found, _ = finder.parse_known_args(argv)
    return load_config(found.config) if found.config else Config()
