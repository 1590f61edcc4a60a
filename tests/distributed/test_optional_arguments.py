"""`optional_modules` and `optional_mean`: which units become optional, and what is refused."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
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
from tests.distributed.test_optional_modules import counted_exchanges
from tests.harness.checks import warns_on_first_rank
from tests.harness.compare import assert_trains_alike
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import run_ranks
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


# Which units --------------------------------------------------------------------------------------

VISION = {f"vision{rest}": "vision" for rest in ("", ".blocks.0", ".blocks.1")}
AUDIO = {"audio": "audio", "audio.blocks.0": "audio"}


def _units_at_and_under() -> None:
    model = seeded(Towers)
    assert regions(model, model.vision) == VISION
    model = seeded(Towers)
    assert regions(model, model.vision, model.audio) == VISION | AUDIO
    model = seeded(Towers)  # The tower itself is no unit, but the list inside it has some.
    only_blocks = {Block}
    assert regions(model, model.vision, auto_wrap_policy=only_blocks) == {
        "vision.blocks.0": "vision",
        "vision.blocks.1": "vision",
    }
    model = seeded(Towers)
    assert regions(model, model.vision.blocks) == {
        "vision.blocks.0": "vision.blocks",
        "vision.blocks.1": "vision.blocks",
    }


def _the_innermost_names_the_region() -> None:
    model = seeded(Towers)
    inner = model.vision.blocks[1]
    assert regions(model, inner, model.vision) == VISION | {"vision.blocks.1": "vision.blocks.1"}
    model = seeded(Towers)
    assert regions(model, model.vision, model.vision.blocks[0], model.vision.blocks[1]) == {
        "vision": "vision",
        "vision.blocks.0": "vision.blocks.0",
        "vision.blocks.1": "vision.blocks.1",
    }


def _any_iterable_and_duplicates() -> None:
    for of in (list, tuple, set, iter, lambda two: (each for each in (*two, *two))):
        model = seeded(Towers)
        with recorded_regions() as found:
            ZeRO3(
                model,
                auto_wrap_policy={Tower, Block},
                optional_modules=of([model.vision, model.audio]),
                optional_mean="participants",
            )
        assert found == [(VISION | AUDIO, "participants")], of


def _wrappers_around() -> None:
    """A module inside torch.compile or a checkpoint wrapper, and the wrapper, are one module."""
    for wrap in (checkpoint_wrapper, lambda module: torch.compile(module, backend="eager")):
        for take in (lambda outer, inner: outer, lambda outer, inner: inner):
            model = seeded(Towers)
            inner = model.vision
            model.vision = outer = wrap(inner)
            assert regions(model, take(outer, inner)) == VISION


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
        elif how == "a module of the other":
            self.tower.part = self.other.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(self.other(x))


def _tied() -> None:
    tower = {f"tower{rest}": "tower" for rest in ("", ".blocks.0", ".blocks.1")}
    for how in ("in the tower", "with the other"):  # Owned by the tower; by the root.
        model = seeded(lambda how=how: Tied(how))
        assert regions(model, model.tower) == tower, how
    # The unit lies under the optional module by its second name.
    model = seeded(lambda: Tied("a module of the other"))
    assert regions(model, model.tower) == {"other.blocks.0": "tower", **tower}
    # A parameter of a unit outside is used under the optional module: a region of its own.
    model = seeded(lambda: Tied("a module of the other"))
    model.other.blocks[0].up.weight = nn.Parameter(torch.ones(7, WIDTH))
    model.other.extra = nn.Linear(WIDTH, 7)
    model.other.extra.weight = model.other.blocks[0].up.weight
    assert regions(model, model.tower) == {
        "other": "other",
        "other.blocks.0": "tower",
        **tower,
    }


def _all_tied_to_what_every_rank_needs() -> None:
    model = nn.Sequential(nn.Embedding(3, WIDTH), Block(), nn.Linear(WIDTH, 3, bias=False))
    model[2].weight = model[0].weight
    found, _ = wrapped(model, model[2], auto_wrap_policy={Block, nn.Linear})
    assert found is None or set(found[0]) == {"2"}


def _hook_modules() -> None:
    """A unit outside that a call under an optional module gathers is a region of its own."""
    model = seeded(Towers)

    def policy(module: nn.Module, fqn: str) -> Any:
        return {"hook_module": model.vision} if fqn == "trunk" else isinstance(module, Tower)

    assert regions(model, model.vision, auto_wrap_policy=policy) == {
        "vision": "vision",
        "trunk": "trunk",
    }


def _nested_wrappers() -> None:
    for keeps_wrapper in (True, False):
        model = seeded(Towers)
        inner = ZeRO3(model.audio, auto_wrap_policy={Block})
        with recorded_regions() as found:
            vision = ZeRO3(
                model.vision,
                auto_wrap_policy={Block},
                optional_modules=[model.vision.blocks[1]],
                optional_mean="participants",
            )
        assert found == [({"blocks.1": "blocks.1"}, "participants")]
        if keeps_wrapper:
            model.vision, model.audio = vision, inner
        found, _ = wrapped(model)
        assert found == ({"vision.blocks.1": "vision.blocks.1"}, "participants")
        del vision, inner
    # Two levels, and the outermost has some of its own.
    model = seeded(Towers)
    outer = nn.Sequential(model, Block())
    with recorded_regions():
        vision = ZeRO3(model.vision, auto_wrap_policy={Block}, optional_modules=model.vision.blocks)
        middle = ZeRO3(model, optional_modules=[model.trunk], auto_wrap_policy={Block})
    found, _ = wrapped(outer, outer[1])
    assert found == (
        {
            "0.vision.blocks.0": "0.vision.blocks.0",
            "0.vision.blocks.1": "0.vision.blocks.1",
            "0.trunk": "0.trunk",
            "1": "1",
        },
        "all",
    )
    del vision, middle


def _means_of_nested_wrappers() -> None:
    def inner(model: nn.Module) -> ZeRO3:
        with recorded_regions():
            return ZeRO3(
                model.vision,
                auto_wrap_policy={Block},
                optional_modules=model.vision.blocks,
                optional_mean="participants",
            )

    model = seeded(Towers)
    vision = inner(model)
    with pytest.raises(ValueError, match=r"optional_mean='all', but a ZeRO3 module inside was"):
        wrapped(model, model.audio)
    found, _ = wrapped(model, model.audio, optional_mean="participants")
    assert found is not None and found[1] == "participants"
    del vision


def _wrapped_again() -> None:
    """Only the arguments of the last wrapping count, once the wrapper is gone."""
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
    bigger = nn.Sequential(first)
    found, _ = wrapped(bigger)
    assert found is None


def _rewrap() -> None:
    model = seeded(Towers)
    given = iter([model.vision, model.audio])  # Read once.
    with recorded_regions() as found:
        sharded = ZeRO3(
            model,
            auto_wrap_policy={Tower, Block},
            optional_modules=given,
            optional_mean="participants",
        )
        model.vision.blocks.append(seeded(Block))
        layerzero.rewrap(sharded)
        more = VISION | {"vision.blocks.2": "vision"}
        assert found == [(VISION | AUDIO, "participants"), (more | AUDIO, "participants")]
        model.vision = seeded(Tower)  # Another module of that name.
        model.audio = nn.Identity()
        layerzero.rewrap(sharded)
        assert found[-1] == (VISION, "participants")
        del model.vision
        model.vision = nn.Identity()
        layerzero.rewrap(sharded)
        assert found[-1] is None


def _what() -> list[Callable[[], None]]:
    return [
        _units_at_and_under,
        _the_innermost_names_the_region,
        _any_iterable_and_duplicates,
        _wrappers_around,
        _tied,
        _all_tied_to_what_every_rank_needs,
        _hook_modules,
        _nested_wrappers,
        _means_of_nested_wrappers,
        _wrapped_again,
        _rewrap,
    ]


def _regions() -> None:
    for check in _what():
        check()
        gc.collect()


def test_units_at_and_under_optional_modules_are_their_regions() -> None:
    run_ranks(2, _regions)


# What is refused ----------------------------------------------------------------------------------


def refused(
    error: type[Exception], pattern: str, choose: Callable[[nn.Module], Any], **options: Any
) -> None:
    model = options.pop("model", None) or seeded(Towers)
    options.setdefault("auto_wrap_policy", {Tower, Block})
    with pytest.raises(error, match=pattern):
        ZeRO3(model, optional_modules=choose(model), **options)
    ZeRO3(model, auto_wrap_policy={Tower, Block})  # It was not changed.


def _refused() -> None:
    refused(TypeError, "expected an iterable of modules, got Tower$", lambda m: m.vision)
    refused(TypeError, "expected an iterable of modules, got 'vision'", lambda m: "vision")
    refused(TypeError, "expected an iterable of modules, got None", lambda m: None)
    refused(TypeError, "got 'vision'; names are not looked up", lambda m: ["vision"])
    refused(TypeError, "expected modules, got Parameter$", lambda m: [m.vision.scale])
    refused(TypeError, "expected modules, got 3", lambda m: [m.vision, 3])
    refused(ValueError, "a Block that is not inside the wrapped Towers", lambda m: [Block()])
    refused(ValueError, "contains the wrapped Towers itself", lambda m: [m.vision, m])
    refused(
        ValueError,
        "a Sequential that contains the wrapped Towers",
        lambda m: [nn.Sequential(m)],
    )
    refused(
        ValueError,
        r"'head' \(Linear\) has no unit: its parameters, such as 'head.weight', belong to 'the "
        r"root unit'.*auto_wrap_policy=\{Linear, \.\.\.\}",
        lambda m: [m.head],
    )
    refused(
        ValueError,
        r"'vision.blocks' \(ModuleList\) has no unit: .* belong to 'vision', .*=\{Block, \.\.\.\}",
        lambda m: [m.vision.blocks],
        auto_wrap_policy={Tower},
    )
    refused(
        ValueError, r"'vision' \(Tower\) has no unit", lambda m: [m.vision], auto_wrap_policy=None
    )
    refused(
        ValueError,
        r"'vision.act' \(Tanh\) has no unit: it has no parameters",
        lambda m: [m.vision.act],
        auto_wrap_policy={Tower, nn.Tanh},
    )
    model = seeded(Towers)
    refused(
        ValueError,
        r"'vision' \(Tower\) has no unit: all of its parameters are ignored",
        lambda m: [m.vision],
        model=model,
        ignored_modules=[model.vision],
    )
    model = seeded(Towers)
    refused(
        ValueError,
        "all of its parameters are ignored",
        lambda m: [m.vision],
        model=model,
        ignored_parameters=model.vision.parameters(),
    )
    refused(
        ValueError,
        "optional_mean: expected 'all' or 'participants', got 'sum'",
        lambda m: [m.vision],
        optional_mean="sum",
    )

    def broken(model: nn.Module) -> Any:
        yield model.vision
        raise KeyError("the user's")

    refused(KeyError, "the user's", broken)


def _differing() -> None:
    rank = dist.get_rank()

    def by_rank(*choices: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
        return choices[rank]

    def nothing(model: nn.Module) -> list[nn.Module]:
        return []

    def vision(model: nn.Module) -> list[nn.Module]:
        return [model.vision]

    def audio(model: nn.Module) -> list[nn.Module]:
        return [model.audio]

    differ = "optional_modules or optional_mean differ between ranks: rank 1 has"
    refused(
        ValueError,
        f"{differ} 'audio' with optional_mean='all', where rank 0 has 'vision'",
        by_rank(vision, audio),
    )
    refused(
        ValueError,
        f"{differ} 'vision' .*, where rank 0 has no other optional module",
        by_rank(nothing, vision),
    )
    mean = ("all", "participants")[rank]
    refused(
        ValueError,
        f"{differ} .* optional_mean='participants', where rank 0 has .* optional_mean='all'",
        vision,
        optional_mean=mean,
    )
    # One rank's bad input is raised on every rank.
    own = "contains the wrapped Towers itself"
    for good in (nothing, vision):
        refused(
            ValueError,
            own if rank == 1 else f"rank 1 refused .*: ValueError: optional_modules: {own}",
            by_rank(good, lambda m: [m]),
        )
    refused(
        TypeError if rank == 0 else ValueError,
        "names are not looked up" if rank == 0 else "rank 0 refused .*: TypeError: .*'vision'",
        by_rank(lambda m: ["vision"], vision),
    )
    refused(
        ValueError,
        "'vison' matches no module; near matches: 'vision'"
        if rank
        else "rank 1 refused .*: ValueError: optional_modules: 'vison' matches no module",
        lambda m: optional_by_name(m, ["vison" if rank else "vision"]),
    )
    # The same modules in another order are the same.
    model = seeded(Towers)
    order = [model.vision, model.audio][:: 1 if rank else -1]
    assert regions(model, *order) == VISION | AUDIO
    # Different models are still named as such.
    model = nn.Sequential(Block(), Block(7 if rank else WIDTH))
    with pytest.raises(ValueError, match="process_group: parameters differ between its ranks"):
        ZeRO3(model, auto_wrap_policy={Block}, optional_modules=[model[rank]])


def _experts() -> None:
    rank = dist.get_rank()
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "edp"))["edp"]

    def policy(module: nn.Module, fqn: str) -> Any:
        if fqn == "vision.blocks.1":
            return {"process_group": alone}
        return isinstance(module, (Tower, Block))

    refused(
        ValueError,
        rf"'vision' contains 'vision.blocks.1', which ranks \[{rank}\] share, while ranks \[0, 1\] "
        "share the model",
        lambda m: [m.vision],
        auto_wrap_policy=policy,
    )


def _pipeline() -> None:
    model = seeded(Towers)
    _, sharded = wrapped(model, model.vision)
    with pytest.raises(NotImplementedError, match=r"stage 0: .* optional_modules \['vision'\]"):
        ZeRO3PipelineStage(sharded, 0, 1, torch.device("cpu"))


def _warns() -> None:
    with warns_on_first_rank("optional_mean='participants' has no effect"):
        ZeRO3(seeded(Towers), auto_wrap_policy={Block}, optional_mean="participants")

    model = seeded(Towers)
    model.vision.norm = nn.SyncBatchNorm(WIDTH)
    with warns_on_first_rank(r"'vision' contains a SyncBatchNorm \('vision.norm'\)"):
        wrapped(model, model.vision)
    model = seeded(Towers)
    model.audio.norm = nn.SyncBatchNorm(WIDTH)
    with warnings.catch_warnings():  # Given by one rank, and raised on all.
        warnings.simplefilter("error")
        error = ValueError if dist.get_rank() else UserWarning
        refused(error, "'audio' contains a SyncBatchNorm", lambda m: [m.audio], model=model)


def _bad_input() -> None:
    for check in (_refused, _differing, _experts, _pipeline, _warns):
        check()
        gc.collect()


def test_bad_input_is_refused_with_names_on_every_rank() -> None:
    run_ranks(2, _bad_input)


# Every way in trains ------------------------------------------------------------------------------


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


def _nested_wrappers_train() -> None:
    plain = seeded(lambda: nn.Sequential(Sees(), nn.Linear(3, WIDTH), Block()))
    model = seeded(lambda: nn.Sequential(Sees(), nn.Linear(3, WIDTH), Block()))
    model[0].vision = ZeRO3(model[0].vision, auto_wrap_policy={Block})
    towers = [model[0].vision, model[0].audio]
    model[0] = ZeRO3(model[0], auto_wrap_policy={Tower, Block}, optional_modules=towers)
    assert_trains_alike(ZeRO3(model, auto_wrap_policy={Block}), plain, batches(4))


def _a_plan_trains() -> None:
    plan = ShardingPlan(
        apply_modules=["vision", "*blocks.{*}", "trunk", "head"],
        optional=["vision", "audio"],
        num_to_forward_prefetch=2,
    )
    assert_trains_alike(shard_with_plan(seeded(Sees), plan), seeded(Sees), batches(4))


def _a_rewrapped_model_trains() -> None:
    model, plain = seeded(Sees), seeded(Sees)
    towers = [model.vision, model.audio]
    model = ZeRO3(model, auto_wrap_policy={Tower, Block}, optional_modules=towers)
    assert_trains_alike(model, plain, batches(2))
    for each in (model, plain):
        each.vision.blocks.append(seeded(Block))
    layerzero.rewrap(model)
    assert_trains_alike(model, plain, batches(3, seed=1))


class TiedAndHooked(Sees):
    """A tower uses a parameter of another unit, and a list of parameters that it gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.audio.blocks[0] = self.vision.blocks[0]
        self.trunk.up.weight = self.vision.blocks[0].up.weight
        self.vision.gains = nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])
        self.vision.act = nn.Identity()


def _tied_parameters_train() -> None:
    model = seeded(TiedAndHooked)
    sharded = ZeRO3(model, auto_wrap_policy={Tower, Block}, optional_modules=[model.audio])
    plain = seeded(TiedAndHooked)
    # Every rank runs the other tower, but for the block that both have.
    assert_trains_alike(sharded, plain, [[(x, [1, b]) for x, (_, b) in s] for s in batches(4)])


def _every_way_in() -> None:
    for check in (
        _nested_wrappers_train,
        _a_plan_trains,
        _a_rewrapped_model_trains,
        _tied_parameters_train,
    ):
        check()
        gc.collect()


def test_every_way_in_trains_like_one_process() -> None:
    run_ranks(2, _every_way_in)


def _costs() -> None:
    rank = dist.get_rank()
    model = seeded(Sees)
    model = ZeRO3(
        model, auto_wrap_policy={Tower, Block}, optional_modules=[model.vision, model.audio]
    )
    counts = {}
    with counted_exchanges() as sizes:
        for _ in range(2):  # The first steps teach.
            for by_rank in (([1, 1], [1, 1]), ([0, 0], [0, 0]), ([1, 0], [1, 0]), ([1, 0], [0, 1])):
                sizes.clear()
                output = model((torch.ones(3, WIDTH), by_rank[rank]))
                forward = len(sizes)
                output.sum().backward()
                counts[str(by_rank)] = forward, len(sizes) - forward
    assert counts == {
        "([1, 1], [1, 1])": (3, 1),  # One for each region, and one to go on.
        "([0, 0], [0, 0])": (1, 0),
        "([1, 0], [1, 0])": (2, 1),
        "([1, 0], [0, 1])": (3, 1),
    }
    assert {8 * size for size in sizes} == {16}


def test_known_steps_cost_the_exchanges_that_the_page_says() -> None:
    run_ranks(2, _costs)


# Without optional modules -------------------------------------------------------------------------


def _nothing_changes() -> None:
    sent: list[Any] = []
    gather = compare.gather_small

    def spy(values: Tensor, *args: Any) -> Tensor:
        sent.append(values.tolist())
        return gather(values, *args)

    with mock.patch.object(compare, "gather_small", spy), recorded_regions() as found:
        for options in ({}, {"optional_modules": ()}, {"optional_modules": iter([])}):
            model = ZeRO3(seeded(Towers), auto_wrap_policy={Tower, Block}, **options)
            assert root_state(model).scheduler.agreed is None
    assert found == [None, None, None]
    assert sent == sent[: len(sent) // 3] * 3


def test_without_optional_modules_the_root_and_the_exchange_are_those_of_before() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, _nothing_changes)
