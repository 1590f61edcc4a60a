"""When units are gathered: recorded order, depth, lists, budget; and never a wrong one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import BackwardPrefetch, ZeRO3, units
from layerzero.step.unit import Unit
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import run_ranks
from tests.harness.recording import gathered, recorded_operations

DEPTH = 5


class Routed(nn.Module):
    """Runs the blocks it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        for index in route:
            x = self.blocks[index](x)
        return x


def wrapped(**options) -> ZeRO3:
    torch.manual_seed(0)
    return ZeRO3(Routed(), auto_wrap_policy={Block}, **options)


def batch() -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


ALL = list(range(DEPTH))


class Timeline:
    """Gathers (g) and uses (u) of blocks in order, through the unit's own methods."""

    def __init__(self, monkeypatch_targets: list[tuple[type, str, str]]) -> None:
        self.events: list[str] = []
        self._undo = []
        for owner, name, letter in monkeypatch_targets:
            original = getattr(owner, name)

            def noting(unit, *args, original=original, letter=letter, **options):
                was = unit.state.name
                result = original(unit, *args, **options)
                if letter != "g" or was == "SHARDED":
                    self.events.append(f"{letter}{unit.fqn.removeprefix('blocks.')}")
                return result

            setattr(owner, name, noting)
            self._undo.append((owner, name, original))

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self._undo:
            setattr(owner, name, original)


def timeline() -> Timeline:
    return Timeline([(Unit, "unshard", "g"), (Unit, "show_unsharded", "u")])


def _forward(depth: bool | int, expected: list[str]) -> None:
    model = wrapped(forward_prefetch=depth)
    with torch.no_grad():
        model(batch(), ALL)
        with timeline() as seen:
            model(batch(), ALL)
    assert seen.events == expected


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (False, ["g0", "u0", "g1", "u1", "g2", "u2", "g3", "u3", "g4", "u4"]),
        (True, ["g0", "g1", "u0", "g2", "u1", "g3", "u2", "g4", "u3", "u4"]),
        (2, ["g0", "g1", "g2", "u0", "g3", "u1", "g4", "u2", "u3", "u4"]),
    ],
    ids=["off", "one ahead", "two ahead"],
)
def test_forward_gathers_ahead_once_the_order_is_known(depth, expected) -> None:
    run_ranks(2, _forward, depth, expected)


def _backward(mode: BackwardPrefetch | None, expected: list[str]) -> None:
    model = wrapped(backward_prefetch=mode)
    for _ in range(2):
        model(batch(), ALL).sum().backward()
    loss = model(batch(), ALL).sum()
    with timeline() as seen:
        loss.backward()
    assert seen.events == expected


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (None, ["u4", "g3", "u3", "g2", "u2", "g1", "u1", "g0", "u0"]),
        (
            BackwardPrefetch.BACKWARD_PRE,
            ["g3", "u4", "g2", "u3", "g1", "u2", "g0", "u1", "u0"],
        ),
        (
            BackwardPrefetch.BACKWARD_POST,
            ["u4", "g3", "u3", "g2", "u2", "g1", "u1", "g0", "u0"],
        ),
    ],
    ids=["off", "pre", "post"],
)
def test_backward_gathers_ahead_once_the_order_is_known(mode, expected) -> None:
    run_ranks(2, _backward, mode, expected)


def _order_of_collectives(orders: dict[BackwardPrefetch | None, str]) -> None:
    for mode, expected in orders.items():
        model = wrapped(backward_prefetch=mode)
        for _ in range(2):
            model(batch(), ALL).sum().backward()
        loss = model(batch(), ALL).sum()
        with recorded_operations(model) as operations:
            loss.backward()
        letters = {"all-gather": "g", "reduce-scatter": "r"}
        seen = [
            letters[operation.verb] + operation.unit.removeprefix("blocks.")
            for operation in operations
            if operation.verb in letters and operation.unit.startswith("blocks.")
        ]
        assert " ".join(seen) == expected, mode


def test_a_gather_goes_before_the_reduction_that_it_need_not_wait_for() -> None:
    run_ranks(
        2,
        _order_of_collectives,
        {
            None: "r4 g3 r3 g2 r2 g1 r1 g0 r0",
            BackwardPrefetch.BACKWARD_PRE: "g3 r4 g2 r3 g1 r2 g0 r1 r0",
            BackwardPrefetch.BACKWARD_POST: "g3 r4 g2 r3 g1 r2 g0 r1 r0",
        },
    )


def _listed() -> None:
    model = wrapped()
    wrapping_order = ["", *(f"blocks.{i}" for i in range(DEPTH))]
    assert [unit.fqn for unit in units(model)] == wrapping_order
    model(batch(), [3, 0, 2])
    assert [unit.fqn for unit in units(model)] == [
        *("blocks.3", "blocks.0", "blocks.2"),
        *("", "blocks.1", "blocks.4"),  # it demanded none of these, so they stay as wrapped
    ]


def test_units_are_listed_in_execution_order() -> None:
    run_ranks(2, _listed)


def _first_step() -> None:
    model = wrapped()
    with recorded_operations(model) as operations:
        model(batch(), [0, 2, 4]).sum().backward()
    assert gathered(operations) == [f"blocks.{i}" for i in (0, 2, 4, 2, 0)]


def test_nothing_is_guessed_before_an_order_was_recorded() -> None:
    run_ranks(2, _first_step)


def _branches() -> None:
    """Alternating branches, eval between: every gather is of a block that is used."""
    model = wrapped(forward_prefetch=3)
    routes = [[0, 1, 2], [0, 3, 4], [0, 1, 2], [0, 3, 4], [0, 1, 2, 3, 4], [0, 3, 4], [0, 1, 2]]
    torch.manual_seed(0)
    reference = Routed()
    for step, route in enumerate(routes * 2):
        with recorded_operations(model) as operations:
            loss = model(batch(), route).sum()
            loss.backward()
        if step >= len(routes):  # both branches and the long route are known
            expected = [*route, *reversed(route[:-1])]
            assert gathered(operations) == [f"blocks.{i}" for i in expected]
        assert torch.equal(loss, reference(batch(), route).sum())
        with torch.no_grad():
            model.eval()
            with recorded_operations(model) as operations:
                model(batch(), [4, 0])
            assert gathered(operations) == ["blocks.4", "blocks.0"]
            model.train()
        model.zero_grad()


def test_branches_never_gather_what_they_do_not_use() -> None:
    run_ranks(2, _branches)


def _misled() -> None:
    """A deviation costs at most what was on its way, and gives the right result."""
    model = wrapped(forward_prefetch=2)
    torch.manual_seed(0)
    reference = Routed()
    for _ in range(3):
        model(batch(), ALL).sum().backward()
    with recorded_operations(model) as operations:
        output = model(batch(), [0, 4, 3])
        assert torch.equal(output, reference(batch(), [0, 4, 3]))
        output.sum().backward()
    assert gathered(operations)[:3] == ["blocks.0", "blocks.1", "blocks.2"]
    assert gathered(operations)[3:] == [f"blocks.{i}" for i in (4, 3, 4, 0)]
    assert {unit.state.name for unit in units(model)} == {"SHARDED"}


def test_a_deviation_falls_back_to_demand() -> None:
    run_ranks(2, _misled)


def _explicit() -> None:
    model = wrapped()
    blocks = model.module.blocks
    first = next(unit for unit in units(model) if unit.fqn == "blocks.0")
    first.set_modules_to_forward_prefetch([blocks[1], blocks[2], blocks[3]])
    with torch.no_grad(), timeline() as seen:
        model(batch(), ALL)
    assert seen.events[:4] == ["g0", "g1", "g2", "g3"]
    last = next(unit for unit in units(model) if unit.fqn == "blocks.4")
    last.set_modules_to_backward_prefetch([blocks[3], blocks[2]])
    loss = model(batch(), ALL).sum()
    with timeline() as seen:
        loss.backward()
    assert seen.events[:3] == ["g3", "g2", "u4"]
    with pytest.raises(ValueError, match="units of the same model"):
        first.set_modules_to_forward_prefetch([nn.Linear(1, 1)])


def test_lists_of_modules_to_prefetch_are_followed() -> None:
    run_ranks(2, _explicit)


def _all_first() -> None:
    """Every unit is there before the first one runs, unused ones too; steps are the same."""
    model, plain = wrapped(), wrapped()
    root_state(model).scheduler.unshard_all_before_forward()
    for _ in range(2):
        with timeline() as seen:
            losses = [each(batch(), [0, 3, 1]).square().sum() for each in (model, plain)]
        assert seen.events[:6] == ["g0", "g1", "g2", "g3", "g4", "u0"]
        assert torch.equal(*losses)
        for each, loss in zip((model, plain), losses, strict=True):
            loss.backward()
            for parameter in each.parameters():
                parameter.data -= parameter.grad if parameter.grad is not None else 0.0
            each.zero_grad()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)
    assert {unit.state.name for unit in units(model)} == {"SHARDED"}
    with torch.no_grad():
        model(batch(), [4])
    assert {unit.state.name for unit in units(model)} == {"SHARDED"}


def test_all_units_may_be_gathered_before_a_forward() -> None:
    run_ranks(2, _all_first)


def _budget(limit, most: int) -> None:
    model = wrapped(forward_prefetch=4, limit_all_gathers=limit)
    nbytes = max(unit.nbytes for unit in units(model))
    root = root_state(model)
    counts: list[int] = []
    original = Unit.unshard

    def counting(unit, **options) -> None:
        original(unit, **options)
        counts.append(root.context.limiter.nbytes // nbytes)

    with torch.no_grad():
        model(batch(), ALL)
        Unit.unshard = counting
        try:
            model(batch(), ALL)
        finally:
            Unit.unshard = original
    assert max(counts) == most
    assert root.context.limiter.nbytes == root.context.limiter.num_units == 0


@pytest.mark.parametrize(
    ("limit", "most"),
    [(False, 5), (True, 5), (1, 1), (2, 2), ("1B", 1), ("1.2KB", 2)],
    ids=lambda value: f"{value}",
)
def test_the_budget_bounds_what_is_resident(limit, most: int) -> None:
    run_ranks(2, _budget, limit, most)


def _lists_of_nested() -> None:
    """Wrappers that are made by hand get their lists before there is a root around them."""
    torch.manual_seed(0)
    module = Routed()
    for index, block in enumerate(module.blocks):
        module.blocks[index] = ZeRO3(block, limit_all_gathers=1)
    blocks = module.blocks
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2], blocks[3]])
    blocks[4].set_modules_to_backward_prefetch([blocks[3], blocks[2]])
    with pytest.raises(ValueError, match=r"the root unit of another model; wrap a module"):
        blocks[0](batch())  # They belong to models of their own until then.
    model = ZeRO3(module)
    for _ in range(2):
        with timeline() as seen:
            loss = model(batch(), ALL).sum()
        assert seen.events[:4] == ["g0", "g1", "g2", "g3"]
        with timeline() as seen:
            loss.backward()
        assert seen.events[:3] == ["g3", "g2", "u4"]
    other = wrapped()
    units(model)[0].set_modules_to_forward_prefetch([other.module.blocks[0]])
    with pytest.raises(ValueError, match=r"units of the same model, got blocks\.0 of another"):
        model(batch(), ALL)
    units(model)[0].set_modules_to_forward_prefetch([])
    model(batch(), ALL)


def test_lists_may_be_set_before_the_root_is_wrapped() -> None:
    run_ranks(2, _lists_of_nested)
