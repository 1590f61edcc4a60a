"""Modules that a rank may skip: which units these are, every pattern, what it costs, what is still
an error, and reentrant checkpoints."""

import functools
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero import ZeRO3
from layerzero.optional.optional_units import Places
from layerzero.parallel.pipeline import ZeRO3PipelineStage
from tests.harness.checks import assert_close_in_float64, error_in_time, named
from tests.harness.compare import assert_trains_alike
from tests.harness.internals import desync, inner_units, root_state
from tests.harness.models import WIDTH, Block, Parts, Routed, loss_of
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import on_ranks
from tests.harness.recording import counted_exchanges, recorded_operations, regions_of
from tests.harness.reference import added, full_gradients, seeded
from tests.harness.simulated_device import simulated_device
from tests.harness.traffic import SentBytes

TIMEOUT = timedelta(seconds=25)
REGIONS = ("before", "text.inside", "behind")
NOBODY, EVERYBODY = (False,) * 3, (True,) * 3
Sample = tuple[Tensor, tuple[bool, ...]]
"""Rows, and whether they enter each region."""


class Text(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(Block(), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor, enters: bool) -> Tensor:
        y = torch.tanh(self.up(x))
        return (x + torch.tanh(self.inside(x)) if enters else x) + self.down(y)


class Regions(nn.Module):
    """Required modules, with optional regions before, inside and behind one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.before = nn.Sequential(Block(), nn.LayerNorm(WIDTH))
        self.text = Text()
        self.behind = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, sample: Sample) -> Tensor:
        x, enters = self.stem(sample[0]), sample[1]
        x = self.text(x + torch.tanh(self.before(x)) if enters[0] else x, enters[1])
        return self.head(x + torch.tanh(self.behind(x)) if enters[2] else x)


def three_regions(are_optional: bool = True, **options: Any) -> ZeRO3:
    """All blocks are units, and the regions that have more than blocks."""
    module: Any = seeded(Regions)
    regions = [module.before, module.text.inside, module.behind]
    units = {Block, Text}
    return ZeRO3(
        module,
        auto_wrap_policy=lambda part, _: type(part) in units or part in regions[:2],
        optional_modules=regions if are_optional else (),
        timeout=TIMEOUT,
        **options,
    )


class Draw:
    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, enters: tuple[bool, ...]) -> Sample:
        return torch.randn(2, WIDTH, generator=self._generator), enters


def test_nothing_is_learned_from_a_pass_that_fails_after_its_forward() -> None:
    """Some ranks may have failed before its end, so that only the others saw it whole."""
    places = Places(frozenset({1}))
    for fails in (True, False):
        places.begin("forward")
        assert places.exchanges
        places.required(0)
        places.happened(1)
        places.has_ended = not fails
    places.begin("forward")
    assert not places.exchanges


class Recomputed(Routed):
    """A required block, and two that a checkpoint runs in the order of the sample."""

    def forward(self, sample: tuple[Tensor, str]) -> Tensor:
        x, route = self.blocks[0](sample[0]), sample[1]
        return checkpoint(super().forward, x, route, use_reentrant=False) if route else x


@on_ranks(2)
def test_a_checkpoint_may_recompute_blocks_in_another_order() -> None:
    """Only block 2 is a unit that ranks skip: where block 1 runs last, the checkpoint recomputes
    before the gradient of any unit's output."""
    module: Any = seeded(Recomputed)
    chosen = [module.blocks[0], module.blocks[2]]
    model = ZeRO3(
        module,
        auto_wrap_policy=lambda part, _: part in chosen,
        optional_modules=chosen[1:],
        timeout=TIMEOUT,
    )
    rows = torch.randn(6, 2, 2, WIDTH, generator=torch.Generator().manual_seed(0))
    routes = ["1 2"] * 3 + ["2 1"] * 3
    batches = [[(x, ""), (y, route)] for (x, y), route in zip(rows, routes, strict=True)]
    assert_trains_alike(model, seeded(Recomputed), batches)


@on_ranks(3, in_float64=True)
def test_a_mean_over_participants_is_one_over_ranks_with_a_gradient_in_a_delivery() -> None:
    """The micro-batches of `no_sync` are one delivery; others are one each."""
    rank, draw = dist.get_rank(), Draw()
    first = [draw((each == 0, each != 0, True)) for each in range(3)]
    passes = [first, [draw(NOBODY)] * 3, [draw((each == 1, False, False)) for each in range(3)]]
    for waits in (False, True):
        model, plain = three_regions(optional_mean="participants"), seeded(Regions)
        total = dict.fromkeys(dict(plain.named_parameters()))
        for delivery in [passes] if waits else [[each] for each in passes]:
            own = []
            for each in range(3):
                plain.zero_grad()
                for samples in delivery:
                    loss_of(plain(samples[each])).backward()
                own.append(full_gradients(plain))
            for name in total:
                present = [gradients[name] for gradients in own if gradients[name] is not None]
                count = len(present) if name.startswith(REGIONS) else 3
                total[name] = added(total[name], sum(present) / count if present else None)
        for samples in passes:
            with model.no_sync() if waits and samples is not passes[-1] else nullcontext():
                loss_of(model(samples[rank])).backward()
        assert_close_in_float64(full_gradients(model), total, f"gradient, waits: {waits}")


class Cost(NamedTuple):
    """Of one step on this rank."""

    in_forward: list[int]
    """Bytes that the rank sends in each exchange."""
    in_backward: list[int]
    nbytes: int
    collectives: Counter[tuple[str, str]]
    """By verb and unit."""
    backward: list[tuple[str, str]]
    """Gathers and reductions in order of issue, which shows what is prefetched."""


def cost_of(model: ZeRO3, sample: Sample) -> Cost:
    with recorded_operations(model) as operations, SentBytes() as sent:
        with counted_exchanges() as in_forward:
            loss = loss_of(model(sample))
        begin = len(operations)
        with counted_exchanges() as in_backward:
            loss.backward()
    named = [(each.verb, each.unit) for each in operations]
    return Cost(
        in_forward,
        in_backward,
        sent.nbytes,
        Counter(named),
        [each for each in named[begin:] if each[0] in ("all-gather", "reduce-scatter")],
    )


@on_ranks(2)
def test_a_region_is_gathered_and_reduced_once_and_costs_nothing_where_all_skip_it() -> None:
    """Of steps whose places are known, beside those of a model without optional modules, in which
    every rank enters the region that here the second rank enters alone."""
    optional, required = (three_regions(are_optional=each) for each in (True, False))
    draw = Draw()
    for _ in range(2):
        for enters in (NOBODY, EVERYBODY):
            loss_of(optional(draw(enters))).backward()
    nobody = cost_of(optional, draw(NOBODY))
    for place in (None, 0, 1, 2, "all"):
        enters = EVERYBODY if place == "all" else tuple(each == place for each in range(3))
        own = enters if dist.get_rank() == 1 or place == "all" else NOBODY
        loss_of(required(draw(enters))).backward()
        cost, truth = cost_of(optional, draw(own)), cost_of(required, draw(enters))
        entered = [unit for unit in inner_units(optional) if unit.fqn.startswith(_names(enters))]
        assert (len(entered) == len(inner_units(optional)) - 2) == (place == "all")
        # Each unit of a region is gathered once, in forward, and reduced once, at the end.
        for unit in entered:
            assert truth.collectives["all-gather", unit.label] == 2
            truth.collectives["all-gather", unit.label] = 1
        assert cost.collectives == truth.collectives, place
        reduced = [("reduce-scatter", unit.label) for unit in entered]
        assert cost.backward == nobody.backward + reduced, place
        # Forward: one exchange for the regions between two required units (the last two are
        # neighbours), and one to leave each region. Backward: one, at its end.
        assert cost.in_forward == [8] * (2 + sum(enters)), place
        # Which gradients of these units exist ranks exchange there, in as many bytes as elsewhere,
        # and which units have any.
        apart = sum(len(h.fqns) for unit in entered for h in unit.handles)
        assert cost.in_backward == ([apart + len(entered)] if entered else []), place
        second = sum(unit.nbytes // 2 for unit in entered)
        exchanged = sum(cost.in_forward + cost.in_backward)
        assert cost.nbytes - truth.nbytes == exchanged - apart - second, place


def _names(enters: Sequence[bool]) -> tuple[str, ...]:
    return tuple(name for name, is_entered in zip(REGIONS, enters, strict=True) if is_entered)


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
            options = {"process_group": group, "optional_mean": mean}
            model = three_regions(**options)
            optimizer, draw = torch.optim.SGD(model.parameters(), lr=0.1), Draw()
            for _ in range(2):
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


PARTING_TIMEOUT = timedelta(seconds=55)
AT_ONCE_S = 20.0
"""As in test_watchdog.py, which has the same cases without optional modules."""
ALONE = "rank 0 issued agreement of optional modules in a call of 'blocks.0' outside the"


def _part(model: ZeRO3, route: str) -> None:
    rank, x = dist.get_rank(), torch.ones(2, WIDTH)
    if not route and rank == 0:
        model.blocks[0](x)
    for _ in range(2):
        enters = "0 " if rank == 0 and route else ""
        loss_of(model(x, enters + (route if rank and route else "1 2 3"))).backward()


@on_ranks(2)
def test_ranks_that_part_fail_at_once_and_by_name() -> None:
    """In required units, which one rank calls in another order, or in an optional module that one
    calls by itself; in the first step, or once places are known."""
    desync.LONGEST_PAUSE_S = 0.1
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    for steps, route in ((0, "2 1 3"), (3, "1 2"), (3, "")):
        # Each case on a group of its own: a failure leaves the connections of a group unusable.
        group = dist.new_group(timeout=PARTING_TIMEOUT)
        torch.manual_seed(0)
        module = Routed(4)
        options = {"auto_wrap_policy": {Block}, "timeout": PARTING_TIMEOUT}
        model = ZeRO3(module, group, optional_modules=[module.blocks[0]], **options)
        x = torch.ones(2, WIDTH)
        for step in range(steps):
            loss_of(model(x, "0 1 2 3" if step % 2 == rank else "1 2 3")).backward()
        if not route:
            model.blocks[0](x)  # On all ranks; then on one alone.
        message = error_in_time(functools.partial(_part, model, route), AT_ONCE_S)
        case = f"{steps} {route}"
        store.set(f"{case} {rank}", message)
        messages = [store.get(f"{case} {each}").decode() for each in range(2)]
        verdict = messages[0].partition("(the ranks took ")[2].partition(").\n")[0]
        assert "rank 0" in verdict and "rank 1" in verdict and verdict in messages[1], messages
        assert "Every rank must call the same units in the same order" in message
        assert route or ALONE in message, message


@on_ranks(2)
def test_an_exception_in_a_region_is_one_on_every_rank_and_the_next_step_is_right() -> None:
    def fail(*_: object) -> None:
        raise KeyError("no image")

    model, plain, draw = three_regions(), seeded(Regions), Draw()
    rank, modules = dist.get_rank(), dict(model.named_modules())
    for place, known in itertools.product(range(3), (False, True)):
        enters = tuple(each == place for each in range(3))
        if known:
            assert_trains_alike(model, plain, [[draw(enters), draw(NOBODY)]])
        bad = draw(enters), draw(NOBODY)
        expected = KeyError if rank == 0 else RuntimeError
        text = "no image" if rank == 0 else "rank 0 raised between or inside .*: KeyError"
        hook = modules[REGIONS[place]].register_forward_pre_hook(fail)
        with pytest.raises(expected, match=text):
            model(bad[rank])
            model(draw(NOBODY))  # at the latest
        hook.remove()
        assert_trains_alike(model, plain, [[draw(NOBODY), draw(enters)]])


@pytest.mark.slow
@on_ranks(2)
def test_compiled_units_and_regions_train_like_one_process() -> None:
    model, draw = three_regions(), Draw()
    for name, module in model.named_modules():
        if name in (*REGIONS, "text"):
            module.compile(backend="eager")
    patterns = [tuple(place == number for place in range(3)) for number in range(4)]
    batches = [[draw(enters), draw(EVERYBODY)] for enters in patterns]
    assert_trains_alike(model, seeded(Regions), batches)


class Part(nn.Module):
    """With a tower between two blocks, which a sample enters or not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.stem, self.trunk = Block(), Block()
        self.tower = nn.Sequential(Block(), Block())
        self.way = way

    def forward(self, sample: tuple[Tensor, bool]) -> Tensor:
        x = self.stem(sample[0])
        return self.trunk(self._entered(x) if sample[1] else x)

    def _entered(self, x: Tensor) -> Tensor:
        if self.way == "recomputed":
            x = checkpoint(self.tower, x, use_reentrant=True)
            return checkpoint(self.tower, x, use_reentrant=True)
        if self.way == "recomputed by block":
            for block in self.tower:
                x = checkpoint(block, x, use_reentrant=True)
            return x
        with torch.no_grad():
            y = self.tower(x)
        return x + y


@pytest.mark.slow
@on_ranks(2)
def test_a_reentrant_checkpoint_may_recompute_a_tower_frozen_or_not() -> None:
    """In known steps without gradients of the tower, ranks find in backward that it has none."""
    ways = ("recomputed", "recomputed by block", "without gradients")
    for way, is_frozen in itertools.product(ways, (True, False)):

        def build(way: str = way, is_frozen: bool = is_frozen) -> nn.Module:
            part = Part(way)
            part.tower.requires_grad_(not is_frozen)
            return part

        module, plain = seeded(build), seeded(build)
        model = ZeRO3(
            module, auto_wrap_policy={Block}, optional_modules=[module.tower], timeout=TIMEOUT
        )
        generator = torch.Generator().manual_seed(0)
        for enters in [(0, 0), (1, 1), (1, 0), (0, 1), (1, 1)]:
            rows = torch.randn(2, 3, WIDTH, generator=generator)
            with named(way, is_frozen, enters), counted_exchanges() as exchanges:
                assert_trains_alike(model, plain, [[*zip(rows, enters, strict=True)]])
        assert way != "without gradients" or len(exchanges) == (2 if is_frozen else 3)


class Tower(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.act = nn.Tanh()


class Towers(Parts):
    def __init__(self) -> None:
        towers = {"vision": Tower(), "audio": Tower(1)}
        super().__init__(**towers, trunk=Block(), head=nn.Linear(WIDTH, 3))


UNITS = {"auto_wrap_policy": {Tower, Block}}


def wrapped(model: nn.Module, optional: Iterable[nn.Module], **options: Any) -> ZeRO3:
    return ZeRO3(model, optional_modules=optional, **(UNITS | options))


def regions(model: nn.Module, *optional: nn.Module, **options: Any) -> dict[str, str]:
    """The region of each unit that a rank may skip."""
    found = regions_of(root_state(wrapped(model, optional, **options)))
    return {} if found is None else found[0]


VISION = {f"vision{rest}": "vision" for rest in ("", ".blocks.0", ".blocks.1")}
BLOCKS = {"vision.blocks.0": "vision", "vision.blocks.1": "vision"}
SECOND = "vision.blocks.1"
AUDIO = {"audio": "audio", "audio.blocks.0": "audio"}
CHOSEN: list[tuple[Callable[[Any], Iterable[nn.Module]], dict[str, str], dict[str, Any]]] = [
    (lambda m: [m.vision], VISION, {}),
    (lambda m: {m.vision, m.audio}, VISION | AUDIO, {}),
    (lambda m: iter((m.vision, m.audio, m.vision)), VISION | AUDIO, {}),
    # The tower itself is no unit, but the list inside it has some.
    (lambda m: (m.vision,), BLOCKS, {"auto_wrap_policy": {Block}}),
    (lambda m: [m.vision.blocks], dict.fromkeys(BLOCKS, "vision.blocks"), {}),
    # The innermost names the region.
    (lambda m: [m.vision.blocks[1], m.vision], VISION | {SECOND: SECOND}, {}),
    (lambda m: [m.vision, *m.vision.blocks], {name: name for name in VISION}, {}),
]


@on_ranks(2)
def test_units_at_and_under_optional_modules_are_their_regions() -> None:
    for choose, expected, options in CHOSEN:
        model = seeded(Towers)
        model = wrapped(model, choose(model), optional_mean="participants", **options)
        assert regions_of(root_state(model)) == (expected, "participants")
    # A module inside torch.compile or a checkpoint wrapper, and the wrapper, are one module.
    for wrap in (checkpoint_wrapper, lambda module: torch.compile(module, backend="eager")):
        for is_outer in (True, False):
            model = seeded(Towers)
            inner = model.vision
            model.vision = outer = wrap(inner)
            assert regions(model, outer if is_outer else inner) == VISION


def tied(how: str) -> nn.Module:
    """Block 0 of the tower and the whole other tower share a parameter."""
    other, tower = Tower(1), Tower()
    if how == "in the tower":
        tower.blocks[0].up.weight = tower.blocks[1].up.weight
    elif how == "with the other":
        tower.blocks[0].up.weight = other.blocks[0].up.weight
    else:
        tower.part = other.blocks[0]
    if how == "a parameter of the other":
        other.blocks[0].up.weight = nn.Parameter(torch.ones(7, WIDTH))
        other.extra = nn.Linear(WIDTH, 7)
        other.extra.weight = other.blocks[0].up.weight
    return Parts(other=other, tower=tower)


@on_ranks(2)
def test_units_outside_that_optional_modules_use_are_regions_of_their_own() -> None:
    tower = {f"tower{rest}": "tower" for rest in ("", ".blocks.0", ".blocks.1")}
    for how, more in (
        ("in the tower", {}),  # Owned by the tower.
        ("with the other", {}),  # Owned by the root.
        # The unit lies under the optional module by its second name.
        ("a module of the other", {"other.blocks.0": "tower"}),
        # Used under the optional module, of a unit outside.
        ("a parameter of the other", {"other": "other", "other.blocks.0": "tower"}),
    ):
        model = seeded(lambda how=how: tied(how))
        assert regions(model, model.tower) == tower | more, how
    model = nn.Sequential(nn.Embedding(3, WIDTH), Block(), nn.Linear(WIDTH, 3, bias=False))
    model[2].weight = model[0].weight  # All that it has, every rank needs.
    assert not regions(model, model[2], auto_wrap_policy={Block, nn.Linear})
    model = seeded(Towers)  # A unit outside that a call under an optional module gathers.

    def policy(module: nn.Module, fqn: str) -> Any:
        return {"hook_module": model.vision} if fqn == "trunk" else isinstance(module, Tower)

    expected = {"vision": "vision", "trunk": "trunk"}
    assert regions(model, model.vision, auto_wrap_policy=policy) == expected


def refused(
    error: type[Exception], pattern: str, choose: Callable[[Any], Any], **options: Any
) -> None:
    model = seeded(Towers)
    if options.pop("ignores_vision", False):
        options["ignored_modules"] = [model.vision]
    with pytest.raises(error, match=pattern):
        wrapped(model, choose(model), **options)
    ZeRO3(model, **UNITS)  # It was not changed.


NO_UNIT = r"'vision' \(Tower\) has no unit"
REFUSED: list[tuple[type[Exception], str, Callable[[Any], Any], dict[str, Any]]] = [
    (TypeError, "expected an iterable of modules, got Tower$", lambda m: m.vision, {}),
    (TypeError, "expected modules, got str", lambda m: ["vision"], {}),
    (ValueError, "a Block that is not inside the wrapped Towers", lambda m: [Block()], {}),
    (ValueError, r"'head' \(Linear\) has no unit", lambda m: [m.head], {}),
    (ValueError, NO_UNIT, lambda m: [m.vision], {"ignores_vision": True}),
]


@on_ranks(2)
def test_bad_input_is_refused_with_names() -> None:
    for *case, options in REFUSED:
        with named(case[1]):
            refused(*case, **options)
        gc.collect()
    # Units that not all ranks share.
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "edp"))["edp"]

    def policy(module: nn.Module, fqn: str) -> Any:
        is_expert = fqn == "vision.blocks.1"
        return {"process_group": alone} if is_expert else isinstance(module, (Tower, Block))

    refused(
        ValueError,
        "'vision' contains 'vision.blocks.1', which has a process_group of its own",
        lambda m: [m.vision],
        auto_wrap_policy=policy,
    )
    model = seeded(Towers)
    model.vision = ZeRO3(model.vision, optional_modules=[model.vision.blocks[0]], **UNITS)
    with pytest.raises(ValueError, match="'vision' is a ZeRO3 module with optional_modules of its"):
        ZeRO3(model, **UNITS)
    model = seeded(Towers)
    sharded = wrapped(model, [model.vision])
    with pytest.raises(NotImplementedError, match=r"stage 0: .* optional_modules \['vision'\]"):
        ZeRO3PipelineStage(sharded, 0, 1, torch.device("cpu"))


DIFFER = "optional modules differ between ranks: rank 1 has"
DIFFERING: list[tuple[str, tuple[Callable[[Any], Any], ...], tuple[str, ...]]] = [
    (
        f"{DIFFER} 'audio' with optional_mean='all', where rank 0 has 'vision'",
        (lambda m: [m.vision], lambda m: [m.audio]),
        ("all", "all"),
    ),
    (
        f"{DIFFER} .* optional_mean='participants', where rank 0 has .* optional_mean='all'",
        (lambda m: [m.vision],) * 2,
        ("all", "participants"),
    ),
]
"""Words of the error; by rank: which modules, and mean."""


@on_ranks(2)
def test_what_differs_between_ranks_is_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    for words, choose, mean in DIFFERING:
        with named(words):
            refused(ValueError, words, choose[rank], optional_mean=mean[rank])
        gc.collect()
    # One rank's bad input is raised on every rank.
    itself = "optional_modules: contains a Towers that is not inside"
    words = itself if rank else f"rank 1 refused .*: ValueError: {itself}"
    refused(ValueError, words, lambda m: [m] if rank else [])
    # The same modules in another order are the same.
    model = seeded(Towers)
    order = [model.vision, model.audio][:: 1 if rank else -1]
    assert regions(model, *order) == VISION | AUDIO


def every_pattern() -> list[list[Sample]]:
    """Steps of two ranks, each of which enters the regions in every way."""
    draw, patterns = Draw(), [*itertools.product((False, True), repeat=3)]
    return [
        [draw(one), draw(other)]
        for one, other in zip(patterns, patterns[3:] + patterns[:3], strict=True)
    ]


class TiedRegions(Regions):
    """One region uses a block of another, of which a required block uses a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.behind[0] = self.before[0]
        self.text.up.weight = self.before[0].up.weight


@on_ranks(2)
def test_every_way_in_trains_like_one_process() -> None:
    for way in ("nested wrappers", "rewrapped", "tied"):
        build = TiedRegions if way == "tied" else Regions
        module, plain = seeded(build), seeded(build)
        if way == "nested wrappers":
            module.before = ZeRO3(module.before, auto_wrap_policy={Block})
        optional = [module.before, module.text.inside, module.behind]
        model = wrapped(module, optional, auto_wrap_policy={Block, Text})
        with named(way):
            if way == "rewrapped":
                assert_trains_alike(model, plain, every_pattern()[:3])
                for each in (model, plain):
                    each.behind.append(seeded(Block))
                layerzero.rewrap(model)
            assert_trains_alike(model, plain, every_pattern())
