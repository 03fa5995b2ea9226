"""`axonmpi checkpoint`: inspection, verification and conversion of checkpoints.

    axonmpi checkpoint inspect runs/one/latest --tensors
    axonmpi checkpoint verify runs/one/latest
    axonmpi checkpoint convert runs/one/latest weights.safetensors

No model is built. `verify` shards the work over the ranks that run it; the other actions are for one process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..checkpoint.tools import (
    FORMATS,
    Progress,
    Verification,
    convert_checkpoint,
    describe_checkpoint,
    description_text,
    verify_checkpoint,
)
from ..comm import destroy_process_group, init_process_group
from ..errors import CheckpointError
from ..launch.launcher_variables import is_first_launched, launched_ranks
from ..train.report.terminal import terminal_width
from ..utils.text import counted, printable
from .arguments import parse_arguments
from .output import print_on_first_rank, refuse

_PROGRAM = "axonmpi checkpoint"
_DAMAGED = 1
_FOREIGN = (
    "a .safetensors file, a folder of transformers, a file of torch.save (.pt, .pth, .bin, .ckpt), a folder of "
    "torch.distributed.checkpoint (DCP)"
)
_ABOUT_FORMATS = (
    "torch and dcp: {'model': state_dict, 'optimizer': state_dict, 'step': …, …}; without more than a model, its "
    "state dict alone. The optimizer's state dict names parameters and has them in the optimizer's order: "
    "optimizer.load_state_dict() loads it, and so does torch.distributed.checkpoint.state_dict. Files of torch are "
    "read with weights_only. safetensors: one file with the model alone."
)


def main(argv: Sequence[str]) -> int:
    """Inspect, verify or convert a checkpoint; `verify` is collective over all ranks of the job.

    Args:
        argv: The flags.

    Returns:
        0; 1 if the checkpoint is damaged; 2 if there is no such checkpoint, or it cannot be read or written.

    Raises:
        SystemExit: A flag is unknown or bad (code 2), or help was asked for (code 0).
    """
    options = parse_arguments(_parser(), argv)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except CheckpointError as error:
        return refuse(f"{_PROGRAM} {options.action}", printable(str(error)))


def _inspect(options: argparse.Namespace) -> int:
    described = describe_checkpoint(options.path, trust=options.trust)
    if options.json:
        print_on_first_rank(json.dumps(described, indent=2))
    else:
        print_on_first_rank(description_text(described, all_tensors=options.tensors))
    return 0


def _verify(options: argparse.Namespace) -> int:
    world = init_process_group() if launched_ranks() > 1 else None
    with _shown("verifying") as progress:
        found = verify_checkpoint(
            options.path, group=None if world is None else world.default_group, progress=progress
        )
    print_on_first_rank(_json_of(found) if options.json else printable(_text_of(options.path, found)))
    if world is not None:
        destroy_process_group()
    return 0 if found.is_whole else _DAMAGED


def _text_of(path: str, found: Verification) -> str:
    amount = f"{counted(len(found.files), 'file')} of tensors, {sum(found.files.values()):,} bytes"
    if not found.is_whole:
        return "\n".join([f"{path}: damaged", *(f"  {damage}" for damage in found.damages)])
    if found.has_checksums:
        return f"{path}: whole: {amount}, all blocks as they were written"
    return f"{path}: {amount}; there are no checksums: only headers and sizes were checked, and they are right"


def _json_of(found: Verification) -> str:
    damages = [{"file": each.file, "text": each.text, "tensors": list(each.tensors)} for each in found.damages]
    described = {
        "whole": found.is_whole,
        "checksums": found.has_checksums,
        "files": found.files,
        "damages": damages,
    }
    return json.dumps(described, indent=2)


def _convert(options: argparse.Namespace) -> int:
    if not is_first_launched():
        return 0
    with _shown("converting") as progress:
        made = convert_checkpoint(
            options.source,
            options.target,
            to=options.to,
            only_model=options.only_model,
            optimizer=options.optimizer,
            trust=options.trust,
            overwrite=options.overwrite,
            progress=progress,
        )
    beside = "" if made.optimizer_state is None else f", {counted(len(made.optimizer), 'tensor')} of the optimizer"
    print(f"{options.target}: {counted(len(made.model), 'tensor')} of the model{beside}")
    for left_out in made.left_out:
        print(f"left out: {printable(left_out)}")
    return 0


@contextmanager
def _shown(text: str) -> Iterator[Progress]:
    """Show a progress bar in the `with` block, if this is rank 0 and stderr is a terminal."""
    width = terminal_width(sys.stderr) if is_first_launched() else None
    if width is None:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(text),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(file=sys.stderr, force_terminal=True, width=width)
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# ---- options ----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="Look at, check and convert checkpoints.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = _action(actions, "inspect", _inspect, "say what is in it, without reading any value")
    inspect.add_argument("path", metavar="PATH", help=f"a checkpoint, or {_FOREIGN}")
    inspect.add_argument("--tensors", action="store_true", help="a line for each tensor")
    inspect.add_argument("--json", action="store_true", help="print all of it as JSON")
    _add_trust(inspect)
    verify = _action(actions, "verify", _verify, "read all of it, and compare every block with its checksum")
    verify.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint; a .safetensors file or a folder of transformers has none: only headers and sizes "
        "are checked",
    )
    verify.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_convert(_action(actions, "convert", _convert, "write it in another format"))
    return parser


def _action(
    actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + "."
    )
    made.set_defaults(run=run)
    return made


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust", action="store_true", help="read a folder of DCP, whose metadata is a pickle and may run code"
    )


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _ABOUT_FORMATS
    parser.add_argument("source", metavar="SOURCE", help=f"a checkpoint, or {_FOREIGN}")
    parser.add_argument("target", metavar="TARGET", help="the file or folder to make")
    parser.add_argument(
        "--to",
        choices=FORMATS,
        help="the format (default: by the name of TARGET: .safetensors; .pt, .pth, .bin, .ckpt for torch; else a "
        "checkpoint)",
    )
    parser.add_argument("--only-model", action="store_true", help="leave everything but the model's tensors out")
    parser.add_argument(
        "--optimizer",
        metavar="CLASS",
        help="the optimizer's class, such as AdamW, which files of torch do not tell",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a target that is there")
    _add_trust(parser)
