"""`plan_memory` in one process: what it says, what it refuses, and what it leaves alone."""

import contextlib
import copy
import importlib.util
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer

import layerzero
from layerzero import OffloadPolicy, ZeRO3, plan_memory
from layerzero.memory_plan.command import main
from tests.harness.models import Parts
from tests.harness.planned_models import Block, Tower
from tests.harness.ranks import KeptRanks

BATCH = torch.empty(8, 96, device="meta")
MAKE_SMALL = "tests.unit.test_memory_plan:make_small"
UNITS: Any = {"auto_wrap_policy": {Block}}


def _planned(module: nn.Module | None = None, **changes: Any) -> Any:
    """Of four ranks on the CPU, but for `changes`."""
    options = {"world_size": 4, "batch": BATCH, "device": "cpu", **UNITS, **changes}
    return plan_memory(Tower(depth=2) if module is None else module, **options)


@pytest.fixture(scope="module")
def plan() -> layerzero.memory_plan.MemoryPlan:
    return _planned(Tower(depth=2).to("meta"))


def test_kinds_add_up(plan: Any) -> None:
    assert sum(rest for rest, _ in plan.by_kind.values()) == plan.resting_bytes
    assert sum(peak for _, peak in plan.by_kind.values()) == plan.peak_bytes
    numel = sum(each.numel() for each in Tower(depth=2).parameters())
    shards = plan.by_kind["shards"][0]
    assert shards - plan.padding_bytes == numel  # bytes of float32 in one of 4 shards
    assert 0 < plan.padding_bytes < 0.01 * shards
    # Two moments of float32, and a step of 4 bytes for each parameter of which it has a piece.
    more = plan.by_kind["optimizer state"][0] - 2 * numel
    assert 0 <= more <= 2 * plan.padding_bytes + 4 * len(list(Tower(depth=2).parameters()))
    for kind in ("gradients", "full buffers", "reduction buffers", "activations"):
        rest, peak = plan.by_kind[kind]
        assert rest == 0 < peak, kind


def test_the_table_says_what_sets_the_peak(plan: Any) -> None:
    text = str(plan)
    for kind in plan.by_kind:
        assert kind in text
    assert plan.peak_moment == "backward" and plan.peak_unit == "blocks.0"
    assert "peak: backward of blocks.0" in text and "padding of the shards" in text


def test_an_optimizer_is_bytes_for_each_element(plan: Any) -> None:
    two = _planned(optimizer=2)
    # The fullest rank has no padding.
    assert two.by_kind["optimizer state"][0] == two.by_kind["shards"][0] // 2
    none = _planned(optimizer="sgd")
    assert none.by_kind["optimizer state"] == (0, 0)


def test_an_accelerator_that_is_not_here_is_planned(plan: Any) -> None:
    there = _planned(device="cuda")
    assert there.device.type == "cuda" and there.resting_bytes == plan.resting_bytes
    # A reduction there needs its result beside its input; on gloo, all received parts.
    assert there.resting_bytes < there.peak_bytes < plan.peak_bytes


def test_ignored_and_frozen_parts_are_counted_as_such() -> None:
    tower = Tower(depth=2)
    tower.blocks[0].requires_grad_(False)
    seen: list[nn.Module] = []

    def policy(module: nn.Module, fqn: str) -> bool:
        seen.append(module)
        return isinstance(module, Block)

    plan = _planned(tower, world_size=2, auto_wrap_policy=policy, ignored_modules=[tower.head])
    assert plan.by_kind["whole parameters"][0] == tower.head.weight.nbytes
    assert {id(module) for module in seen} <= {id(module) for module in tower.modules()}
    trainable = (
        sum(p.nbytes for p in tower.parameters() if p.requires_grad) - tower.head.weight.nbytes
    )
    of_state = trainable // 2 * 2 + 2 * tower.head.weight.nbytes
    more = plan.by_kind["optimizer state"][0] - of_state
    assert 0 <= more <= 2 * plan.padding_bytes + 4 * len(list(tower.parameters()))


class _Named(nn.Linear):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)


def test_batches_are_args_and_kwargs_a_tensor_or_a_dict() -> None:
    tokens = torch.empty(2, 4)
    peaks = {
        plan_memory(_Named(4, 4), world_size=2, batch=batch, device="cpu").peak_bytes
        for batch in (tokens, {"tokens": tokens}, ((tokens,), {}), ((), {"tokens": tokens}))
    }
    assert len(peaks) == 1


def _reads(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return own.layer(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"world_size": 0}, ValueError, "world_size: expected at least 1"),
        ({"world_size": 4, "zero3_size": 3}, ValueError, "zero3_size: expected a divisor"),
        ({"process_group": None}, TypeError, "pass world_size"),
        ({"shard_size": 2}, TypeError, "shard_size"),
        ({"optimizer": "adam"}, ValueError, "optimizer: expected"),
        ({"batch": [1]}, TypeError, "batch: expected"),
        ({"device": "meta"}, ValueError, "expected the CPU or an acc"),
        ({"module": Parts(_reads, layer=nn.Linear(4, 4))}, RuntimeError, "_local_scalar_dense"),
        ({"module": nn.Linear(4, 4).requires_grad_(False)}, ValueError, "empty parameter list"),
        ({"memory_budget": "1GB"}, NotImplementedError, "memory_budget cannot be planned"),
        ({"optional_modules": [nn.Linear(4, 4)]}, NotImplementedError, "optional_modules cannot"),
        ({"device": "cuda", "offload": OffloadPolicy(params=True)}, NotImplementedError, "offload"),
    ],
)
def test_bad_arguments_are_refused(change: Any, error: type[Exception], text: str) -> None:
    arguments = {
        "module": nn.Linear(4, 4),
        "world_size": 2,
        "batch": torch.empty(2, 4),
        "device": "cpu",
        **change,
    }
    with pytest.raises(error, match=text) as raised:
        plan_memory(arguments.pop("module"), **arguments)
    assert "\n" not in str(raised.value)


@pytest.fixture
def default_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_nothing_is_left_changed(default_group: None) -> None:
    tower = Tower(depth=2)
    tower.register_buffer("seen", torch.ones(3))
    tower.stem.weight.grad = torch.ones_like(tower.stem.weight)
    names = {name: id(each) for name, each in [*tower.named_parameters(), *tower.named_buffers()]}
    values = copy.deepcopy(tower.state_dict())
    dicts = {name: sorted(inner.__dict__) for name, inner in tower.named_modules()}
    random = torch.get_rng_state()
    group, threads = dist.group.WORLD, threading.active_count()
    after_steps = dict(optimizer._global_optimizer_post_hooks)
    _planned(tower, world_size=8, zero3_size=4)
    assert optimizer._global_optimizer_post_hooks == after_steps
    assert dist.group.WORLD is group and dist.get_world_size() == 1
    assert len(dist.distributed_c10d._world.pg_names) == 1
    assert threading.active_count() == threads
    assert torch.equal(torch.get_rng_state(), random)
    now = [*tower.named_parameters(), *tower.named_buffers()]
    assert names == {name: id(each) for name, each in now}
    assert all(torch.equal(value, values[name]) for name, value in tower.state_dict().items())
    assert dicts == {name: sorted(inner.__dict__) for name, inner in tower.named_modules()}
    for inner in tower.modules():
        assert not (inner._forward_hooks or inner._forward_pre_hooks or inner._backward_hooks)
    assert torch.equal(tower.stem.weight.grad, torch.ones_like(tower.stem.weight))
    model = ZeRO3(tower, **UNITS)  # It can still be wrapped, and planned no more.
    model(torch.ones(2, 96)).sum().backward()
    with pytest.raises((RuntimeError, NotImplementedError), match="wrapped"):
        plan_memory(model, world_size=2, batch=BATCH)


def make_small() -> tuple[nn.Module, Any]:
    """What a user's own `--model package.module:callable` returns."""
    return Tower(depth=2), BATCH


@pytest.mark.slow
def test_the_command_prints_tables_and_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", MAKE_SMALL, "--ranks", "4,16"]) == 0
    said = capsys.readouterr().out
    assert said.count("bytes of rank 0 of") == 2 and "optimizer state" in said
    assert "recommended zero3_size, for devices of 80.00 GB: 1 on 4 ranks, 8 on 16 ranks" in said
    assert main(["--model", MAKE_SMALL, "--ranks", "16", "--memory", "200kB"]) == 0
    assert "16 on 16 ranks" in capsys.readouterr().out


def _plan_of_config(folder: Path, *more: str) -> tuple[int, str, str]:
    transformers = importlib.import_module("transformers")
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config = transformers.BertConfig(**sizes, architectures=["BertForMaskedLM"])
    config.save_pretrained(folder)
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        code = main(["--model", str(folder), "--ranks", "4", *more])
    return code, said.getvalue(), errors.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="no transformers")
def test_the_model_of_a_transformers_config_is_planned(ranks: KeptRanks, tmp_path: Path) -> None:
    length = ("--length", "64", "--batch-size", "3")
    (code, said, _), *_ = ranks(1, _plan_of_config, tmp_path, *length)
    assert code == 0 and "peak: " in said
    assert said.startswith("BertForMaskedLM, 1.0 M parameters; input_ids, labels: [3, 64]")
    (code, _, error), *_ = ranks(1, _plan_of_config, tmp_path, "--length", "513")
    assert code == 2 and error.splitlines()[-1].startswith("python -m layerzero.plan: ")


def test_a_bad_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for model, text in (("nowhere:make", "nowhere"), (MAKE_SMALL, "memory")):
        assert main(["--model", model, "--ranks", "2", "--memory", "9"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("python -m layerzero.plan: ") and text in said
        assert said.count("\n") == 1
