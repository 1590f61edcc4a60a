"""Models with optional regions, and runs of them beside one process on all ranks' batches.

A text backbone with slots before, between, inside and after its blocks. A slot holds regions; a
sample says which slots its rank enters, or has a seed that draws which, how often, and how.
"""

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layerzero import BackwardPrefetch, ZeRO3
from layerzero.flat.parameter_info import get_info
from tests.harness.checks import assert_close_in_float64
from tests.harness.internals import inner_units
from tests.harness.models import WIDTH, Block
from tests.harness.reference import added

STEPS = 5
WAYS = ("lost", "detached", "no_grad", "part")
"""The result of a region is not used; is used without its gradient; is computed without autograd;
is that of one block, called alone. Else it is added to the backbone's."""


@dataclass(frozen=True)
class Sample:
    """What one rank gives to one forward."""

    rows: Tensor
    """[rows, WIDTH]"""
    seed: int | None = None
    enters: frozenset[str] = frozenset()
    """Without a seed: names of the slots that are entered once."""

    def times(self, slot: str) -> int:
        if self.seed is None:
            return int(slot in self.enters)
        return random.Random(f"{self.seed} {slot}").choice([0, 0, 1, 1, 2, 3])


class Region(nn.Module):
    """Some blocks in the order that the seed draws, perhaps with a region between them."""

    def __init__(
        self,
        depth: int = 2,
        *,
        norm: bool = False,
        inner: "Region | None" = None,
        projects: bool = False,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.inner = inner
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.projector = nn.Linear(WIDTH, WIDTH) if projects else None
        self.recomputes = recomputes

    def forward(self, x: Tensor, seed: str = "") -> Tensor:
        rng, blocks = random.Random(seed), [*self.blocks]
        if seed and rng.random() < 0.4:
            blocks = rng.sample(blocks, rng.randint(1, len(blocks)))
        for place, block in enumerate(blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            if place == 0 and self.inner is not None:
                for number in range(rng.randrange(3)):
                    x = x + self.inner(x, f"{seed} {number}")
        x = self.norm(x)
        return x if self.projector is None else self.projector(x)


class Slot(nn.Module):
    def __init__(self, name: str, regions: Sequence[Region], recomputes: bool = False) -> None:
        super().__init__()
        self.name, self.recomputes = name, recomputes
        self.regions = nn.ModuleList(regions)

    def forward(self, x: Tensor, sample: Sample) -> Tensor:
        for number in range(sample.times(self.name)):
            seed = "" if sample.seed is None else f"{sample.seed} {self.name} {number}"
            rng = random.Random(seed)
            region: Any = rng.choice([*self.regions])
            way = rng.choice(WAYS) if seed and rng.random() < 0.35 else "used"
            source = sample.rows if seed and rng.random() < 0.5 else x
            with torch.set_grad_enabled(torch.is_grad_enabled() and way != "no_grad"):
                if way == "part":
                    y = rng.choice([*region.blocks])(source)
                elif self.recomputes:
                    y = checkpoint(region, source, seed, use_reentrant=False)
                else:
                    y = region(source, seed)
            if way != "lost":
                x = x + torch.tanh(y.detach() if way == "detached" else y)
        return x


class TextBlock(nn.Module):
    """Runs on every rank; may have a slot inside."""

    def __init__(self, slot: Slot | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)  # As in a Block, with which it may be tied.
        self.slot = slot
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor, sample: Sample | None = None) -> Tensor:
        y = torch.tanh(self.up(x))
        if self.slot is not None:
            x = self.slot(x, sample)
        return x + self.down(y)


class Backbone(nn.Module):
    def __init__(
        self, slots: Sequence[Slot | None], text: Sequence[TextBlock], recomputes: bool = False
    ) -> None:
        """
        Args:
            slots: before each text block, and one after the last.
            recomputes: run the text blocks, with what is inside them, under `checkpoint`.
        """
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.slots = nn.ModuleDict({slot.name: slot for slot in slots if slot is not None})
        self.text = nn.ModuleList(text)
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.recomputes = recomputes
        self.ends_in_slot = False

    def end_in_slot(self) -> set[str]:
        """Have the head run before the last slot, whose result is the model's.

        Returns:
            The modules to make units of, so that the root has no parameters.
        """
        self.ends_in_slot = True
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        return {"stem", "head", *(f"text.{index}" for index in range(len(self.text)))}

    def forward(self, sample: Sample) -> Tensor:
        x = self.stem(sample.rows)
        for index, block in enumerate(self.text):
            x = self._slot(x, index, sample)
            x = (
                checkpoint(block, x, sample, use_reentrant=False)
                if self.recomputes
                else block(x, sample)
            )
        if self.ends_in_slot:
            return self._slot(self.head(x), len(self.text), sample)
        return self.head(self._slot(x, len(self.text), sample))

    def _slot(self, x: Tensor, index: int, sample: Sample) -> Tensor:
        name = str(index)
        return self.slots[name](x, sample) if name in self.slots and sample.times(name) else x

    @property
    def all_slots(self) -> list[Slot]:
        return [part for part in self.modules() if isinstance(part, Slot)]


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


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
        regions = [region for slot in self.module.all_slots for region in slot.regions]
        return len(regions) > len(set(regions))

    def sharded(self, are_optional: bool = True, **settings: Any) -> ZeRO3:
        module = copy.deepcopy(self.module)
        modules = dict(module.named_modules())
        return ZeRO3(
            module,
            auto_wrap_policy=lambda _, fqn: fqn in self.units,
            optional_modules=[modules[name] for name in self.optional if are_optional],
            **settings,
        )


def random_model(rng: random.Random) -> Model:
    apart = random.Random(str(rng.getstate()))
    module, regions = _backbone(rng)
    _tie(rng, module, regions)
    for region in regions:
        if rng.random() < 0.2:  # A frozen tower; with a projector, that stays trainable.
            frozen = region if region.projector is None else region.blocks
            frozen.requires_grad_(False)
    names = {each: name for name, each in module.named_modules()}
    units, optional = set[str](), list[str]()
    for region in regions:
        own = _units_of(rng, region)
        units |= {names[each] for each in own}
        is_container = region not in own and region.projector is None and rng.random() < 0.4
        optional.append(names[region.blocks if is_container else region])
    if rng.random() < 0.8:
        units |= {names[block] for block in module.text}
    # A slot is a container, too; then regions inside may be named as well, or not.
    for slot in module.all_slots:
        if rng.random() < 0.2:
            optional.append(names[slot])
            if rng.random() < 0.5:
                below = names[slot] + "."
                optional = [name for name in optional if not name.startswith(below)]
    rng.shuffle(optional)
    if apart.random() < 0.3:
        units.update(module.end_in_slot())
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
        return Slot(place, regions, recomputes=rng.random() < 0.2)

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


def random_batches(rng: random.Random, dtype: torch.dtype) -> Callable[[int], list[Sample]]:
    """A function that draws one sample for each of so many ranks, in some draws of one seed. Seeds
    repeat, as the structures of real batches do."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    known = [None, *(rng.randrange(1 << 30) for _ in range(3))]

    def pick() -> int | None:
        return rng.choice(known) if rng.random() < 0.6 else rng.randrange(1 << 30)

    def draw(world_size: int) -> list[Sample]:
        agrees, agreed = rng.random() < 0.3, rng.choice(known)
        rows = torch.randn(world_size, 2, WIDTH, generator=generator, dtype=dtype)
        return [Sample(each, agreed if agrees else pick()) for each in rows]

    return draw


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

    def __init__(self, model: Model, dtype: torch.dtype, **settings: Any) -> None:
        self.twin = model.module.to(dtype)
        self.mean = settings.get("optional_mean", "all")
        self.model = model.sharded(**settings)
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
            output, expected = (each(samples[self._rank]) for each in (self.model, self.twin))
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
            raise KeyError

        with contextlib.suppress(KeyError, RuntimeError), head.register_forward_pre_hook(fail):
            self.model(samples[self._rank])

    def _backward(self, plan: Plan, samples: list[Sample]) -> list[Tensor]:
        losses, waiting, queue = [], list[tuple[Tensor, bool]](), iter(samples)
        for event in plan.events:
            for place, count in enumerate(event):
                parts = [loss_of(self.model(next(queue))) for _ in range(count)]
                losses += [part.detach() for part in parts]
                waiting.append((torch.stack(parts).sum(), place + 1 == len(event)))
                if not plan.in_flight:
                    self._run(waiting)
        self._run(waiting)
        return losses

    def _run(self, waiting: list[tuple[Tensor, bool]]) -> None:
        while waiting:
            loss, syncs = waiting.pop(0)
            with contextlib.nullcontext() if syncs else self.model.no_sync():
                loss.backward()

    def _backward_of_all(self, plan: Plan, samples: Sequence[Sequence[Sample]]) -> list[Tensor]:
        """Losses of this rank's samples; `.grad` of the twin are those of all ranks'."""
        queue = iter(samples)
        losses: list[Tensor] = []
        totals: list[Tensor | None] = [None] * len(list(self.twin.parameters()))
        for event in plan.events:
            forwards = [[next(queue) for _ in range(count)] for count in event]
            of_ranks = []
            for rank in range(self._world_size):
                own: list[Tensor | None] = [None] * len(totals)
                for micro_batch in forwards:
                    self.twin.zero_grad()
                    parts = [loss_of(self.twin(each[rank])) for each in micro_batch]
                    if rank == self._rank:
                        losses += [part.detach() for part in parts]
                    torch.stack(parts).sum().backward()
                    own = list(map(added, own, (p.grad for p in self.twin.parameters())))
                of_ranks.append(own)
            for index, (name, _) in enumerate(self.twin.named_parameters()):
                mean = self._mean([own[index] for own in of_ranks], name in self._optional)
                if mean is not None:
                    totals[index] = added(totals[index], mean)
        for parameter, total in zip(self.twin.parameters(), totals, strict=True):
            parameter.grad = total
        return losses

    def _mean(self, gradients: list[Tensor | None], optional: bool) -> Tensor | None:
        """In the engine's order on gloo (docs/reference/numerics.md): added in rank order, scaled
        to the mean over all ranks, and from there to that over those that have a gradient."""
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return None
        mean = sum(present[1:], present[0]) * (1 / self._world_size)
        among_participants = optional and self.mean == "participants"
        return mean * (self._world_size / len(present)) if among_participants else mean

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


def _same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(actual, expected):
        raise AssertionError(f"{what}: got {actual}, expected {expected}")
