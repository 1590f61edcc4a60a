"""`optional_modules` and `optional_mean`: which units become optional, and what is refused."""

import gc
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from layerzero import ShardingPlan, ZeRO3, shard_with_plan
from layerzero.build import compare
from layerzero.parallel.pipeline import ZeRO3PipelineStage
from layerzero.plan.resolve import optional_by_name
from tests.harness.checks import named, warns_on_first_rank
from tests.harness.compare import assert_trains_alike
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import on_ranks
from tests.harness.reference import seeded
from tests.harness.regions import recorded_regions


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
    def __init__(self) -> None:
        super().__init__()
        self.vision = Tower()
        self.audio = Tower(1)
        self.trunk = Block()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(self.audio(self.vision(x))))


def wrapped(model: nn.Module, *optional: nn.Module, **options: Any) -> Any:
    """The regions that `ZeRO3` is given, and the model (which skips nothing)."""
    options.setdefault("auto_wrap_policy", {Tower, Block})
    with recorded_regions() as found:
        sharded = ZeRO3(model, optional_modules=optional, **options)
    return found[-1], sharded


def regions(model: nn.Module, *optional: nn.Module, **options: Any) -> dict[str, str]:
    found, _ = wrapped(model, *optional, **options)
    return found[0]


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
        options = {"auto_wrap_policy": {Tower, Block}, "optional_mean": "participants", **options}
        with recorded_regions() as found:
            ZeRO3(model, optional_modules=choose(model), **options)
        assert found == [(expected, "participants")]
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
    found, _ = wrapped(model, model[2], auto_wrap_policy={Block, nn.Linear})
    assert found is None or set(found[0]) == {"2"}
    model = seeded(Towers)  # A unit outside that a call under an optional module gathers.

    def policy(module: nn.Module, fqn: str) -> Any:
        return {"hook_module": model.vision} if fqn == "trunk" else isinstance(module, Tower)

    expected = {"vision": "vision", "trunk": "trunk"}
    assert regions(model, model.vision, auto_wrap_policy=policy) == expected


@on_ranks(2)
def test_optional_modules_of_nested_wrappers_join_those_of_the_outer_one() -> None:
    def inner(model: nn.Module, *optional: nn.Module, **options: Any) -> ZeRO3:
        with recorded_regions():
            return ZeRO3(model, auto_wrap_policy={Block}, optional_modules=optional, **options)

    participants = {"optional_mean": "participants"}
    for keeps_wrapper in (True, False):
        model = seeded(Towers)
        audio = inner(model.audio)
        vision = inner(model.vision, model.vision.blocks[1], **participants)
        if keeps_wrapper:
            model.vision, model.audio = vision, audio
        found, _ = wrapped(model)
        assert found == ({"vision.blocks.1": "vision.blocks.1"}, "participants")
    # Two levels, and the outermost has some of its own.
    model = seeded(Towers)
    outer = nn.Sequential(model, Block())
    vision = inner(model.vision, *model.vision.blocks)
    middle = inner(model, model.trunk)
    found, _ = wrapped(outer, outer[1])
    names = ["0.vision.blocks.0", "0.vision.blocks.1", "0.trunk", "1"]
    assert found == ({name: name for name in names}, "all")
    model = seeded(Towers)
    vision = inner(model.vision, *model.vision.blocks, **participants)
    with pytest.raises(ValueError, match=r"optional_mean='all', but a ZeRO3 module inside was"):
        wrapped(model, model.audio)
    found, _ = wrapped(model, model.audio, **participants)
    assert found is not None and found[1] == "participants"
    del vision, middle


@on_ranks(2)
def test_only_the_arguments_of_the_last_wrapping_count() -> None:
    model = seeded(Towers)
    _, sharded = wrapped(model, model.vision)
    del sharded
    gc.collect()
    assert regions(model, model.audio) == AUDIO
    gc.collect()
    found, sharded = wrapped(model)
    assert found is None
    # Its modules in another model: plain again, so nothing of the first wrapping is left.
    model = seeded(Towers)
    _, sharded = wrapped(model, model.vision.blocks[0])
    del sharded
    gc.collect()
    _, first = wrapped(model.vision)
    found, _ = wrapped(nn.Sequential(first))
    assert found is None
    # `rewrap` has those of before, by their names.
    model = seeded(Towers)
    given = iter([model.vision, model.audio])  # Read once.
    options = {"auto_wrap_policy": {Tower, Block}, "optional_mean": "participants"}
    with recorded_regions() as found:
        sharded = ZeRO3(model, optional_modules=given, **options)
        model.vision.blocks.append(seeded(Block))
        layerzero.rewrap(sharded)
        more = VISION | {"vision.blocks.2": "vision"}
        assert found == [(VISION | AUDIO, "participants"), (more | AUDIO, "participants")]
        model.vision = seeded(Tower)  # Another module of that name.
        model.audio = nn.Identity()
        layerzero.rewrap(sharded)
        assert found[-1] == (VISION, "participants")
        model.vision = nn.Identity()
        layerzero.rewrap(sharded)
        assert found[-1] is None


def refused(
    error: type[Exception], pattern: str, choose: Callable[[nn.Module], Any], **options: Any
) -> None:
    model = seeded(options.pop("make", Towers))
    options = {"auto_wrap_policy": {Tower, Block}, **options}
    options = {key: of(model) if key in IGNORED else of for key, of in options.items()}
    with pytest.raises(error, match=pattern):
        ZeRO3(model, optional_modules=choose(model), **options)
    ZeRO3(model, auto_wrap_policy={Tower, Block})  # It was not changed.


IGNORED = "ignored_modules", "ignored_parameters"
"""Arguments that a case gives as functions of the model."""
NO_UNIT = r"'vision' \(Tower\) has no unit"
BELONGS = r"has no unit: its parameters, such as .* belong to"


def _broken(model: nn.Module) -> Any:
    yield model.vision
    raise KeyError("the user's")


REFUSED: list[tuple[type[Exception], str, Callable[[Any], Any], dict[str, Any]]] = [
    (TypeError, "expected an iterable of modules, got Tower$", lambda m: m.vision, {}),
    (TypeError, "expected an iterable of modules, got 'vision'", lambda m: "vision", {}),
    (TypeError, "expected an iterable of modules, got None", lambda m: None, {}),
    (TypeError, "expected modules, got 'vision'", lambda m: ["vision"], {}),
    (TypeError, "expected modules, got Parameter$", lambda m: [m.vision.scale], {}),
    (TypeError, "expected modules, got 3", lambda m: [m.vision, 3], {}),
    (KeyError, "the user's", _broken, {}),
    (ValueError, "a Block that is not inside the wrapped Towers", lambda m: [Block()], {}),
    (ValueError, "contains the wrapped Towers itself", lambda m: [m.vision, m], {}),
    (ValueError, "a Sequential that contains the wrapped", lambda m: [nn.Sequential(m)], {}),
    (
        ValueError,
        rf"'head' \(Linear\) {BELONGS} 'the root unit'.*auto_wrap_policy=\{{Linear, \.\.\.\}}",
        lambda m: [m.head],
        {},
    ),
    (
        ValueError,
        rf"'vision.blocks' \(ModuleList\) {BELONGS} 'vision', .*=\{{Block, \.\.\.\}}",
        lambda m: [m.vision.blocks],
        {"auto_wrap_policy": {Tower}},
    ),
    (ValueError, NO_UNIT, lambda m: [m.vision], {"auto_wrap_policy": None}),
    (
        ValueError,
        r"'vision.act' \(Tanh\) has no unit: it has no parameters",
        lambda m: [m.vision.act],
        {"auto_wrap_policy": {Tower, nn.Tanh}},
    ),
    *(
        (ValueError, f"{NO_UNIT}: all of its parameters are ignored", lambda m: [m.vision], options)
        for options in (
            {"ignored_modules": lambda m: [m.vision]},
            {"ignored_parameters": lambda m: m.vision.parameters()},
        )
    ),
    (
        ValueError,
        "optional_mean: expected 'all' or 'participants', got 'sum'",
        lambda m: [m.vision],
        {"optional_mean": "sum"},
    ),
]


@on_ranks(2)
def test_bad_input_is_refused_with_names() -> None:
    for *case, options in REFUSED:
        with named(case[1]):
            refused(*case, **options)
        gc.collect()
    # Units that not all ranks share.
    rank = dist.get_rank()
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "edp"))["edp"]

    def policy(module: nn.Module, fqn: str) -> Any:
        is_expert = fqn == "vision.blocks.1"
        return {"process_group": alone} if is_expert else isinstance(module, (Tower, Block))

    refused(
        ValueError,
        rf"'vision' contains 'vision.blocks.1', which ranks \[{rank}\] share, while ranks \[0, 1\] "
        "share the model",
        lambda m: [m.vision],
        auto_wrap_policy=policy,
    )
    model = seeded(Towers)
    _, sharded = wrapped(model, model.vision)
    with pytest.raises(NotImplementedError, match=r"stage 0: .* optional_modules \['vision'\]"):
        ZeRO3PipelineStage(sharded, 0, 1, torch.device("cpu"))


DIFFER = "optional modules differ between ranks: rank 1 has"
ITSELF = "contains the wrapped Towers itself"
LOOKED_UP = "'vison' matches no module"
DIFFERING: list[tuple[tuple[Callable[[Any], Any], ...], tuple[str, ...], tuple[str, ...]]] = [
    (
        (lambda m: [m.vision], lambda m: [m.audio]),
        (f"{DIFFER} 'audio' with optional_mean='all', where rank 0 has 'vision'",) * 2,
        ("all", "all"),
    ),
    (
        (lambda m: [], lambda m: [m.vision]),
        (f"{DIFFER} 'vision' .*, where rank 0 has no other optional module",) * 2,
        ("all", "all"),
    ),
    (
        (lambda m: [m.vision],) * 2,
        (f"{DIFFER} .* optional_mean='participants', where rank 0 has .* optional_mean='all'",) * 2,
        ("all", "participants"),
    ),
    # One rank's bad input is raised on every rank.
    (
        (lambda m: [], lambda m: [m]),
        (f"rank 1 refused .*: ValueError: optional_modules: {ITSELF}", ITSELF),
        ("all", "all"),
    ),
    (
        (lambda m: ["vision"], lambda m: [m.vision]),
        ("expected modules, got", "rank 0 refused .*: TypeError: .*'vision'"),
        ("all", "all"),
    ),
    (
        tuple(lambda m, n=name: optional_by_name(m, [n]) for name in ("vision", "vison")),
        (
            f"rank 1 refused .*: ValueError: optional_modules: {LOOKED_UP}",
            f"{LOOKED_UP}; near matches: 'vision'",
        ),
        ("all", "all"),
    ),
]
"""By rank: which modules, words of the error, and mean."""


@on_ranks(2)
def test_what_differs_between_ranks_is_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    for by_rank in DIFFERING:
        choose, text, mean = (each[rank] for each in by_rank)
        error = TypeError if text == "expected modules, got" else ValueError
        with named(text):
            refused(error, text, choose, optional_mean=mean)
        gc.collect()
    # The same modules in another order are the same.
    model = seeded(Towers)
    order = [model.vision, model.audio][:: 1 if rank else -1]
    assert regions(model, *order) == VISION | AUDIO
    # Different models are still named as such.
    model = nn.Sequential(Block(), Block(7 if rank else WIDTH))
    with pytest.raises(ValueError, match="ZeRO3: parameters differ between ranks"):
        ZeRO3(model, auto_wrap_policy={Block}, optional_modules=[model[rank]])


def with_norm(tower: str) -> nn.Module:
    model = Towers()
    getattr(model, tower).norm = nn.SyncBatchNorm(WIDTH)
    return model


@on_ranks(2)
def test_what_has_no_effect_and_norms_over_all_ranks_are_warned_of() -> None:
    with warns_on_first_rank("optional_mean='participants' has no effect"):
        ZeRO3(seeded(Towers), auto_wrap_policy={Block}, optional_mean="participants")
    model = with_norm("vision")
    with warns_on_first_rank(r"'vision' contains a SyncBatchNorm \('vision.norm'\)"):
        wrapped(model, model.vision)
    with warnings.catch_warnings():  # Given by one rank, and raised on all.
        warnings.simplefilter("error")
        text, error = "'audio' contains a SyncBatchNorm", (UserWarning, ValueError)
        refused(error[dist.get_rank()], text, lambda m: [m.audio], make=lambda: with_norm("audio"))


class Sees(Towers):
    """Which of its towers run is in the batch."""

    def forward(self, batch: tuple[Tensor, list[int]]) -> Tensor:
        x, runs = batch
        for tower, does_run in zip((self.vision, self.audio), runs, strict=True):
            x = x + tower(x) if does_run else x
        return self.head(self.trunk(x))


def batches(steps: int, seed: int = 0) -> list[list[tuple[Tensor, list[int]]]]:
    """By step and rank; each rank runs each tower or not, at random."""
    generator = torch.Generator().manual_seed(seed)

    def batch() -> tuple[Tensor, list[int]]:
        x = torch.randn(3, WIDTH, generator=generator)
        return x, torch.randint(0, 2, (2,), generator=generator).tolist()

    return [[batch() for _ in range(dist.get_world_size())] for _ in range(steps)]


@on_ranks(2)
def test_every_way_in_trains_like_one_process() -> None:
    units = {"auto_wrap_policy": {Tower, Block}}
    with named("nested wrappers"):
        plain, model = (
            seeded(lambda: nn.Sequential(Sees(), nn.Linear(3, WIDTH), Block())) for _ in range(2)
        )
        model[0].vision = ZeRO3(model[0].vision, auto_wrap_policy={Block})
        towers = [model[0].vision, model[0].audio]
        model[0] = ZeRO3(model[0], optional_modules=towers, **units)
        assert_trains_alike(ZeRO3(model, auto_wrap_policy={Block}), plain, batches(4))
    with named("a plan"):
        plan = ShardingPlan(
            apply_modules=["vision", "*blocks.{*}", "trunk", "head"],
            optional=["vision", "audio"],
            num_to_forward_prefetch=2,
        )
        assert_trains_alike(shard_with_plan(seeded(Sees), plan), seeded(Sees), batches(4))
    with named("rewrapped"):
        model, plain = seeded(Sees), seeded(Sees)
        model = ZeRO3(model, optional_modules=[model.vision, model.audio], **units)
        assert_trains_alike(model, plain, batches(2))
        for each in (model, plain):
            each.vision.blocks.append(seeded(Block))
        layerzero.rewrap(model)
        assert_trains_alike(model, plain, batches(3, seed=1))
    with named("tied"):
        model = seeded(TiedAndHooked)
        model = ZeRO3(model, optional_modules=[model.audio], **units)
        # Every rank runs the other tower, but for the block that both have.
        some = [[(x, [1, audio]) for x, (_, audio) in step] for step in batches(4)]
        assert_trains_alike(model, seeded(TiedAndHooked), some)


class TiedAndHooked(Sees):
    """A tower uses a parameter of another unit, and a list of parameters that it gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.audio.blocks[0] = self.vision.blocks[0]
        self.trunk.up.weight = self.vision.blocks[0].up.weight
        self.vision.gains = nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])
        self.vision.act = nn.Identity()


@on_ranks(2)
def test_without_optional_modules_the_root_and_the_exchange_are_those_of_before() -> None:
    sent: list[Any] = []
    gather = compare.gather_along

    def spy(values: Tensor, *args: Any) -> Tensor:
        sent.append(values.tolist())
        return gather(values, *args)

    with (
        mock.patch.object(compare, "gather_along", spy),
        recorded_regions() as found,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        for options in ({}, {"optional_modules": ()}, {"optional_modules": iter([])}):
            model = ZeRO3(seeded(Towers), auto_wrap_policy={Tower, Block}, **options)
            assert root_state(model).scheduler.agreed is None
    assert found == [None, None, None] and sent
    assert sent == sent[: len(sent) // 3] * 3
