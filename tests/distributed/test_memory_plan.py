"""`plan_memory` against the storages of real steps on gloo: models, settings, features."""

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from layerzero import BackwardPrefetch, MixedPrecision, ReductionPolicy, plan_memory
from tests.harness.counted_memory import Measured, measure
from tests.harness.planned_models import CASES, Batch, Block, Tower
from tests.harness.ranks import run_ranks

BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SEVERAL = ReductionPolicy(in_flight="1MB")


class Wish(NamedTuple):
    """What is measured on every rank, and planned on one."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    optimizer: str
    arguments: Callable[[], dict[str, Any]]
    """Of `ZeRO3`."""


Compared = dict[str, tuple[Measured, Any]]


def _of_rank(names: list[str]) -> Compared:
    """What each wish takes on this rank; and its plan, if it is this rank's turn to make it."""
    found: Compared = {}
    # A model on one rank, in all settings: torch remembers what its operators return.
    models = list(dict.fromkeys(name.partition(": ")[0] for name in names))
    mine = models[dist.get_rank() :: dist.get_world_size()]
    for name in names:
        wish = WISHES[name] if name in WISHES else _in_setting(*name.split(": "))
        torch.manual_seed(0)
        arguments = wish.arguments()
        measured, plan = measure(wish.make, wish.batch(), wish.optimizer, arguments, 5), None
        module = wish.make()  # On all ranks: a DTensor's is collective.
        if name.partition(": ")[0] in mine:
            group = arguments.pop("process_group", dist.group.WORLD)
            of = {"world_size": group.size(), "device": "cpu", "optimizer": wish.optimizer}
            plan = plan_memory(module, batch=wish.batch(), **of, **arguments)
        found[name] = measured, plan
    return found


def _compare(num_ranks: int, names: list[str]) -> list[str]:
    """The wishes whose plan is off by more than 5 %."""
    ranks, bad = run_ranks(num_ranks, _of_rank, names, timeout=900), []
    for name in names:
        plan = next(of[name][1] for of in ranks if of[name][1] is not None)
        resting, peak = map(max, zip(*(of[name][0] for of in ranks), strict=True))
        resting, peak = plan.resting_bytes / resting, plan.peak_bytes / peak
        print(name, num_ranks, plan.peak_moment, plan.peak_unit, resting, peak)
        if abs(resting - 1) > 0.05 or abs(peak - 1) > 0.05:
            bad.append(f"{name}, {num_ranks} ranks: resting {resting:.3f}, peak {peak:.3f}")
    return bad


SETTINGS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "2 ranks": (2, "adamw", {}),
    "bfloat16": (2, "sgd", {"mixed_precision": BFLOAT16, "limit_all_gathers": "400kB"}),
    "kept": (2, "adamw", {"reshard_after_forward": False, "backward_prefetch": None}),
    "layered": (4, "adamw", {"zero3_size": 2, "mixed_precision": BFLOAT16}),
    "replicated": (4, "sgd", {"zero3_size": 2, "outer": "replicate", "deterministic": True}),
    "one hop": (
        4,
        "adamw",
        {"zero3_size": 2, "outer": "shard", "reshard_after_forward": "compute_shard"},
    ),
    "on demand": (2, "sgd", {"forward_prefetch": False, "backward_prefetch": None}),
    "post": (2, "sgd", {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
    "whole": (2, "adamw", {"zero3_size": 1, "mixed_precision": BFLOAT16}),
    "several": (2, "sgd", {"reduction": SEVERAL, "forward_prefetch": 2}),
}


def _in_setting(case: str, setting: str) -> Wish:
    _, optimizer, arguments = SETTINGS[setting]
    if CASES[case].float32_only:
        arguments = {name: of for name, of in arguments.items() if name != "mixed_precision"}
    arguments = {**arguments, "auto_wrap_policy": CASES[case].units}
    return Wish(CASES[case].make, CASES[case].batch, optimizer, lambda: {**arguments})


class Experts(nn.ModuleList):
    """Those of this rank, each for a part of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([e(part) for e, part in zip(self, x.chunk(len(self)), strict=True)])


class Mixture(nn.Module):
    """Layers of a dense block and experts."""

    def __init__(self, depth: int = 2, hidden: int = 128) -> None:
        super().__init__()
        self.stem = nn.Linear(96, 96)
        self.dense = nn.ModuleList(Block(96, 192) for _ in range(depth))
        self.experts = nn.ModuleList(
            Experts(Block(96, hidden) for _ in range(2)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for dense, experts in zip(self.dense, self.experts, strict=True):
            x = experts(dense(x))
        return x


@cache
def _grid(shape: tuple[int, int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "edp", "ep"))


def _with_experts(ep: int, num_outer: int = 1, hidden: int = 128, **of: Any) -> Wish:

    def arguments() -> dict[str, Any]:
        mesh = _grid((num_outer, dist.get_world_size() // ep // num_outer, ep))
        same = mesh["outer", "edp"] if num_outer > 1 else mesh["edp"]
        experts = {"process_group": same, "expert_numbers": mesh["ep"]}

        def policy(module: nn.Module, fqn: str) -> Any:
            return experts if isinstance(module, Experts) else fqn[:6] == "dense."

        return {**of, "auto_wrap_policy": policy}

    make = partial(Mixture, hidden=hidden)
    return Wish(make, lambda: ((torch.randn(16, 96),), {}), "adamw", arguments)


def _tensor_parallel(size: int, **of: Any) -> Wish:

    def mesh() -> DeviceMesh:
        return _grid((1, dist.get_world_size() // size, size))

    def make() -> nn.Module:
        styles = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        return parallelize_module(Tower(), mesh()["ep"], styles)

    of["auto_wrap_policy"] = {Block}
    batch = CASES["many tokens"].batch
    return Wish(make, batch, "adamw", lambda: {**of, "process_group": mesh()["edp"]})


WISHES = {
    "experts, large": _with_experts(2, hidden=1024, reshard_after_forward=False),
    "experts, mesh": _with_experts(2, 2, outer="replicate", zero3_size=1),
    "tensor parallel": _tensor_parallel(2, mixed_precision=BFLOAT16),
}
MORE = ["tower: on demand", "odd: post", "gpt: whole", "adapted: several"]


def _all(num_ranks: int) -> list[str]:
    """All models in the settings of so many ranks among the first six."""
    six = [name for name in list(SETTINGS)[:6] if SETTINGS[name][0] == num_ranks]
    return [f"{case}: {setting}" for case, setting in itertools.product(CASES, six)]


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ["tower: 2 ranks", "tied gpt: bfloat16", "tower: whole", "experts, large"]),
        pytest.param(4, ["experts, mesh", "tensor parallel"], marks=pytest.mark.slow),
        pytest.param(2, MORE, marks=pytest.mark.slow),
        pytest.param(2, _all(2), marks=pytest.mark.soak),
        pytest.param(4, _all(4), marks=pytest.mark.soak),
    ],
)
def test_the_planned_peak_is_the_measured_one(num_ranks: int, names: list[str]) -> None:
    assert _compare(num_ranks, names) == []
