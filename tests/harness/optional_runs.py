"""Random runs of models with optional regions, each beside one process on all ranks' batches."""

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import BackwardPrefetch, ZeRO3
from layerzero.flat.parameter_info import get_info
from tests.harness.checks import assert_close_in_float64
from tests.harness.internals import inner_units
from tests.harness.optional_models import (
    WAYS,
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

STEPS = 5


@dataclass
class Model:
    """A plain model, and what `ZeRO3` is to be told of it."""

    module: Backbone
    units: set[str]
    optional: list[str]
    """Names of modules."""

    @property
    def has_shared_regions(self) -> bool:
        """Whether a region is called in two places. Ranks that call it in one each have gradients
        at two times, and it is reduced twice."""
        slots = self.module.all_slots.values()
        regions = [region for slot in slots for region in slot.regions]
        return len(regions) > len(set(regions))


def random_model(rng: random.Random) -> Model:
    apart = random.Random(str(rng.getstate()))
    model = _random_model(rng)
    if apart.random() < 0.3:
        model.units.update(model.module.end_in_slot())
    return model


def _random_model(rng: random.Random) -> Model:
    module, regions = _backbone(rng)
    _tie(rng, module, regions)
    _freeze(rng, regions)
    names = {each: name for name, each in module.named_modules()}
    units, optional = set[str](), list[str]()
    for region in regions:
        own = _units_of(rng, region)
        units |= {names[each] for each in own}
        if region not in own and region.projector is None and rng.random() < 0.4:
            optional.append(names[region.blocks])  # a plain container
        else:
            optional.append(names[region])
    if rng.random() < 0.8:
        units |= {names[block] for block in module.text}
    # A slot is a container, too; then regions inside may be named as well, or not.
    for slot in module.all_slots.values():
        if rng.random() < 0.2:
            optional.append(names[slot])
            if rng.random() < 0.5:
                below = names[slot] + "."
                optional = [name for name in optional if not name.startswith(below)]
    rng.shuffle(optional)
    return Model(module, units, optional)


def _backbone(rng: random.Random) -> tuple[Backbone, list[Region]]:
    depth = rng.randint(1, 3)
    places = [*map(str, range(depth + 1)), *(f"inside {index}" for index in range(depth))]
    chosen = set(rng.sample(places, rng.randint(1, min(3, len(places)))))
    all_regions: list[Region] = []

    def slot(place: str) -> Slot | None:
        if place not in chosen:
            return None
        regions = [_region(rng) for _ in range(rng.choice([1, 1, 2]))]
        if all_regions and rng.random() < 0.2:
            regions[0] = all_regions[0]  # called in two places
        all_regions.extend(region for region in regions if region not in all_regions)
        return Slot(regions, recomputes=rng.random() < 0.2)

    slots = [slot(str(index)) for index in range(depth + 1)]
    text = [TextBlock(slot(f"inside {index}")) for index in range(depth)]
    every = [*all_regions, *(each.inner for each in all_regions if each.inner is not None)]
    return Backbone(slots, text, recomputes=rng.random() < 0.2), every


def _region(rng: random.Random, nests: bool = True) -> Region:
    inner = _region(rng, nests=False) if nests and rng.random() < 0.3 else None
    return Region(
        rng.randint(1, 3),
        norm=rng.random() < 0.4,
        inner=inner,
        projects=rng.random() < 0.3,
        recomputes=rng.random() < 0.2,
    )


def _units_of(rng: random.Random, region: Region) -> list[nn.Module]:
    """At least one; all parameters are in one, or belong to the unit around the region."""
    blocks: list[nn.Module] = list(region.blocks)
    way = rng.choice(["region", "blocks", "both", "some"])
    units = [] if way == "region" else blocks if way != "some" else rng.sample(blocks, 1)
    if region.projector is not None and rng.random() < 0.5:
        units = [*units, region.projector]
    return [*units, region] if way in ("region", "both") else units


def _tie(rng: random.Random, module: Backbone, regions: list[Region]) -> None:
    """A weight of a region, with one that every rank uses, of another region or of one inside."""
    if rng.random() < 0.7:
        return
    first = regions[0].blocks[0]
    others: list[nn.Module] = [module.text[0], *(each.blocks[0] for each in regions[1:])]
    other = rng.choice(others)
    first.up.weight = other.up.weight


def _freeze(rng: random.Random, regions: list[Region]) -> None:
    for region in regions:
        if rng.random() < 0.2:
            # A frozen tower; with a projector, that stays trainable.
            region.blocks.requires_grad_(False)
            if region.projector is None:
                region.requires_grad_(False)


def random_settings(rng: random.Random, world_size: int) -> dict[str, Any]:
    layered = world_size == 4 and rng.random() < 0.5
    outer = rng.choice(["zero1", "replicate", "shard"]) if layered else "zero1"
    return {
        **({"zero3_size": 2, "outer": outer} if layered else {}),
        "forward_prefetch": rng.choice([0, 1, 2]),
        "backward_prefetch": rng.choice([None, *BackwardPrefetch]),
        "limit_all_gathers": rng.choice([False, True, 1]),
        "reshard_after_forward": rng.choice(
            [True, True, False] + (["compute_shard"] if outer == "shard" else [])
        ),
        "accumulation": rng.choice(["auto", "sharded", "unsharded"]),
        "deterministic": rng.random() < 0.2,
        "optional_mean": rng.choice(["all", "participants"]),
        "verify": rng.choice([None, "always"]),
    }


class Batches:
    """One sample for each rank and forward. Structures repeat, as those of real batches do."""

    def __init__(self, rng: random.Random, module: Backbone, dtype: torch.dtype) -> None:
        self._rng = rng
        self._slots = module.all_slots
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        self._known = [{}, *(self._structure() for _ in range(3))]

    def draw(self, world_size: int) -> list[Sample]:
        """Of all ranks; in some draws, of one structure."""
        agreed = self._rng.choice(self._known) if self._rng.random() < 0.3 else None
        return [self._sample(self._pick() if agreed is None else agreed) for _ in range(world_size)]

    def _pick(self) -> dict[str, tuple[Call, ...]]:
        if self._rng.random() < 0.6:
            return self._rng.choice(self._known)
        return self._structure()

    def _structure(self) -> dict[str, tuple[Call, ...]]:
        return {
            name: tuple(self._call(slot) for _ in range(self._rng.choice([0, 0, 1, 1, 2, 3])))
            for name, slot in self._slots.items()
        }

    def _call(self, slot: Slot) -> Call:
        rng = self._rng
        index = rng.randrange(len(slot.regions))
        region = slot.regions[index]
        assert isinstance(region, Region)
        way = rng.choice(WAYS) if rng.random() < 0.35 else "used"
        inner: tuple[Call, ...] = ()
        if region.inner is not None:
            inner = tuple(Call(0, self._order(region.inner)) for _ in range(rng.choice([0, 1, 2])))
        return Call(index, self._order(region), way, None, inner)

    def _order(self, region: Region) -> tuple[int, ...]:
        every = list(range(len(region.blocks)))
        if self._rng.random() < 0.6:
            return tuple(every)
        return tuple(self._rng.sample(every, self._rng.randint(1, len(every))))

    def _sample(self, structure: dict[str, tuple[Call, ...]]) -> Sample:
        calls = {
            name: tuple(
                replace(call, image=self._rows()) if self._rng.random() < 0.5 else call
                for call in calls
            )
            for name, calls in structure.items()
        }
        return Sample(self._rows(), calls)

    def _rows(self) -> Tensor:
        return torch.randn(2, WIDTH, generator=self._generator, dtype=self._dtype)


@dataclass(frozen=True)
class Plan:
    """What a step does; the same on every rank."""

    events: tuple[tuple[int, ...], ...]
    """For each delivery of gradients its micro-batches, and of each how many forwards share its one
    backward. All but the last of an event run in `no_sync`."""
    in_flight: bool
    """Run all forwards of the step before the first backward."""
    clips: bool

    @property
    def num_forwards(self) -> int:
        return sum(map(sum, self.events))


def random_plan(rng: random.Random) -> Plan:
    events = rng.choice([((1,),), ((1,),), ((2,),), ((1,), (1,)), ((1, 1),), ((1, 2), (1,))])
    return Plan(events, in_flight=rng.random() < 0.4, clips=rng.random() < 0.2)


SIMPLE = Plan(((1,),), in_flight=False, clips=False)


class Run:
    """A model, sharded, and its twin, which one process trains on the batches of all ranks."""

    def __init__(
        self,
        model: Model,
        dtype: torch.dtype = torch.float64,
        **settings: Any,
    ) -> None:
        self.twin = model.module.to(dtype)
        module = copy.deepcopy(self.twin)
        modules = dict(module.named_modules())
        self.mean = settings.get("optional_mean", "all")
        self.model = ZeRO3(
            module,
            auto_wrap_policy=lambda _, fqn: fqn in model.units,
            optional_modules=[modules[name] for name in model.optional],
            **settings,
        )
        self._low = settings.get("mixed_precision") is not None
        self._optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9)
            for each in (self.model, self.twin)
        ]
        self._sharded = dict(self.model.named_parameters())
        # A tied weight may belong to a unit around its regions, which no rank skips.
        self._optional = {
            fqn
            for unit in inner_units(self.model)
            if unit.is_optional
            for handle in unit.handles
            for fqn in handle.fqns
        }
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def step(self, plan: Plan, samples: Sequence[Sequence[Sample]], exact: bool) -> None:
        """Train both on `samples` [forward][rank], and compare losses, gradients and weights.

        Collective.

        Args:
            exact: to the bit, apart from the sign of zeros.
        """
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        check = _same_bits if exact else assert_close_in_float64
        losses = self._backward(plan, [each[self._rank] for each in samples])
        truth = self._backward_of_all(plan, samples)
        for number, (loss, expected) in enumerate(zip(losses, truth, strict=True)):
            check(loss, expected, f"loss {number}")
        if plan.clips:
            norm = self.model.clip_grad_norm_(0.5)
            expected = nn.utils.clip_grad_norm_(self.twin.parameters(), 0.5)
            check(norm, expected, "norm")
        self._compare("gradient of", lambda parameter: parameter.grad, check)
        for optimizer in self._optimizers:
            optimizer.step()
        self._compare("after the step", lambda parameter: parameter.detach(), check)

    def evaluate(self, samples: Sequence[Sample]) -> None:
        self.model.eval()
        with torch.no_grad():
            output = self.model(samples[self._rank])
            expected = self._reference()(samples[self._rank])
        self.model.train()
        check = assert_close_in_float64 if output.dtype == torch.float64 else _same_bits
        check(output, expected, "output")

    def toggle(self, rng: random.Random) -> None:
        """Freeze or unfreeze one parameter, between steps."""
        twins = dict(self.twin.named_parameters())
        name = rng.choice(sorted(twins))
        if name.startswith("head"):
            return
        for parameter in (twins[name], self._sharded[name]):
            parameter.requires_grad_(not parameter.requires_grad)

    def fail(self, samples: Sequence[Sample]) -> None:
        """A forward that ends with an exception behind all regions, on every rank."""
        head = dict(self.model.named_modules())["head"]

        def fail(*_: object) -> None:
            raise Failure

        with contextlib.suppress(Failure, RuntimeError), head.register_forward_pre_hook(fail):
            self.model(samples[self._rank])

    def _backward(self, plan: Plan, samples: list[Sample]) -> list[Tensor]:
        losses, queue = [], iter(samples)
        waiting: list[tuple[Tensor, bool]] = []

        def run(loss: Tensor, is_last: bool) -> None:
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                loss.backward()

        for event in plan.events:
            for place, count in enumerate(event):
                parts = [loss_of(self.model(next(queue))) for _ in range(count)]
                losses += [part.detach() for part in parts]
                loss = torch.stack(parts).sum()
                if plan.in_flight:
                    waiting.append((loss, place + 1 == len(event)))
                else:
                    run(loss, place + 1 == len(event))
        for loss, is_last in waiting:
            run(loss, is_last)
        return losses

    def _backward_of_all(self, plan: Plan, samples: Sequence[Sequence[Sample]]) -> list[Tensor]:
        """Losses of this rank's samples; `.grad` of the twin are those of all ranks'."""
        model = self._reference()
        queue = iter(samples)
        losses: list[Tensor] = []
        totals: list[Tensor | None] = [None] * len(list(self.twin.parameters()))
        for event in plan.events:
            forwards = [[next(queue) for _ in range(count)] for count in event]
            of_ranks = []
            for rank in range(self._world_size):
                own: list[Tensor | None] = [None] * len(totals)
                for micro_batch in forwards:
                    model.zero_grad()
                    parts = [loss_of(model(each[rank])) for each in micro_batch]
                    if rank == self._rank:
                        losses += [part.detach() for part in parts]
                    torch.stack(parts).sum().backward()
                    own = list(map(_added, own, (p.grad for p in model.parameters())))
                of_ranks.append(own)
            for index, (name, parameter) in enumerate(self.twin.named_parameters()):
                mean = self._mean([own[index] for own in of_ranks], name in self._optional)
                if mean is not None:
                    totals[index] = _added(totals[index], mean.to(parameter.dtype))
        for parameter, total in zip(self.twin.parameters(), totals, strict=True):
            parameter.grad = total
        return losses

    def _mean(self, gradients: list[Tensor | None], optional: bool) -> Tensor | None:
        """In the engine's order on gloo (docs/reference/numerics.md): added in rank order, scaled
        to the mean over all ranks, and from there to that over those that have a gradient."""
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return None
        total = present[0].to(torch.promote_types(present[0].dtype, torch.float32))
        for gradient in present[1:]:
            total = total + gradient
        mean = total * (1 / self._world_size)
        among_participants = optional and self.mean == "participants"
        return mean * (self._world_size / len(present)) if among_participants else mean

    def _reference(self) -> nn.Module:
        """The twin; in low precision a copy of it, which has its own gradients."""
        return copy.deepcopy(self.twin).to(torch.bfloat16) if self._low else self.twin

    def _compare(
        self,
        what: str,
        value: Callable[[nn.Parameter], Tensor | None],
        check: Callable[[Tensor, Tensor, str], None],
    ) -> None:
        for name, parameter in self.twin.named_parameters():
            own, expected = value(self._sharded[name]), value(parameter)
            text = f"{what} {name}"
            if own is None or expected is None:
                assert own is expected, f"{text}: got {own}, expected {expected}"
                continue
            info = get_info(self._sharded[name])
            assert info is not None
            check(own, expected.view(-1)[slice(*info.range)], text)


def _added(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """In float32 at least, where there is something to add."""
    if left is None or right is None:
        return left if right is None else right
    dtype = torch.promote_types(left.dtype, torch.float32)
    return left.to(dtype) + right.to(dtype)


def _same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(actual, expected):
        raise AssertionError(f"{what}: got {actual}, expected {expected}")
