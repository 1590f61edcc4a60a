"""python -m layerzero.plan: plans the memory of a model on several numbers of ranks.

Prints a table for each number, and recommends `zero3_size` by the rule of docs/howto/zero3_size.md.
Exit status: 0 for success, 2 for a bad command. An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from layerzero.build.device import current_accelerator
from layerzero.config import MixedPrecision, parse_nbytes, size_text
from layerzero.memory_plan.plan import plan_memory

_PROGRAM = "python -m layerzero.plan"
_RANKS_OF_A_NODE = 8
_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except Exception as error:  # The model may be anybody's.
        text = str(error).partition("\n")[0]
        print(
            f"{_PROGRAM}: --model {options.model}: {type(error).__name__}: {text}", file=sys.stderr
        )
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="a transformers config (a folder, a config.json or a name) of a text model, or "
        "package.module:callable that returns (module, batch)",
    )
    add("--ranks", required=True, type=_numbers, help="numbers of ranks, such as 8,64,1024")
    add("--zero3-size", type=int, help="plan this size instead of recommending one")
    add("--memory", help="memory of one device; default: that of the device here, else 80GB")
    add("--device", help="device type to plan for, here or not; default: the accelerator, else cpu")
    add("--batch-size", type=int, default=1, help="sequences on a rank, for a transformers config")
    add("--length", type=int, default=2048, help="tokens of a sequence, for a transformers config")
    add("--param-dtype", choices=_DTYPES, default="bfloat16")
    return parser


def _numbers(text: str) -> list[int]:
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        expected = "expected numbers of ranks, such as 8,64,1024"
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
    return numbers


def _run(options: argparse.Namespace) -> None:
    load = _imported if ":" in options.model else _pretrained
    module, batch = load(options)
    memory = _memory(options)
    # The members of ModuleLists are units.
    lists = (inner for inner in module.modules() if isinstance(inner, nn.ModuleList))
    units = {type(member) for inner in lists for member in inner}
    arguments: dict[str, Any] = {
        "batch": batch,
        "device": options.device,
        "auto_wrap_policy": {cls for cls in units if cls.forward is not nn.Module.forward} or None,
        "mixed_precision": MixedPrecision(param_dtype=getattr(torch, options.param_dtype)),
    }
    chosen = []
    for num_ranks in options.ranks:
        for size in _sizes(num_ranks, options):
            plan = plan_memory(module, world_size=num_ranks, zero3_size=size, **arguments)
            if plan.peak_bytes <= memory:
                break
        chosen.append(plan)
        print(f"{plan}\n")
    print(f"{'ranks':>6}  {'zero3_size':>10}  {'at rest':>10}  {'at the peak':>11}")
    for plan in chosen:
        rest, peak = size_text(plan.resting_bytes), size_text(plan.peak_bytes)
        over = "" if plan.peak_bytes <= memory else f"  does not fit in {size_text(memory)}"
        print(f"{plan.world_size:>6}  {plan.zero3_size:>10}  {rest:>10}  {peak:>11}{over}")
    if options.zero3_size is None:
        sizes = ", ".join(f"{plan.zero3_size} on {plan.world_size} ranks" for plan in chosen)
        print(f"recommended zero3_size, for devices of {size_text(memory)}: {sizes}")


def _sizes(num_ranks: int, options: argparse.Namespace) -> list[int]:
    """The sizes of which the smallest that fits is recommended, from that of a node on."""
    if options.zero3_size is not None:
        return [options.zero3_size]
    first = _RANKS_OF_A_NODE if num_ranks > _RANKS_OF_A_NODE else 1
    doubled = [first << times for times in range(num_ranks.bit_length())]
    return [*(size for size in doubled if size < num_ranks and num_ranks % size == 0), num_ranks]


def _pretrained(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a transformers config on the meta device, of the first class in the config's
    `architectures`; and a batch of text, with labels where its forward takes some."""
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(options.model)
    (name, *_) = config.architectures or [None]
    with torch.device("meta"):
        model: Any = getattr(transformers, str(name))(config).train()
        tokens = torch.empty((options.batch_size, options.length), dtype=torch.int64, device="cpu")
    takes = inspect.signature(model.forward).parameters
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    batch = {name: value for name, value in batch.items() if name in takes}
    numel = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}, {numel / 1e6:,.1f} M parameters; {', '.join(batch)}: {[*tokens.shape]}\n")
    return model, batch


def _imported(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    name, _, attribute = options.model.partition(":")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(name), attribute)
    finally:
        sys.path.remove("")
    with torch.device("meta"):
        module, batch = make()
    return module, batch


def _memory(options: argparse.Namespace) -> int:
    if options.memory is not None:
        return parse_nbytes(options.memory, "--memory")
    here = current_accelerator()
    if here is not None and options.device in (None, here.type):
        return int(torch.get_device_module(here).get_device_properties(here).total_memory)
    return 80 * 10**9
