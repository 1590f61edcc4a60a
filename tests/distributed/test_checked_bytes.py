"""`verify=`: single flipped bits are found, nothing else is called corruption, no rank steps."""

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import MixedPrecision, OffloadPolicy, ReductionPolicy, ZeRO3
from layerzero.errors import CorruptionError
from layerzero.step.context import RuntimeContext
from layerzero.verify.verifier import Verifier
from tests.harness.checks import named
from tests.harness.flips import REPLICA, SITES, Trials, flip
from tests.harness.models import Block
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import KeptRanks, of_all_ranks, on_ranks
from tests.harness.simulated_device import simulated_device

TIMEOUT = timedelta(seconds=20)
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

Optimizer = Callable[..., torch.optim.Optimizer]
_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
_SGD = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
_NATIVE = functools.partial(layerzero.optim.AdamW, lr=1e-3)
_IN_8_BITS, _IN_BF16 = (functools.partial(_NATIVE, state=state) for state in ("8bit", "bfloat16"))
_WHOLE = functools.partial(
    layerzero.optim.WholeTensorOptimizer, optimizer_class=torch.optim.SGD, lr=1e-2
)
TWO_RANKS: dict[str, tuple[dict[str, Any], Optimizer]] = {
    "plain": ({}, _ADAMW),
    "bf16": ({"mixed_precision": BF16}, _SGD),
    "bf16 on the wire": ({"mixed_precision": LOW, "deterministic": True}, _NATIVE),
    "8-bit": (
        {"reduction": ReductionPolicy(in_flight="1GB")},
        _IN_8_BITS,
    ),
    "offload": ({"offload": OffloadPolicy(params=True, grads=True)}, _ADAMW),
    "step in backward": ({"step_in_backward": True}, _ADAMW),
}
FOUR_RANKS: dict[str, tuple[dict[str, Any], Optimizer]] = {
    "zero1": ({"zero3_size": 2, "mixed_precision": BF16}, _ADAMW),
    "replicate": ({"zero3_size": 2, "outer": "replicate"}, _ADAMW),
    "shard": ({"zero3_size": 2, "outer": "shard", "reshard_after_forward": "compute_shard"}, _SGD),
    "zero1, in order": (
        {"zero3_size": 2, "deterministic": True},
        _IN_BF16,
    ),
    "lanes": ({"zero3_size": 2, "reduction": ReductionPolicy(separate_groups=True)}, _WHOLE),
}


def _trials(settings: dict[str, Any], make: Optimizer, seed: int) -> Trials:
    given = dict(settings)
    backward_steps = given.pop("step_in_backward", False)
    model, optimizer, _ = _model(make, **given)
    if backward_steps:
        model.step_in_backward(optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def forward() -> torch.Tensor:
        loss: torch.Tensor = model(torch.randn(4, 5, generator=generator)).float().square().mean()
        return loss

    return Trials(model, optimizer, forward, random.Random(seed), backward_steps)


def _flip_under(names: dict[str, int], seed: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in names.items():
        settings, make = {**TWO_RANKS, **FOUR_RANKS}[name]
        trials = _trials(settings, make, seed)
        sites = (*SITES, REPLICA) if settings.get("outer") == "replicate" else SITES
        with named(f"settings {name!r}, seed {seed}"):
            trials.run(count, sites)
        found += trials.found
    return found


@on_ranks(2)
def test_single_flipped_bits_are_found_on_two_ranks() -> None:
    _micro_batches()
    _what_is_evaluated()
    _off()
    found = of_all_ranks(_flip_under(dict.fromkeys(TWO_RANKS, 6), 0))[0]
    assert all(found[site] >= 12 for site in SITES), found


@on_ranks(4)
def test_single_flipped_bits_are_found_in_layered_modes() -> None:
    found = of_all_ranks(_flip_under(dict.fromkeys(FOUR_RANKS, 3), 1))[0]
    assert all(found[site] >= 3 for site in SITES) and found[REPLICA], found


@pytest.mark.slow
def test_flipped_bits_are_found_on_three_ranks(ranks: KeptRanks) -> None:
    found = ranks(3, _flip_under, {"plain": 10, "8-bit": 5, "bf16": 5}, 2)[0]
    assert all(found[site] >= 5 for site in SITES), found


@pytest.mark.soak
def test_ten_thousand_flipped_bits(ranks: KeptRanks, request: pytest.FixtureRequest) -> None:
    """With `--seeds 200` (make soak); without, a few hundred."""
    scale = max(2, request.config.getoption("seeds") // 2)
    two = dict.fromkeys(TWO_RANKS, 15 * scale)
    four = dict.fromkeys(FOUR_RANKS, 8 * scale)
    found = ranks(2, _flip_under, two, 3, timeout=7200.0)[0]
    found += ranks(4, _flip_under, four, 4, timeout=7200.0)[0]
    print(f"found {sum(found.values())} flips: {dict(found)}")
    # The others are trials in which the step had no such collective, and nothing was flipped.
    assert sum(found.values()) >= 0.95 * (sum(two.values()) + sum(four.values()))


def _model(make: Optimizer = _ADAMW, **given: Any) -> tuple[ZeRO3, Any, Callable[[], None]]:
    given = {"verify": "always", "timeout": TIMEOUT, **given}
    torch.manual_seed(0)
    module = nn.Sequential(Block(), Block(), nn.Linear(5, 3))
    model = ZeRO3(module, auto_wrap_policy={Block}, **given)
    optimizer = make(model.parameters())

    def step() -> None:
        model(torch.ones(4, 5)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _micro_batches() -> None:
    """The bytes of a micro-batch are compared with the last one, also if a pass fails in between;
    then all of its micro-batches are dropped, as their sum is not right."""
    model, optimizer, step = _model()
    clean, clean_optimizer, clean_step = _model(verify=None)
    step()
    clean_step()
    for fails in (False, True):
        corrupted = mock.patch.object(Verifier, "_gathered", _flips_the_second())
        with corrupted, model.no_sync():
            model(torch.ones(4, 5)).square().mean().backward()
        if fails:
            with pytest.raises(ZeroDivisionError):
                loss = model(torch.ones(4, 5)).mean()
                loss.register_hook(lambda _: 1 // 0)
                loss.backward()
        with pytest.raises(CorruptionError, match="all-gather of"):
            model(torch.ones(4, 5)).square().mean().backward()
        for each, its in ((model, optimizer), (clean, clean_optimizer)):
            with each.no_sync():
                each(torch.ones(4, 5)).square().mean().backward()
            each(torch.ones(4, 5)).square().mean().backward()
            its.step()
            its.zero_grad()
        assert all(map(torch.equal, model.parameters(), clean.parameters()))


def _what_is_evaluated() -> None:
    model, _, step = _model()
    step()
    with torch.no_grad():
        model(torch.ones(4, 5))
        corrupted = mock.patch.object(Verifier, "_gathered", _flips_the_second())
        with corrupted, pytest.raises(CorruptionError, match="all-gather of"):
            model(torch.ones(4, 5))


def _off() -> None:
    model, _, step = _model(verify=None)
    assert type(model._root_state.context) is RuntimeContext
    step()
    with pytest.raises(ValueError, match="verify: expected 'sampled', 'always' or None"):
        _model(verify="often")
    names = {0: "always", 1: "sampled"}
    with pytest.raises(ValueError, match="verify"):
        _model(verify=names[dist.get_rank()])


def _flips_the_second() -> Callable[..., None]:
    """`Verifier._gathered` that flips a bit of the second gather on one rank."""
    real, number = Verifier._gathered, dist.get_rank()

    def gathered(self: Any, operation: Any, group: Any, sum_: Any, slices: Any, sent: Any) -> None:
        nonlocal number
        number += 1
        if number == 2:
            flip(slices[1 - group.rank], 9)
        real(self, operation, group, sum_, slices, sent)

    return gathered


@on_ranks(2)
def test_backends_whose_messages_carry_no_name_and_devices_are_checked_too() -> None:
    """Where the engine sees no message: what came is corrupted before its first use."""
    group = make_plain_group(TIMEOUT)
    for context in (contextlib.nullcontext(), simulated_device()):
        with context:
            _, _, step = _model(process_group=group)
            for _ in range(3):
                step()
            corrupted = mock.patch.object(Verifier, "_gathered", _flips_the_second())
            with corrupted, pytest.raises(CorruptionError, match="all-gather of"):
                step()
            step()
