"""python -m layerzero.checkpoint: inspects, verifies and converts checkpoints in one process.

Exit status: 0 for success; 1 if something is damaged or cannot be written; 2 for a bad command or
if there is no checkpoint; 130 if interrupted. An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from layerzero.checkpoint.command.convert import convert
from layerzero.checkpoint.command.describe import describe
from layerzero.checkpoint.command.report import count_text, report, size_text
from layerzero.checkpoint.command.verify import strangers, verify
from layerzero.checkpoint.format.folder import MANIFEST, committed_steps, resolve
from layerzero.checkpoint.source import open_source
from layerzero.config import parse_nbytes
from layerzero.state_dict.errors import CheckpointError

_PROGRAM = "python -m layerzero.checkpoint"
_DTYPES = ("float64", "float32", "bfloat16", "float16")


class _Refused(Exception):
    """The command cannot run on the given paths or options (exit status 2)."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Without this, Python's flush at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except _Refused as error:
        return _fail(str(error), 2)
    except (CheckpointError, OSError) as error:
        return _fail(str(error), 1)


def _fail(reason: str, status: int) -> int:
    print(f"{_PROGRAM}: error: {reason}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Inspect, verify and convert checkpoints of layerzero, and folders or files of "
        "safetensors from elsewhere. Needs no ranks and no model.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="inspect|verify|convert")
    path = argparse.ArgumentParser(add_help=False)
    path.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a checkpoint's folder, a folder of checkpoints (means the latest one), a folder of "
        "safetensors, or one such file",
    )

    one = commands.add_parser(
        "inspect", parents=[path], help="show the contents", allow_abbrev=False
    )
    one.add_argument("--tensors", action="store_true", help="also list every tensor")
    one.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    one.set_defaults(run=_inspect)

    one = commands.add_parser(
        "verify",
        parents=[path],
        help="read every byte and compare it with the checksums; status 1 if any is damaged",
        allow_abbrev=False,
    )
    one.add_argument("--all", action="store_true", help="verify every checkpoint in the folder")
    one.set_defaults(run=_verify)

    one = commands.add_parser(
        "convert",
        parents=[path],
        help="write the weights to a separate folder, for transformers and others",
        description="Write the weights, verified while they are read, as OUT/model.safetensors, or "
        "as several files and model.safetensors.index.json. OUT appears when it is complete. A "
        "checkpoint does not contain a model's configuration and tokenizer: add their files.",
        allow_abbrev=False,
    )
    one.add_argument("out", type=Path, metavar="OUT", help="folder to create; must not exist")
    one.add_argument(
        "--dtype", choices=_DTYPES, help="cast floating-point tensors to it (default: as saved)"
    )
    one.add_argument(
        "--max-file-size", type=_nbytes, default="5GB", metavar="SIZE", help="default: %(default)s"
    )
    one.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="NAME",
        help="tensors to convert, as shell patterns such as 'encoder.*' (default: all)",
    )
    one.add_argument(
        "--strip-prefix",
        default="",
        metavar="PREFIX",
        help="remove it from all names, e.g. 'model.'",
    )
    one.set_defaults(run=_convert)
    return parser


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text, "SIZE")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _resolve(path: Path) -> Path:
    try:
        return resolve(path)
    except CheckpointError as error:
        raise _Refused(str(error)) from error


def _inspect(options: argparse.Namespace) -> int:
    _resolve(options.path)
    description = describe(options.path, options.tensors)
    if options.json:
        print(json.dumps(description, indent=1))
    else:
        for line in report(description):
            print(line)
    return 1 if "error" in description["checkpoint"] else 0


def _verify(options: argparse.Namespace) -> int:
    if not options.all:
        return _verify_one(_resolve(options.path))
    chosen = committed_steps(options.path).values()
    if not chosen:
        raise _Refused(f"{options.path}: --all needs a folder of checkpoints (step-...)")
    return max([_verify_one(path) for path in chosen])


def _verify_one(path: Path) -> int:
    """Verify one checkpoint; returns the exit status.

    Prints each file as soon as it is verified, because terabytes take long.
    """
    print(path)
    num_files = num_bad = nbytes = 0
    for found in verify(path):
        num_files += 1
        num_bad += bool(found.damages)
        nbytes += found.nbytes
        for damage in found.damages:
            print(f"  DAMAGED  {damage}", flush=True)
        if not found.damages:
            tensors = f", {count_text(found.num_tensors, 'tensor')}" if found.num_tensors else ""
            print(f"  OK       {found.path.name}  {size_text(found.nbytes)}{tensors}", flush=True)
    is_ours = (path / MANIFEST).exists()
    if num_bad:
        print(f"  damaged: {num_bad} of {count_text(num_files, 'file')}")
        return 1
    if is_ours:
        for name in strangers(path):
            print(f"  not part of the checkpoint, never opened: {name}")
    kind = "" if is_ours else "; without checkpoint.json only sizes and headers can be checked"
    print(f"  OK: {count_text(num_files, 'file')}, {size_text(nbytes)}{kind}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    path = _resolve(options.path)
    source = open_source(path, with_optimizer=False)
    try:
        done = convert(
            source,
            options.out,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            max_file_nbytes=options.max_file_size,
            only=options.only,
            strip_prefix=options.strip_prefix,
        )
    except (ValueError, FileExistsError) as error:
        raise _Refused(str(error)) from error
    cast = f", {done.num_cast} of them cast to {options.dtype}" if options.dtype else ""
    print(
        f"{options.out}: {count_text(done.num_tensors, 'tensor')}{cast}, "
        f"{size_text(done.nbytes)} in {count_text(len(done.files), 'file')}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
