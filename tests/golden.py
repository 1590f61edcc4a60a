"""Golden runs: what 40 ways to train leave after each step, bit for bit, and what the package says.

    python -m tests.golden build/golden.json                  # at the commit before a change
    python -m tests.golden --against build/golden.json        # at the commit after it

For changes that move code and are not meant to change numbers. A run is six steps of a toy model on
gloo ranks; after each, `step_signature` covers all weights and all optimizer state. Beside the runs
it records the public names with their signatures, and the text of every exception and warning that
the package's source spells out. Bits depend on the processor and on torch: compare on one machine.
"""

import argparse
import ast
import inspect
import json
import multiprocessing
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero import BackwardPrefetch, MixedPrecision, OffloadPolicy, ZeRO3
from tests.harness.models import CASES, Block, Mlp, loss_of
from tests.harness.ranks import KeptRanks
from tests.harness.reference import batches_of, seeded

STEPS = 6
PACKAGE = Path(layerzero.__file__).parent
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Tower(nn.Module):
    """A trunk, and a tower that odd ranks skip at some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.tower = Mlp(), Block()

    def forward(self, x: Tensor, enters: bool) -> Tensor:
        out = self.trunk(x)
        return out + self.tower(x).mean() if enters else out


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def native(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: layerzero.optim.AdamW(model.parameters(), lr=1e-2, **options)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.layerzero.ndim == 2]
    return layerzero.optim.WholeTensorOptimizer(matrices, torch.optim.Muon, lr=1e-2)


def plain(model: ZeRO3, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    loss_of(model(batches[0])).backward()


def clipped(model: ZeRO3, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    plain(model, optimizer, batches)
    model.clip_grad_norm_(0.1)


def accumulated(model: ZeRO3, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    for index, batch in enumerate(batches):
        with model.no_sync() if index < len(batches) - 1 else nullcontext():
            loss_of(model(batch)).backward()


def interleaved(model: ZeRO3, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    for loss in [loss_of(model(batch)) for batch in batches]:
        loss.backward()


def recomputed(model: ZeRO3, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    loss_of(checkpoint(model, batches[0], use_reentrant=False)).backward()


def under_autocast(model: ZeRO3, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(batches[0]))
    loss.backward()


def evaluated(model: ZeRO3, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    plain(model, optimizer, batches)
    with torch.no_grad():
        model.eval()(batches[1])
    model.train()


def frozen_in_turns(model: ZeRO3, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    is_even = getattr(optimizer, "golden_step", 0) % 2 == 0
    optimizer.golden_step = getattr(optimizer, "golden_step", 0) + 1
    for name, parameter in model.named_parameters():
        if "blocks.0" in name:
            parameter.requires_grad_(is_even)
    plain(model, optimizer, batches)


def in_backward(model: ZeRO3, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    model.step_in_backward(optimizer)
    plain(model, optimizer, batches)
    optimizer.zero_grad()


def skipping(model: ZeRO3, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    step = getattr(optimizer, "golden_step", 0)
    optimizer.golden_step = step + 1
    loss_of(model(batches[0], (step + dist.get_rank()) % 3 > 0)).backward()


def joined(model: ZeRO3, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    with layerzero.join(model, optimizer):
        for batch in batches[: 2 + dist.get_rank() % 2]:
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()


def in_rounds(names: list[str]) -> list[tuple[str, int, dict[str, Any]]]:
    return [(f"{name}, 2 ranks", 2, {"case": name}) for name in names]


LLM = {"case": "transformer", "optimizer": adamw}
RUNS: list[tuple[str, int, dict[str, Any]]] = [
    *in_rounds([name for name in CASES if not name.endswith("_output")]),
    ("adamw, 3 ranks", 3, LLM),
    ("adamw, 4 ranks", 4, LLM),
    ("layered zero1", 4, {**LLM, "zero3_size": 2}),
    ("layered zero1, micro-batches", 4, {**LLM, "zero3_size": 2, "run": accumulated}),
    ("layered replicate", 4, {**LLM, "zero3_size": 2, "outer": "replicate"}),
    ("layered shard", 4, {**LLM, "zero3_size": 2, "outer": "shard"}),
    (
        "compute shard",
        4,
        {**LLM, "zero3_size": 2, "outer": "shard", "reshard_after_forward": "compute_shard"},
    ),
    ("deterministic", 3, {**LLM, "deterministic": True}),
    ("bf16", 2, {**LLM, "mixed_precision": BF16}),
    ("bf16, layered", 4, {**LLM, "mixed_precision": BF16, "zero3_size": 2}),
    ("bf16, clipped", 2, {**LLM, "mixed_precision": BF16, "run": clipped}),
    ("kept full", 2, {**LLM, "reshard_after_forward": False}),
    ("no prefetch", 2, {**LLM, "forward_prefetch": 0, "backward_prefetch": None}),
    (
        "prefetch 2, post",
        2,
        {
            **LLM,
            "forward_prefetch": 2,
            "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
            "limit_all_gathers": "1MB",
        },
    ),
    ("offload", 2, {**LLM, "offload": OffloadPolicy(params=True, grads=True, pin_memory=False)}),
    ("micro-batches, unsharded", 2, {**LLM, "accumulation": "unsharded", "run": accumulated}),
    ("micro-batches, sharded", 2, {**LLM, "accumulation": "sharded", "run": accumulated}),
    ("several forwards", 2, {**LLM, "run": interleaved}),
    ("recomputed", 2, {**LLM, "run": recomputed}),
    ("autocast", 2, {**LLM, "run": under_autocast}),
    ("evaluated between", 2, {**LLM, "run": evaluated}),
    ("frozen in turns", 2, {"case": "mlp", "optimizer": sgd, "run": frozen_in_turns}),
    ("step in backward", 2, {"case": "mlp", "optimizer": adamw, "run": in_backward}),
    ("sum", 2, {**LLM, "gradient_reduction": "sum"}),
    ("verified", 2, {**LLM, "verify": "always"}),
    ("on_nonfinite", 2, {**LLM, "on_nonfinite": "skip"}),
    ("native adamw", 2, {**LLM, "optimizer": native(), "run": clipped}),
    ("native adamw, bf16 state", 2, {**LLM, "optimizer": native(state="bfloat16")}),
    ("native adamw, 8 bit", 2, {**LLM, "optimizer": native(state="8bit")}),
    ("muon", 2, {**LLM, "optimizer": muon}),
    ("optional", 3, {"build": Tower, "units": {Block}, "run": skipping, "optional": "tower"}),
    ("joined", 2, {"case": "mlp", "optimizer": sgd, "run": joined, "steps_itself": True}),
]


def train(index: int) -> list[str]:
    """Train one way; the signature after each step. Called on each rank."""
    options = dict(RUNS[index][2])
    case = CASES[options.pop("case", "mlp")]
    build = options.pop("build", case.build)
    make_optimizer, run = options.pop("optimizer", sgd), options.pop("run", plain)
    steps_itself, optional = options.pop("steps_itself", False), options.pop("optional", None)
    module = seeded(build)
    if optional is not None:
        options["optional_modules"] = [module.get_submodule(optional)]
    units = options.pop("units", None) or set(case.units) or None
    model = ZeRO3(module, auto_wrap_policy=units, **options)
    optimizer = make_optimizer(model)
    found = []
    batches = batches_of(case, dist.get_world_size(), STEPS * 3)
    for step in range(STEPS):
        optimizer.zero_grad()
        own = [batches[3 * step + part][dist.get_rank()] for part in range(3)]
        run(model, optimizer, own)
        if not steps_itself and run is not in_backward:
            optimizer.step()
        found.append(model.step_signature(optimizer))
    return found


def public_names() -> dict[str, str]:
    """The names that users may import, with their signatures."""
    found = {}
    for module in (layerzero, layerzero.optim, layerzero.checkpoint, layerzero.errors):
        for name in sorted(getattr(module, "__all__", None) or vars(module)):
            value = getattr(module, name)
            if name.startswith("_") or inspect.ismodule(value):
                continue
            members = vars(value) if inspect.isclass(value) else {}
            for key, each in {"": value, **members}.items():
                if callable(each) and not key.startswith("_"):
                    full = ".".join(filter(None, (module.__name__, name, key)))
                    try:
                        found[full] = str(inspect.signature(each))
                    except ValueError:
                        found[full] = "?"
    return found


def messages() -> list[str]:
    """The text of each exception raised and each warning issued, with {} for what is filled in."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_warning = isinstance(node, ast.Call) and "warn" in ast.unparse(node.func)
            if isinstance(node, ast.Raise) or is_warning:
                for each in ast.walk(node):
                    if isinstance(each, ast.JoinedStr):
                        parts = (getattr(part, "value", None) for part in each.values)
                        found.add("".join(p if isinstance(p, str) else "{}" for p in parts))
                    elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                        found.add(each.value)
    return sorted(text for text in found if " " in text)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line for each run, name or message that is not the same in both."""
    lines = []
    for kind in ("runs", "names"):
        for name in sorted({*old[kind], *new[kind]}):
            before, after = old[kind].get(name), new[kind].get(name)
            if before != after:
                lines.append(f"{kind}: {name}: {before} -> {after}")
    gone, came = ({*old["messages"]} - {*new["messages"]}, {*new["messages"]} - {*old["messages"]})
    lines += [f"message gone: {text}" for text in sorted(gone)]
    return lines + [f"message new: {text}" for text in sorted(came)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="where to write what this commit gives")
    parser.add_argument("--against", type=Path, help="compare with such a file, and write nothing")
    parser.add_argument("-k", default="", help="only runs whose name contains this")
    arguments = parser.parse_args()
    runs, ranks = {}, KeptRanks()
    for index, (name, world_size, _) in enumerate(RUNS):
        if arguments.k in name:
            try:
                runs[name] = ranks(world_size, train, index, timeout=120)[0]
            except AssertionError as error:
                runs[name] = ["failed"]
                print(f"{name}: {str(error)[-1500:]}", file=sys.stderr)
            print(f"{name}: {runs[name][-1]}", file=sys.stderr)
    ranks.close()
    new = {"runs": runs, "names": public_names(), "messages": messages()}
    if arguments.against is None:
        text = json.dumps(new, indent=1)
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        arguments.file.write_text(text) if arguments.file else print(text)
        return 0
    old = json.loads(arguments.against.read_text())
    old["runs"] = {name: each for name, each in old["runs"].items() if arguments.k in name}
    lines = differences(old, new)
    print("\n".join(lines) or f"{len(runs)} runs, {len(new['names'])} names: nothing differs")
    return int(any(line.startswith("runs") for line in lines))


if __name__ == "__main__":
    multiprocessing.freeze_support()
    # Ranks unpickle functions by the name of their module, which here would be __main__.
    from tests import golden

    sys.exit(golden.main())
