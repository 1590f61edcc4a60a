"""Stages of torch's pipelines that are ZeRO3 modules train as the whole model on one process."""

import functools
import random
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from layerzero import ZeRO3
from layerzero.parallel import ZeRO3PipelineStage, clip_grad_norm_, gather_as_scheduled
from tests.harness.checks import assert_close_in_float64, assert_same_on_all_ranks, named
from tests.harness.internals import inner_units
from tests.harness.models import WIDTH, Block, Parts
from tests.harness.random_models import WIDTH as INNER_WIDTH
from tests.harness.random_models import Branches, random_model
from tests.harness.random_programs import settings_of_passes
from tests.harness.ranks import on_ranks
from tests.harness.recording import full_nbytes, gathered, recorded_operations, reduced
from tests.harness.reference import OPTIMIZERS, full_gradients, full_parameters, seeded

MICRO_BATCHES = 4
UNITS = 3
"""Of each part: two blocks, and what is left."""


class Part(Parts):
    def __init__(self) -> None:
        blocks, out = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, WIDTH)
        super().__init__(blocks=blocks, out=out, act=nn.Tanh())


class Whole(Parts):
    def __init__(self, num_parts: int) -> None:
        super().__init__(parts=nn.Sequential(*(Part() for _ in range(num_parts))))


class Pipeline:
    """This rank's stages of a pipeline over `mesh["pp"]`, and the whole model beside it."""

    def __init__(self, mesh: DeviceMesh, kind: str, make: Any = Whole, **options: Any) -> None:
        """`make` builds the whole model of so many parts; "settings" are those of `ZeRO3`."""
        self.mesh = mesh
        self.place, self.num_places = mesh["pp"].get_local_rank(), mesh["pp"].size()
        per_rank = 2 if kind.startswith("interleaved") else 1
        num_parts = per_rank * self.num_places
        self.indices = list(range(self.place, num_parts, self.num_places))
        self.reference, whole = (seeded(lambda: make(num_parts)) for _ in range(2))
        given: dict[str, Any] = {"accumulation": "unsharded", "auto_wrap_policy": {Block}}
        given |= {"timeout": timedelta(seconds=25), **options.pop("settings", {})}
        self.models = [ZeRO3(whole.parts[index], mesh["dp"], **given) for index in self.indices]
        options["group"] = mesh["pp"].get_group()
        self.stages = [
            ZeRO3PipelineStage(model, index, num_parts, torch.device("cpu"), **options)
            for index, model in zip(self.indices, self.models, strict=True)
        ]
        kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved bfs": ScheduleLoopedBFS}
        schedule: Any = kinds.get(kind, ScheduleInterleaved1F1B)
        stages = self.stages if per_rank > 1 else self.stages[0]
        self.schedule = schedule(stages, MICRO_BATCHES, loss_fn=F.mse_loss)
        if kind == "interleaved as scheduled":
            gather_as_scheduled(self.schedule, self.stages)

    def run(self, x: Tensor, target: Tensor, evaluates: bool = False) -> tuple[Tensor | None, Any]:
        """One step of the schedule; what the last stage returned, and its losses."""
        losses: list[Tensor] | None = [] if self.num_places - 1 == self.place else None
        run = self.schedule.eval if evaluates else self.schedule.step
        inputs = (x,) if self.place == 0 else ()
        output = run(*inputs, target=None if losses is None else target, losses=losses)
        return output, losses

    def recorded(self, *batch: Tensor, evaluates: bool = False) -> tuple[Any, Any, list[Any]]:
        """As `run`, and the operations of each model."""
        with ExitStack() as stack:
            operations = [stack.enter_context(recorded_operations(m)) for m in self.models]
            return *self.run(*batch, evaluates), operations

    def batch(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """For each data-parallel rank."""
        generator = torch.Generator().manual_seed(seed)
        shape = (2 * MICRO_BATCHES, WIDTH)
        return [
            (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
            for _ in range(self.mesh["dp"].size())
        ]

    def reference_losses(self, batches: list[tuple[Tensor, Tensor]]) -> list[list[Tensor]]:
        """Of each rank's micro-batches; adds the mean gradient."""
        losses = []
        for x, target in batches:
            pairs = zip(x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True)
            losses.append([F.mse_loss(self.reference(part), goal) for part, goal in pairs])
            (torch.stack(losses[-1]).mean() / len(batches)).backward()
        return losses

    def assert_same(self, read: Callable[[nn.Module], dict[str, Any]], what: str) -> None:
        """Gradients are summed over micro-batches and ranks in another order than autograd's."""
        for index, model in zip(self.indices, self.models, strict=True):
            expected = read(self.reference.parts[index])
            assert_close_in_float64(read(model), expected, f"{what} of part {index}:")

    def train(
        self, steps: int, clip: float | None = None
    ) -> list[dict[int, tuple[list[str], list[str]]]]:
        """Compare every step with the reference; (gathered, reduced) of each stage and step."""
        optimizers = [OPTIMIZERS["sgd_momentum"](m.parameters()) for m in self.models]
        reference_optimizer = OPTIMIZERS["sgd_momentum"](self.reference.parameters())
        records = []
        for step in range(steps):
            batches = self.batch(step)
            own = batches[self.mesh["dp"].get_local_rank()]
            _, losses, operations = self.recorded(*own)
            of_stages = [(gathered(each), reduced(each)) for each in operations]
            records.append(dict(zip(self.indices, of_stages, strict=True)))
            expected = self.reference_losses(batches)[self.mesh["dp"].get_local_rank()]
            if losses is not None:
                for loss, other in zip(losses, expected, strict=True):
                    assert_close_in_float64(loss.detach(), other.detach(), f"step {step}: loss")
            if clip is not None:
                norm = clip_grad_norm_(self.stages, clip)
                whole = nn.utils.clip_grad_norm_(self.reference.parameters(), clip)
                assert_close_in_float64(norm, whole, f"step {step}: norm")
            self.assert_same(full_gradients, f"step {step}: gradient")
            for optimizer in [*optimizers, reference_optimizer]:
                optimizer.step()
                optimizer.zero_grad()
            self.assert_same(full_parameters, f"step {step}: parameter")
        return records


def _mesh(num_places: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (num_places, 2), mesh_dim_names=("pp", "dp"))


@on_ranks(4, in_float64=True)
def test_a_pipeline_gathers_and_reduces_each_unit_once_a_step() -> None:
    mesh = _mesh()
    for kind in ("gpipe", "1f1b", "interleaved", "interleaved as scheduled"):
        pipeline = Pipeline(mesh, kind)
        records = pipeline.train(steps=1)
        states: dict[int, list[str]] = {}

        def note(module: nn.Module, args: Any, states: dict[int, list[str]] = states) -> None:
            states.setdefault(id(module), [unit.state.value for unit in inner_units(module)])

        for model in pipeline.models:
            model.register_forward_pre_hook(note)
        for step, record in enumerate(records + pipeline.train(steps=1)):
            for index, (gathers, reductions) in record.items():
                own = ("the root unit", "blocks.0", "blocks.1")
                names = [f"stage {index}: {unit}" for unit in own]
                assert sorted(gathers) == sorted(names), (kind, step, gathers)
                assert sorted(reductions) == sorted(names), (kind, step, reductions)
        for model in pipeline.models:
            assert not any(full_nbytes(model).values()), f"{kind}: freed after the step"
        for seen in states.values():  # Gathers are issued when the schedule says.
            is_ahead = all(state != "sharded" for state in seen)
            assert is_ahead == (kind == "interleaved as scheduled"), (kind, seen)


@on_ranks(4, in_float64=True)
def test_a_stage_may_free_its_units_between_micro_batches() -> None:
    pipeline = Pipeline(_mesh(), "gpipe", reshard_between_micro_batches=True)
    for gathers, reductions in pipeline.train(steps=2)[-1].values():
        assert len(gathers) == 20, gathers
        assert len(reductions) == UNITS


def _random_whole(seed: int, num_parts: int) -> Whole:
    whole, rng = Whole(0), random.Random(seed)
    for number in range(num_parts):
        inner = random_model(100 * seed + number, torch.float64)
        inner.requires_grad_(rng.random() < 0.5)
        for part in inner.modules():
            if isinstance(part, Branches) and part.way == "reentrant":  # Not in torch's pipelines.
                part.way = "recomputed"
        ends = nn.Linear(WIDTH, INNER_WIDTH), nn.Linear(INNER_WIDTH, WIDTH)
        # No gradient reaches the input of the first stage, so its first layer must have one.
        ends[number > 0].requires_grad_(rng.random() < 0.5)
        whole.parts.append(nn.Sequential(ends[0], inner, ends[1]))
    return whole


def _train_random(seed: int) -> None:
    rng, world_size = random.Random(seed), dist.get_world_size()
    places = rng.choice([size for size in (2, 4) if size <= world_size])
    mesh = init_device_mesh("cpu", (places, world_size // places), mesh_dim_names=("pp", "dp"))
    kinds = ["gpipe", "1f1b", "interleaved", "interleaved as scheduled", "interleaved bfs"]
    kind = rng.choice(kinds)
    settings = settings_of_passes(rng, nn.Module(), world_size)
    settings["auto_wrap_policy"] = rng.choice([None, {nn.Linear}])
    settings["on_nonfinite"] = rng.choice([None, "raise", "skip"])
    clip = rng.choice([None, 0.01])
    Branches.uses_all, reshards = rng.random() < 0.7, rng.random() < 0.3
    with named(places, kind, settings, Branches.uses_all, reshards, clip):
        options = {"settings": settings, "reshard_between_micro_batches": reshards}
        make = functools.partial(_random_whole, seed)
        Pipeline(mesh, kind, make, **options).train(2, clip)


@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [(2, range(3)), pytest.param(4, range(100, 104), marks=pytest.mark.slow)],
)
def test_random_stages_train_as_one_process(
    world_size: int, seeds: range, on_each_seed: Any
) -> None:
    on_each_seed(world_size, _train_random, seeds, in_float64=True)


@pytest.mark.since_torch("2.13")  # a schedule of 2.11 does not train again after its first `eval`
@on_ranks(4, in_float64=True)
def test_a_schedule_evaluates_between_steps() -> None:
    mesh = _mesh()
    for kind in ("1f1b", "interleaved as scheduled"):
        pipeline = Pipeline(mesh, kind)
        x, target = pipeline.batch(seed=7)[mesh["dp"].get_local_rank()]
        for grad_enabled in (False, True):
            with torch.set_grad_enabled(grad_enabled):
                output, losses, recorded = pipeline.recorded(x, target, evaluates=True)
            for operations in recorded:
                assert len(gathered(operations)) == UNITS, (kind, gathered(operations))
                assert not reduced(operations)
            for model in pipeline.models:
                assert not any(full_nbytes(model).values()), f"{kind}: freed after evaluation"
            if losses is not None:
                expected = pipeline.reference(x).detach()
                assert_close_in_float64(output.detach(), expected, f"{kind}: output")
                mean = torch.stack(losses).mean().detach()
                assert_close_in_float64(mean, F.mse_loss(expected, target), f"{kind}: loss")
            pipeline.train(steps=1)


@on_ranks(4, in_float64=True)
def test_steps_of_a_schedule_add_up_under_no_sync() -> None:
    pipeline = Pipeline(_mesh(), "1f1b")
    (model,) = pipeline.models
    own = pipeline.mesh["dp"].get_local_rank()
    with recorded_operations(model) as operations:
        with model.no_sync():
            pipeline.run(*pipeline.batch(0)[own])
        assert not reduced(operations)
        pipeline.run(*pipeline.batch(1)[own])
    assert len(reduced(operations)) == UNITS
    for seed in (0, 1):
        pipeline.reference_losses(pipeline.batch(seed))
    pipeline.assert_same(full_gradients, "gradient")


@on_ranks(4, in_float64=True)
def test_clipping_takes_the_norm_of_all_stages() -> None:
    pipeline = Pipeline(_mesh(), "interleaved")
    own = pipeline.mesh["dp"].get_local_rank()
    for norm_type in (2.0, float("inf")):
        pipeline.run(*pipeline.batch(0)[own])
        pipeline.reference_losses(pipeline.batch(0))
        max_norm = 1e-2
        norm = clip_grad_norm_(pipeline.stages, max_norm, norm_type)
        expected = nn.utils.clip_grad_norm_(pipeline.reference.parameters(), max_norm, norm_type)
        assert expected > 2 * max_norm, "else nothing is scaled"
        assert_close_in_float64(norm, expected, f"norm of type {norm_type}")
        assert_same_on_all_ranks(norm, "norm")
        pipeline.assert_same(full_gradients, f"gradient clipped by {norm_type}")
        for model in [*pipeline.models, pipeline.reference]:
            model.zero_grad()
    assert clip_grad_norm_(pipeline.stages, 1.0) == 0.0, "no gradients"
    with pytest.raises(ValueError, match="expected the stages on this rank"):
        clip_grad_norm_([], 1.0)


@on_ranks(2, in_float64=True)
def test_the_step_after_one_that_failed_starts_clean() -> None:
    pipeline = Pipeline(_mesh(1), "1f1b")
    batch = pipeline.batch(5)[dist.get_rank()]
    pipeline.train(steps=1)
    calls = []

    def failing(*args: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 3:
            raise KeyError("not the engine's business")
        return F.mse_loss(*args)

    pipeline.schedule._loss_fn = failing
    with pytest.raises(KeyError):
        pipeline.run(*batch)
    stage = pipeline.stages[0]
    waiting = stage.fwd_cache if hasattr(stage, "fwd_cache") else stage._forward_chunk_states
    assert list(waiting) == [2], "two micro-batches went back"
    # torch's schedule keeps the losses of a step that failed; the stage and its model live on.
    pipeline.schedule = Schedule1F1B(pipeline.stages[0], MICRO_BATCHES, loss_fn=F.mse_loss)
    # What the first micro-batches left is not in the sum.
    pipeline.train(steps=2)


@on_ranks(1)
def test_what_cannot_work_in_a_pipeline_is_refused() -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mesh = DeviceMesh.from_group(group, "cpu")
    options: dict[str, Any] = {"group": mesh.get_group()}
    device = torch.device("cpu")
    with pytest.raises(TypeError, match="stage 0: expected a ZeRO3 module, got Part"):
        ZeRO3PipelineStage(Part(), 0, 1, device, **options)
    inner = ZeRO3(Part(), mesh)
    outer = ZeRO3(nn.Sequential(inner), mesh)
    with pytest.raises(ValueError, match="stage 0: its module is part of another ZeRO3"):
        ZeRO3PipelineStage(outer.get_submodule("0"), 0, 1, device, **options)
    model = ZeRO3(Part(), mesh)
    x, target = torch.randn(2, 4, WIDTH)

    stage = ZeRO3PipelineStage(model, 0, 1, device, **options)
    with pytest.raises(TypeError, match="ScheduleGPipe plans no gathers"):
        gather_as_scheduled(ScheduleGPipe(stage, 2), [stage])
    zero_bubble = ScheduleInterleavedZeroBubble([stage], 2, loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match="expected ZeRO3PipelineStages, got Part"):
        gather_as_scheduled(zero_bubble, [Part()])
    with pytest.raises(NotImplementedError, match="backward of inputs separately"):
        zero_bubble.step(x, target=target)

    stage = ZeRO3PipelineStage(model, 0, 1, device, **options)
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
    model.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="pass scale_grads=False"):
        schedule.step(x, target=target)
