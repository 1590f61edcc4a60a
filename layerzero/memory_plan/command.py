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
_DEFAULT_LENGTH = 2048
_NAMES_OF_LENGTH = ("max_target_positions", "max_position_embeddings", "n_positions")
_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    except (AttributeError, LookupError, AssertionError) as error:
        # Raised by the model, which may be anybody's: by its config, or with this batch.
        print(f"{_PROGRAM}: --model {options.model}: {error!r}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="a transformers config (a folder, a config.json or a name), or package.module:callable"
        " that returns (module, batch)",
    )
    add("--ranks", required=True, type=_numbers, help="numbers of ranks, such as 8,64,1024")
    add("--ranks-per-node", type=int, default=8)
    add("--zero3-size", type=int, help="plan this size instead of recommending one")
    add("--memory", help="memory of one device; default: that of the device here, else 80GB")
    add("--device", help="device type to plan for, here or not; default: the accelerator, else cpu")
    add("--batch-size", type=int, default=1, help="sequences on a rank, for a transformers config")
    add(
        "--length",
        type=int,
        help="tokens of a sequence, for a transformers config; default: 2048, or as many as the"
        " model has positions for",
    )
    add("--param-dtype", choices=_DTYPES, default="bfloat16")
    add("--optimizer", default="adamw", help="adamw, sgd, or bytes of state for each element")
    add("--units", help="module classes to wrap, such as Block,Head; default: those in ModuleLists")
    return parser


def _numbers(text: str) -> list[int]:
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        expected = "expected numbers of ranks, such as 8,64,1024"
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
    return numbers


def _run(options: argparse.Namespace) -> None:
    module, batch = _load(options)
    memory = _memory(options)
    dtype = getattr(torch, options.param_dtype)
    arguments: dict[str, Any] = {
        "batch": batch,
        "device": options.device,
        "auto_wrap_policy": _units(module, options.units),
        "mixed_precision": MixedPrecision(param_dtype=dtype),
        "optimizer": _optimizer(options.optimizer),
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
    first = options.ranks_per_node if num_ranks > options.ranks_per_node else 1
    doubled = [first << times for times in range(num_ranks.bit_length())]
    return [*(size for size in doubled if size < num_ranks and num_ranks % size == 0), num_ranks]


def _load(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    if ":" in options.model:
        return _imported(options.model)
    try:
        module = _pretrained(options.model)
        batch = _batch_of(module, options.batch_size, options.length)
    except ImportError:
        raise ValueError(
            f"--model {options.model}: a transformers config needs transformers; or pass "
            "package.module:callable"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {options.model}: no config that transformers can make a model and a batch "
            f"of, nor package.module:callable: {str(error).splitlines()[0]}"
        ) from None
    numbers = sum(parameter.numel() for parameter in module.parameters())
    shapes = (f"{name} {[*value.shape]}" for name, value in batch.items() if name != "use_cache")
    print(f"{type(module).__name__}, {numbers / 1e6:,.1f} M parameters; {', '.join(shapes)}\n")
    return module, batch


def _pretrained(path: str) -> nn.Module:
    """The model of a transformers config (a folder, a config.json or a name) on the meta device,
    for training: of the first class in the config's `architectures`."""
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(path)
    name, *_ = config.architectures or [None]
    if not hasattr(transformers, str(name)):
        raise ValueError(
            f"its class (architectures) is {name}, which transformers "
            f"{transformers.__version__} does not have"
        )
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, name)(config)
    return model.train()


def _batch_of(model: Any, batch_size: int, length: int | None) -> dict[str, Any]:
    """Keyword arguments of a training step on text, on the meta device; with labels where the
    forward takes some.

    Args:
        length: tokens of a sequence; None: 2048, or as many as the model has positions for.
    """

    def integers(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int64, device="meta")

    config, takes = model.config, inspect.signature(model.forward).parameters
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"no batch is known for {type(model).__name__}, which takes "
            f"{model.main_input_name!r}; pass package.module:callable that returns (module, batch)"
        )
    if length is None:
        text = config.get_text_config()
        known = (getattr(text, name, None) for name in _NAMES_OF_LENGTH)
        length = min([_DEFAULT_LENGTH, *filter(None, known)])
    batch: dict[str, Any] = {"input_ids": integers(batch_size, length)}
    if "labels" in takes:
        is_of_sequences = type(model).__name__.endswith("SequenceClassification")
        batch["labels"] = integers(*(batch_size,) if is_of_sequences else (batch_size, length))
    elif config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    if "use_cache" in takes:
        batch["use_cache"] = False
    return batch


def _imported(path: str) -> tuple[nn.Module, Any]:
    name, _, attribute = path.partition(":")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model {path}: {error}") from None
    finally:
        sys.path.remove("")
    with torch.device("meta"):
        made = make()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    raise ValueError(
        f"--model {path}: expected a callable that returns (module, batch), got "
        f"{type(made).__name__} from it"
    )


def _units(module: nn.Module, names: str | None) -> set[type[nn.Module]] | None:
    classes = {type(inner).__name__: type(inner) for inner in module.modules()}
    if names is None:
        lists = (inner for inner in module.modules() if isinstance(inner, nn.ModuleList))
        found = {type(member) for inner in lists for member in inner}
        return {cls for cls in found if cls.forward is not nn.Module.forward} or None
    wanted = names.split(",")
    for name in wanted:
        if name not in classes:
            raise ValueError(f"--units: no module is a {name!r}; there are {', '.join(classes)}")
    return {classes[name] for name in wanted}


def _memory(options: argparse.Namespace) -> int:
    if options.memory is not None:
        return parse_nbytes(options.memory, "--memory")
    here = current_accelerator()
    if here is not None and options.device in (None, here.type):
        return int(torch.get_device_module(here).get_device_properties(here).total_memory)
    return 80 * 10**9


def _optimizer(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text
