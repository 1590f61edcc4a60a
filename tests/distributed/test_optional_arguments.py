"""`optional_modules` and `optional_mean`: which units become optional, and what is refused."""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from layerzero import ZeRO3
from layerzero.parallel.pipeline import ZeRO3PipelineStage
from tests.harness.checks import named
from tests.harness.compare import assert_trains_alike
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import on_ranks
from tests.harness.recording import regions_of
from tests.harness.reference import seeded


class Tower(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.scale)
        return self.act(x)


class Towers(nn.Module):
    """Which of its towers run is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Tower()
        self.audio = Tower(1)
        self.trunk = Block()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, batch: tuple[Tensor, list[int]]) -> Tensor:
        x, runs = batch
        for tower, does_run in zip((self.vision, self.audio), runs, strict=True):
            x = x + tower(x) if does_run else x
        return self.head(self.trunk(x))


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


class Tied(nn.Module):
    """Block 0 of the tower and the whole other tower share a parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.other = Tower(1)
        self.tower = Tower()
        if how == "in the tower":
            self.tower.blocks[0].up.weight = self.tower.blocks[1].up.weight
        elif how == "with the other":
            self.tower.blocks[0].up.weight = self.other.blocks[0].up.weight
        else:
            self.tower.part = self.other.blocks[0]
        if how == "a parameter of the other":
            self.other.blocks[0].up.weight = nn.Parameter(torch.ones(7, WIDTH))
            self.other.extra = nn.Linear(WIDTH, 7)
            self.other.extra.weight = self.other.blocks[0].up.weight


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
        model = seeded(lambda how=how: Tied(how))
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


def batches(steps: int, seed: int = 0) -> list[list[tuple[Tensor, list[int]]]]:
    """By step and rank; each rank runs each tower or not, at random."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(steps, 2, 3, WIDTH, generator=generator)
    runs = torch.randint(0, 2, (steps, 2, 2), generator=generator).tolist()
    return [[*zip(*of_step, strict=True)] for of_step in zip(rows, runs, strict=True)]


class TiedTowers(Towers):
    """One uses a block of the other, of which the trunk uses a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.audio.blocks[0] = self.vision.blocks[0]
        self.trunk.up.weight = self.vision.blocks[0].up.weight


@on_ranks(2)
def test_every_way_in_trains_like_one_process() -> None:
    with named("nested wrappers"):
        model = seeded(Towers)
        model.vision = ZeRO3(model.vision, auto_wrap_policy={Block})
        assert_trains_alike(wrapped(model, [model.vision, model.audio]), seeded(Towers), batches(4))
    with named("rewrapped"):
        model, plain = seeded(Towers), seeded(Towers)
        model = wrapped(model, [model.vision, model.audio])
        assert_trains_alike(model, plain, batches(2))
        for each in (model, plain):
            each.vision.blocks.append(seeded(Block))
        layerzero.rewrap(model)
        assert_trains_alike(model, plain, batches(3, seed=1))
    with named("tied"):
        model = seeded(TiedTowers)
        # Every rank runs the other tower, but for the block that both have.
        some = [[(x, [1, audio]) for x, (_, audio) in step] for step in batches(4)]
        assert_trains_alike(wrapped(model, [model.audio]), seeded(TiedTowers), some)
