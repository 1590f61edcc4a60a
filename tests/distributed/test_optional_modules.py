"""Modules that a rank may skip: every pattern, what it costs, and what is still an error."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import CollectiveError, ZeRO3
from layerzero.watch import desync
from tests.harness.checks import named
from tests.harness.internals import inner_units
from tests.harness.optional_models import (
    WIDTH,
    Backbone,
    Call,
    Failure,
    Region,
    Sample,
    Slot,
    TextBlock,
    loss_of,
)
from tests.harness.optional_runs import SIMPLE, Model, Run
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import on_ranks, run_ranks
from tests.harness.recording import recorded_operations
from tests.harness.regions import counted_exchanges
from tests.harness.simulated_device import simulated_device
from tests.harness.traffic import SentBytes

TIMEOUT = timedelta(seconds=25)
PLACES = ("0", "inside 0", "1")
"""One region each: before the text, in its first block, behind it."""
REGIONS = ("slots.0.regions.0", "text.0.slot.regions.0", "slots.1.regions.0")
NOBODY, EVERYBODY = (False,) * 3, (True,) * 3


def three_regions() -> Model:
    """A text block and three optional regions; all of them are units, with the regions' blocks."""
    torch.manual_seed(0)
    slots = [Slot([Region(1, norm=True)]), Slot([Region(2)])]
    module = Backbone(slots, [TextBlock(Slot([Region(1, norm=True)]))])
    units = {"text.0", "slots.0.regions.0", "text.0.slot.regions.0"}
    units |= {f"{name}.blocks.0" for name in REGIONS} | {f"{REGIONS[2]}.blocks.1"}
    return Model(module, units, list(REGIONS))


class Draw:
    """Samples of a pattern: whether the rank enters each region."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, enters: tuple[bool, ...], way: str = "used") -> Sample:
        calls = {
            place: (Call(0, order, way, self._rows()),) if enter else ()
            for place, order, enter in zip(PLACES, ((0,), (0,), (1, 0)), enters, strict=True)
        }
        return Sample(self._rows(), calls)

    def _rows(self) -> Tensor:
        return torch.randn(2, WIDTH, generator=self._generator)


# Every pattern ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "mean"), [(2, "all"), (3, "participants")])
@on_ranks(timeout=300)
def test_every_pattern_of_three_regions_is_one_process_to_the_bit(
    world_size: int, mean: str, in_full: bool
) -> None:
    """On three ranks without those that another order of the ranks has; `make soak`: all 512."""
    of_one = list(itertools.product([False, True], repeat=3))
    patterns = list(itertools.product(of_one, repeat=world_size))
    random.Random(0).shuffle(patterns)
    if world_size > 2 and not in_full:
        patterns = list({tuple(sorted(pattern)): pattern for pattern in patterns}.values())
    run, draw = Run(three_regions(), torch.float32, optional_mean=mean, timeout=TIMEOUT), Draw()
    for pattern in patterns:
        with named(pattern):
            run.step(SIMPLE, [[draw(enters) for enters in pattern]], exact=True)


@on_ranks(2)
def test_a_rank_that_enters_nothing_may_return_what_a_unit_inside_returned() -> None:
    """The head's output, as the root unit's."""
    model = three_regions()
    model.units.update(model.module.end_in_slot() - {"stem"})
    run, draw = Run(model, torch.float32, timeout=TIMEOUT), Draw()
    for pattern in (NOBODY, EVERYBODY), (EVERYBODY, NOBODY), (NOBODY, NOBODY):
        for _ in range(2):
            run.step(SIMPLE, [[draw(enters) for enters in pattern]], exact=True)


@on_ranks(2)
def test_a_checkpoint_may_recompute_blocks_in_another_order() -> None:
    """Only the second block of the region is a unit: where the first one runs last, the checkpoint
    recomputes before the gradient of any unit's output."""
    torch.manual_seed(0)
    module = Backbone([Slot([Region(2)], recomputes=True), None], [TextBlock()])
    unit = "slots.0.regions.0.blocks.1"
    run = Run(Model(module, {"text.0", unit}, [unit]), torch.float32, timeout=TIMEOUT)
    generator = torch.Generator().manual_seed(0)
    for order in [(0, 1)] * 3 + [(1, 0)] * 3:
        calls: list[dict[str, tuple[Call, ...]]] = [{}, {"0": (Call(0, order),)}]
        samples = [Sample(torch.randn(2, WIDTH, generator=generator), each) for each in calls]
        run.step(SIMPLE, [samples], exact=True)


# What it costs ------------------------------------------------------------------------------------


class Cost:
    """Collectives and bytes of one step on this rank."""

    def __init__(self, model: ZeRO3, sample: Sample) -> None:
        self.num_exchanges: list[int] = []
        """Of forward, of backward."""
        with recorded_operations(model) as operations, SentBytes() as sent:
            with counted_exchanges() as in_forward:
                loss = loss_of(model(sample))
            num_in_forward = len(operations)
            with counted_exchanges() as in_backward:
                loss.backward()
        self.num_exchanges = [len(in_forward), len(in_backward)]
        self.exchanged = 8 * sum(in_forward + in_backward)
        """Bytes that the rank sends in them."""
        self.nbytes = sent.nbytes
        verbs = "all-gather", "reduce-scatter"
        behind = operations[num_in_forward:]
        self.backward = [(each.verb, each.unit) for each in behind if each.verb in verbs]
        """In order of issue, which shows what is prefetched."""
        self.of = {
            (verb, unit): sum(each.verb == verb and each.unit == unit for each in operations)
            for verb, unit in {(each.verb, each.unit) for each in operations}
        }

    def count(self, verb: str, under: str = "") -> int:
        return sum(n for (each, unit), n in self.of.items() if each == verb and under in unit)


def _wrapped(model: Model, **options: Any) -> ZeRO3:
    return ZeRO3(
        model.module,
        auto_wrap_policy=lambda _, fqn: fqn in model.units,
        timeout=TIMEOUT,
        **options,
    )


def _regions(model: Model) -> list[nn.Module]:
    modules = dict(model.module.named_modules())
    return [modules[name] for name in model.optional]


EXCHANGE_NBYTES = 16
"""From one rank to another."""


@on_ranks(2)
def test_a_region_is_gathered_and_reduced_once_and_costs_nothing_where_all_skip_it() -> None:
    """Of steps whose places are known, beside those of a model without optional modules, in which
    every rank enters the region that here the second rank enters alone."""
    model, plain = three_regions(), three_regions()
    optional = _wrapped(model, optional_modules=_regions(model))
    required = _wrapped(plain)
    draw = Draw()
    for _ in range(2):
        for enters in (NOBODY, EVERYBODY):
            loss_of(optional(draw(enters))).backward()
    nobody = Cost(optional, draw(NOBODY))
    for place in (None, 0, 1, 2, "all"):
        enters = EVERYBODY if place == "all" else tuple(each == place for each in range(3))
        own = enters if dist.get_rank() == 1 or place == "all" else NOBODY
        loss_of(required(draw(enters))).backward()
        cost, truth = Cost(optional, draw(own)), Cost(required, draw(enters))
        entered = [unit for unit in inner_units(optional) if unit.fqn.startswith(_names(enters))]
        assert (len(entered) == len(inner_units(optional)) - 2) == (place == "all")
        # Each unit of a region is gathered once, in forward, and reduced once, at the end.
        for unit in entered:
            assert truth.of["all-gather", unit.label] == 2
            truth.of["all-gather", unit.label] = 1
        assert cost.of == truth.of, place
        reduced = [("reduce-scatter", unit.label) for unit in entered]
        assert cost.backward == nobody.backward + reduced, place
        # Forward: one exchange for the regions between two required units (the last two are
        # neighbours), and one to leave each region. Backward: one, at its end.
        assert cost.num_exchanges == [2 + sum(enters), int(any(enters))], place
        assert cost.exchanged == EXCHANGE_NBYTES * sum(cost.num_exchanges), place
        # Which gradients of these units exist, ranks exchange there, and not a byte for each.
        apart = sum(len(h.fqns) for unit in entered for h in unit.handles)
        second = sum(unit.nbytes // 2 for unit in entered)
        assert cost.nbytes - truth.nbytes == cost.exchanged - apart - second, place


def _names(enters: Sequence[bool]) -> tuple[str, ...]:
    return tuple(name for name, is_entered in zip(REGIONS, enters, strict=True) if is_entered)


@on_ranks(2)
def test_required_units_cost_the_same_where_the_last_unit_is_optional() -> None:
    """Required units are gathered in backward as if all ranks had skipped all regions."""
    for limit in (True, 1):
        model = three_regions()
        model.units.update(model.module.end_in_slot())
        optional = _wrapped(model, optional_modules=_regions(model), limit_all_gathers=limit)
        draw, rank = Draw(), dist.get_rank()
        alone = EVERYBODY if rank else NOBODY
        for _ in range(2):
            for own in (NOBODY, EVERYBODY):
                nobody = Cost(optional, draw(NOBODY))
                loss_of(optional(draw(own))).backward()
        for own, some in ((NOBODY, False), (EVERYBODY, True), (alone, True)):
            cost = Cost(optional, draw(own))
            number = len(nobody.backward)
            assert cost.backward[:number] == nobody.backward
            assert all(verb == "reduce-scatter" for verb, _ in cost.backward[number:])
            assert cost.num_exchanges == ([6, 1] if some else [3, 0])


# On a device --------------------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_that_agree_on_the_host_do_not_wait_for_the_device() -> None:
    """In steps whose places are known."""
    group = make_plain_group(TIMEOUT)
    patterns = {
        "nobody": (NOBODY, NOBODY),
        "everybody": (EVERYBODY, EVERYBODY),
        "some": ((True, False, True), (False, True, False)),
    }
    found = {}
    for mean, on_current_stream in (("all", False), ("participants", True)):
        with simulated_device(on_current_stream=on_current_stream) as device:
            module = three_regions()
            model = _wrapped(
                module,
                process_group=group,
                optional_modules=_regions(module),
                optional_mean=mean,
            )
            optimizer, draw = torch.optim.SGD(model.parameters(), lr=0.1), Draw()
            for _ in range(3):
                for name, pattern in patterns.items():
                    device.host_waits.clear()
                    loss = loss_of(model(draw(pattern[dist.get_rank()])))
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found[f"{mean}, {name}"] = sorted(set(map(str, device.host_waits)))
            assert device.findings == []
            loss.item()
            assert device.host_waits, "the device reports what the test itself does"
    assert len(found) == 6 and not any(found.values()), found


# What is still an error ---------------------------------------------------------------------------


class Parting(nn.Module):
    """A required part whose blocks each rank may call in another order, behind a region."""

    def __init__(self) -> None:
        super().__init__()
        self.region = TextBlock()
        self.blocks = nn.ModuleList(TextBlock() for _ in range(3))
        self.route = [0, 1, 2]

    def forward(self, x: Tensor, enters: bool) -> Tensor:
        if enters:
            x = x + self.region(x)
        for index in self.route:
            x = self.blocks[index](x)
        return x.square().mean()


def _parts() -> dict[str, str]:
    desync.PAUSE_S = 0.1
    messages = {}
    rank = dist.get_rank()
    for steps, route in ((0, [1, 0, 2]), (3, [0, 2, 1]), (3, [0, 1])):
        # Each case on a group of its own: a failure leaves the connections of a group unusable.
        group = dist.new_group(timeout=PARTING_TIMEOUT)
        torch.manual_seed(0)
        module = Parting()
        model = ZeRO3(
            module,
            group,
            auto_wrap_policy={TextBlock},
            optional_modules=[module.region],
            timeout=PARTING_TIMEOUT,
        )
        for step in range(steps):
            model(torch.ones(2, WIDTH), step % 2 == rank).backward()
        if rank:
            module.route = route
        start = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            for _ in range(2):
                model(torch.ones(2, WIDTH), rank == 0).backward()
        assert time.monotonic() - start < AT_ONCE_S, str(caught.value)
        messages[f"{steps} {route}"] = str(caught.value)
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{steps} {route} {rank}", "")
        store.wait([f"{steps} {route} {each}" for each in range(2)])
    return messages


PARTING_TIMEOUT = timedelta(seconds=55)
AT_ONCE_S = 20.0
"""As in test_parting.py, which has the same cases without optional modules."""


def test_ranks_that_part_in_required_units_fail_at_once_and_by_name() -> None:
    first, second = run_ranks(2, _parts)
    for case, message in first.items():
        verdict = message.partition("(the ranks took ")[2].partition(").\n")[0]
        assert "rank 0" in verdict and "rank 1" in verdict, (case, message)
        assert verdict in second[case], (case, second[case])
        assert "Every rank must call the same units in the same order" in message


# Exceptions ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_exception_in_a_region_is_one_on_every_rank_and_the_next_step_is_right() -> None:
    """One rank cannot read its image: every rank raises, and the next step is as if it had not."""
    rank = dist.get_rank()
    for group in ({}, {"process_group": make_plain_group(TIMEOUT)}):
        run, draw = Run(three_regions(), torch.float32, timeout=TIMEOUT, **group), Draw()
        for place, known in itertools.product(range(3), (False, True)):
            enters = tuple(each == place for each in range(3))
            if known:
                run.step(SIMPLE, [[draw(enters), draw(NOBODY)]], exact=True)
            bad = draw(enters, "fails"), draw(NOBODY)
            expected = Failure if rank == 0 else RuntimeError
            text = "no image" if rank == 0 else "rank 0 raised between or inside .*: Failure"
            with pytest.raises(expected, match=text):
                run.model(bad[rank])
                run.model(draw(NOBODY))  # at the latest
            run.step(SIMPLE, [[draw(NOBODY), draw(enters)]], exact=True)


# Compiled units -----------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(2)
def test_compiled_units_and_regions_train_like_one_process() -> None:
    run, draw = Run(three_regions(), torch.float32, timeout=TIMEOUT), Draw()
    for name, module in run.model.named_modules():
        if name in (*REGIONS, "text.0", "text.0.slot"):
            module.compile(backend="eager")
    for number in range(4):
        enters = tuple(place == number for place in range(3))
        run.step(SIMPLE, [[draw(enters), draw(EVERYBODY)]], exact=True)
