"""Under a ledger the engine computes the same bits, in every mode, and its figures agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import layerzero
from layerzero import ReductionPolicy, ZeRO3
from layerzero.step_ledger import Ledger
from tests.harness.checks import check_ledger, of_milliseconds
from tests.harness.models import Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.stream_uses import (
    HOST_USES,
    LAYERED,
    OFFLOADED,
    SETTINGS,
    USES,
    accumulation,
    evaluation_between,
)

MORE: dict[str, dict[str, Any]] = {
    "two lanes": {"reduction": ReductionPolicy(separate_groups=True, in_flight="1MB")},
    "verified": {"verify": "always"},
    "verified layers": {"verify": "always", "zero3_size": 2},
    "optional modules": {"optional": (1,)},
}
FEW = ("default", "no prefetch", "sums in shards")


def _wrapped(optional: tuple[int, ...] = (), **arguments: Any) -> ZeRO3:
    torch.manual_seed(0)
    module = Mlp(3)
    if optional:
        arguments["optional_modules"] = [module.blocks[index] for index in optional]
    return ZeRO3(module, auto_wrap_policy={Block}, **arguments)


def _parameters_after(settings: dict[str, Any], use: Callable[..., Any], ledger: bool) -> Any:
    model = _wrapped(**settings)
    if ledger:
        with layerzero.ledger(model) as found:
            use(model)
        check(model, found)
    else:
        use(model)
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
ALL = {f"{group}{name}": of for group, each in GROUPS.items() for name, of in each.items()}
ONE_HOP_AND_TWO = ("default", "layered, zero1", "more, verified", "more, optional modules")


def test_a_ledger_changes_no_bits_with_one_hop_and_two() -> None:
    few = {name: ALL[name] for name in ONE_HOP_AND_TWO}
    run_ranks(4, _same_bits, few, [accumulation], timeout=120)


def test_every_setting_has_a_name_of_its_own() -> None:
    assert len(ALL) == sum(map(len, GROUPS.values()))


def _same_bits_in_uses(in_full: bool) -> None:
    for number, name in enumerate(FEW):
        _same_bits({name: SETTINGS[name]}, USES if in_full else USES[number :: len(FEW)])


@pytest.mark.slow
def test_a_ledger_changes_no_bits_in_any_use(in_full: bool) -> None:
    """Each use in one of the settings, `make soak`: in each."""
    run_ranks(3, _same_bits_in_uses, in_full, timeout=240)


@pytest.mark.slow
def test_a_ledger_changes_no_bits_in_any_mode(in_full: bool) -> None:
    if in_full:
        run_ranks(4, _same_bits, ALL, [accumulation, evaluation_between], timeout=240)
        return
    rest = [name for name in ALL if name not in ONE_HOP_AND_TWO]  # These are above.
    for size in (2, 4):  # As few ranks as have every axis.
        some = {n: ALL[n] for n in rest if 2 * ALL[n].get("zero3_size", 1) == size}
        run_ranks(size, _same_bits, some, [accumulation], timeout=240)


@pytest.mark.slow
def test_a_ledger_changes_no_bits_on_one_rank() -> None:
    run_ranks(1, _same_bits, {"default": {}} | OFFLOADED, HOST_USES, timeout=240)
