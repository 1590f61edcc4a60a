"""Under a ledger the engine computes the same bits, in every mode, and its figures agree; on the
simulated device its events add no race, and no wait of the host in a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import layerzero
from layerzero import ReductionPolicy, ZeRO3
from layerzero.step_ledger import Ledger
from tests.harness.checks import check_ledger, of_milliseconds
from tests.harness.fake_ranks import run_fake_ranks
from tests.harness.models import Block, Mlp
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.simulated_device import simulated_device
from tests.harness.stream_uses import (
    HOST_USES,
    LAYERED,
    OFFLOADED,
    SETTINGS,
    USES,
    accumulation,
    evaluation_between,
    plain_steps,
    train,
    wrapped,
)

MORE: dict[str, dict[str, Any]] = {
    "two lanes": {"reduction": ReductionPolicy(separate_groups=True, in_flight="1MB")},
    "verified": {"verify": "always"},
    "verified layers": {"verify": "always", "zero3_size": 2},
    "optional modules": {"optional": (1,)},
}
FEW = ("default", "no prefetch", "sums in shards")
OF_A_LEDGER = (*FEW, "stays full", "zero1", "kept shards", "whole parameters", "parameters", *MORE)
"""Settings that differ in what a ledger sees: when gathers begin, how many hops they have, what is
freed and where sums are. `make soak` runs all of them."""


def _wrapped(optional: tuple[int, ...] = (), **arguments: Any) -> ZeRO3:
    torch.manual_seed(0)
    module = Mlp(3)
    if optional:
        arguments["optional_modules"] = [module.blocks[index] for index in optional]
    return ZeRO3(module, auto_wrap_policy={Block}, **arguments)


def _parameters_after(settings: dict[str, Any], use: Callable[..., Any], ledger: bool) -> Any:
    model = _wrapped(**settings)
    with layerzero.ledger(model) if ledger else nullcontext() as found:
        use(model)
    if ledger:
        check(model, found)
    return [parameter.detach().clone() for parameter in model.parameters()]


def check(model: ZeRO3, ledger: Ledger) -> None:
    rows = ledger.units
    assert [row.fqn for row in rows] == [view.fqn for view in layerzero.units(model)]
    check_ledger(ledger)
    for row in rows:
        assert row.gather_ms == 0 or row.gather_bytes > 0
        assert row.reduce_ms == 0 or row.reduce_bytes > 0
    assert ledger.num_steps > 0
    own = next(each for each in ledger.ranks if each.step_ms == of_milliseconds(ledger.step_ms))
    assert own.exposed_gather_ms == of_milliseconds(sum(row.exposed_gather_ms for row in rows))
    assert own.exposed_reduce_ms == of_milliseconds(sum(row.exposed_reduce_ms for row in rows))


def _same_bits(settings: dict[str, dict[str, Any]], uses: list[Callable[..., Any]]) -> None:
    for name, arguments in settings.items():
        for use in uses:
            plain = _parameters_after(arguments, use, ledger=False)
            recorded = _parameters_after(arguments, use, ledger=True)
            for one, other in zip(plain, recorded, strict=True):
                assert torch.equal(one, other), (name, use.__name__)


GROUPS = {"": SETTINGS, "layered, ": LAYERED, "more, ": MORE, "offloaded, ": OFFLOADED}
ALL = {(group, name): of for group, each in GROUPS.items() for name, of in each.items()}
ONE_HOP_AND_TWO = [("", "default"), ("layered, ", "zero1"), ("more, ", "optional modules")]
ONE_HOP_AND_TWO.append(("more, ", "verified"))


def test_a_ledger_changes_no_bits_with_one_hop_and_two(ranks: KeptRanks) -> None:
    few = {"".join(key): ALL[key] for key in ONE_HOP_AND_TWO}
    ranks(4, _same_bits, few, [accumulation], timeout=120)


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_a_ledger_changes_no_bits_in_any_use(in_full: bool) -> None:
    """Each use in one of the settings, `make soak`: in each."""
    for number, name in enumerate(FEW):
        _same_bits({name: SETTINGS[name]}, USES if in_full else USES[number :: len(FEW)])


@pytest.mark.slow
def test_a_ledger_changes_no_bits_in_any_mode(ranks: KeptRanks, in_full: bool) -> None:
    chosen = {
        "".join(key): each
        for key, each in ALL.items()
        if in_full or (key[1] in OF_A_LEDGER and key not in ONE_HOP_AND_TWO)
    }
    uses = [accumulation, evaluation_between] if in_full else [accumulation]
    for size in (2, 4):  # As few ranks as have every axis.
        some = {n: each for n, each in chosen.items() if 2 * each.get("zero3_size", 1) == size}
        ranks(size, _same_bits, some, uses, timeout=240)


@pytest.mark.slow
def test_a_ledger_changes_no_bits_on_one_rank(ranks: KeptRanks) -> None:
    ranks(1, _same_bits, {"default": {}, "parameters": OFFLOADED["parameters"]}, HOST_USES)


def _recorded(
    settings: dict[str, dict[str, Any]], uses: list[Callable[..., None]]
) -> dict[str, list[str]]:
    """What the simulated device found, by settings and use."""
    found = {}
    for name, arguments in settings.items():
        for use in uses:
            with simulated_device(on_current_stream=use is not uses[0]) as device:
                model = wrapped(**arguments)
                train(model, 2)
                with layerzero.ledger(model) as ledger:
                    use(model)
                rows = ledger.units
                check_ledger(ledger)
                if "whole" not in name:
                    assert all(row.gather_ms > 0 and row.gather_bytes > 0 for row in rows)
                assert all(row.reduce_ms > 0 and row.reduce_bytes > 0 for row in rows)
                device.host_waits.clear()
                if use is plain_steps:
                    with layerzero.ledger(model):
                        device.host_waits.clear()
                        train(model, 2, torch.optim.AdamW)
                        waits = sorted(set(map(str, device.host_waits)))
                    assert waits == [], (name, waits)
                del model
            if device.findings:
                found[f"{name}, {use.__name__}"] = device.findings
    return found


def test_a_ledger_orders_all_accesses_and_does_not_block_the_host() -> None:
    few = {"default": SETTINGS["default"]}
    for found in run_fake_ranks((0, 1), 2, _recorded, few, [plain_steps, accumulation]):
        assert found == {}


@pytest.mark.slow
def test_a_ledger_orders_all_accesses_in_every_mode(in_full: bool) -> None:
    def chosen(of: dict[str, dict[str, Any]], size: int = 0) -> dict[str, dict[str, Any]]:
        named = {name: each for name, each in of.items() if in_full or name in OF_A_LEDGER}
        return {n: each for n, each in named.items() if each.get("zero3_size", size) == size}

    # With micro-batches a step has all that a plain one has.
    two = [plain_steps, accumulation] if in_full else [accumulation]
    sweeps = [
        (2, chosen(SETTINGS), two),
        (2, {"default": SETTINGS["default"]}, USES),
        (4, chosen(LAYERED, 2), two),
        (2, chosen(LAYERED, 1), two),
        (2, chosen(OFFLOADED), [accumulation, HOST_USES[2]]),
    ]
    for world_size, settings, uses in sweeps:
        # Records of other ranks are missing; with two hops only the first needs none.
        ranks = (0, 1) if world_size == 2 and in_full else (0,)
        for found in run_fake_ranks(ranks, world_size, _recorded, settings, uses, timeout=300):
            assert found == {}
