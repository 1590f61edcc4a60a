"""What users write around a model gives the losses of plain torch, on a real group of one rank.

tests/distributed/test_mirror.py runs the same on the CPU.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import MixedPrecision, OffloadPolicy, ZeRO3, ledger, optim
from tests.gpu.mirror_runs import build
from tests.gpu.process import in_process, run_command
from tests.harness.models import Block
from tests.harness.pages import REPOSITORY, python_blocks

pytestmark = pytest.mark.gpu

WIDTH, ROWS, STEPS = 24, 8, 4


class Use(NamedTuple):
    options: Mapping[str, Any] = MappingProxyType({})
    tolerance: float = 0.0
    """Of a loss of about 1, beside plain torch."""
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    step: str = "plain"
    compiles: bool = False


def _native(state: str) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: optim.AdamW(parameters, lr=1e-3, state=state)


USES = {
    "float32": Use(),
    "bfloat16": Use({"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}, 5e-2),
    "AdamW, float32 states": Use({}, 1e-4, _native("float32")),
    "AdamW, bfloat16 states": Use({}, 2e-2, _native("bfloat16")),
    "AdamW, 8-bit states": Use({}, 5e-2, _native("8bit")),
    "fused": Use({}, 1e-4, lambda parameters: torch.optim.AdamW(parameters, fused=True)),
    "offload": Use({"offload": OffloadPolicy(params=True, grads=True)}, 1e-4),
    "prefetch": Use({"forward_prefetch": 2, "limit_all_gathers": "1MB"}),
    "no reshard": Use({"reshard_after_forward": False}),
    "verify": Use({"verify": "always"}),
    "skip": Use({"on_nonfinite": "skip"}),
    "budget": Use({"memory_budget": "2GB"}),
    "deterministic": Use({"deterministic": True}),
    "clip": Use({}, 1e-5, step="clip"),
    "accumulate": Use(step="accumulate"),
    "scaler": Use({}, 1e-3, step="scaler"),
    "evaluate": Use(step="evaluate"),
    "ledger": Use(step="ledger"),
    "compile": Use({}, 1e-5, compiles=True),
}


def _step(model: nn.Module, optimizer: Any, batch: Tensor, kind: str, scaler: Any) -> float:
    is_ours = isinstance(model, ZeRO3)

    def loss_of(rows: Tensor) -> Tensor:
        return model(rows).float().square().mean()

    if kind == "accumulate":
        with model.no_sync() if is_ours else nullcontext():
            loss_of(batch + 1).backward()
    half = torch.bfloat16 if batch.device.type == "cpu" else torch.float16
    with torch.autocast(batch.device.type, half, enabled=kind == "scaler"):
        loss = loss_of(batch)
    (scaler.scale(loss) if kind == "scaler" else loss).backward()
    if kind == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if kind == "scaler":
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()
    if kind == "evaluate":
        with torch.no_grad():
            loss = loss_of(batch)
    return loss.item()


def differences(device_type: str, names: list[str]) -> dict[str, float | str]:
    """By use: the largest difference of a loss to that of plain torch, or the error."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, float | str] = {}
    for name in names:
        use = USES[name]
        losses: list[list[float]] = []
        try:
            for is_ours in (False, True):
                model: nn.Module = build(WIDTH, 7, 3).to(device)
                if use.compiles:
                    for block in model.blocks:
                        block.compile()
                if is_ours:
                    model = ZeRO3(model, auto_wrap_policy={Block}, **use.options)
                make = use.optimizer if is_ours else torch.optim.AdamW
                optimizer = make(model.parameters())
                scaler = (layerzero if is_ours else torch.amp).GradScaler(device.type)
                torch.manual_seed(1)
                batches = torch.randn(STEPS, ROWS, WIDTH, device=device)
                with ledger(model) if is_ours and use.step == "ledger" else nullcontext():
                    losses.append([_step(model, optimizer, b, use.step, scaler) for b in batches])
            found[name] = max(abs(a - b) for a, b in zip(*losses, strict=True))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def wrong(found: dict[str, float | str]) -> dict[str, float | str]:
    return {n: d for n, d in found.items() if isinstance(d, str) or not d <= USES[n].tolerance}


def test_each_use_gives_the_losses_of_plain_torch() -> None:
    found = in_process("tests.gpu.test_uses:differences", "cuda", list(USES), timeout=110)
    assert found.keys() == USES.keys() and wrong(found) == {}


def test_the_program_of_the_readme_runs_and_resumes(tmp_path: Path) -> None:
    [program] = python_blocks((REPOSITORY / "README.md").read_text())
    script = tmp_path / "train.py"
    script.write_text(f"import os\n\nos.chdir({str(tmp_path)!r})\n{program}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for first in (1, 11):
        code, output = run_command([*launcher, "--nproc-per-node", "1", str(script)], 50)
        assert code == 0 and f"step {first}: loss" in output and "saved to run/" in output, output
