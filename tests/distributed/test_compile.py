"""torch.compile of units: the same numbers, no recompilation from step to step."""

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from layerzero import MixedPrecision, ShardingPlan, ZeRO3, notices, shard_with_plan, units
from layerzero.checkpoint import get_model_state_dict, set_model_state_dict
from tests.harness.checks import assert_bitwise, assert_same_parameters, recorded_warnings
from tests.harness.compare import assert_trains_alike, zero3
from tests.harness.internals import inner_units, root_state
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import on_ranks
from tests.harness.recording import gathered, recorded_operations, reduced
from tests.harness.reference import mlp_batches, seeded

DEPTH = 9
"""More units than the 8 entries that Dynamo keeps for one piece of code."""


def deep() -> Mlp:
    return Mlp(depth=DEPTH)


def compile_before(module: Mlp, counter: Any) -> None:
    for block in module.blocks:
        block.compile(backend=counter, fullgraph=True)


def wrap_before(module: Mlp, counter: Any) -> None:
    for index, block in enumerate(module.blocks):
        module.blocks[index] = torch.compile(block, backend=counter, fullgraph=True)


def checkpoint_and_wrap_before(module: Mlp, counter: Any) -> None:
    for index, block in enumerate(module.blocks):
        module.blocks[index] = torch.compile(checkpoint_wrapper(block), backend=counter)


def are_blocks(module: nn.Module, fqn: str) -> bool:
    return fqn.startswith("blocks.") and fqn.count(".") == 1


@pytest.mark.parametrize(
    ("prepare", "policy", "backend"),
    [
        (wrap_before, are_blocks, "aot_eager"),
        (checkpoint_and_wrap_before, ModuleWrapPolicy({Block}), "aot_eager"),
        (None, {Block}, "eager"),
    ],
    ids=["before, by name", "recomputed", "after"],
)
@on_ranks(2, timeout=90)
def test_compiled_units_train_alike_and_are_compiled_once(prepare, policy, backend) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    module = seeded(deep)
    if prepare is not None:
        prepare(module, counter)
    model = ZeRO3(module, auto_wrap_policy=policy)
    if prepare is None:
        compile_before(model.module, counter)
    counts = []

    def run(each: nn.Module, batch: Tensor) -> Tensor:
        loss = each(batch).square().mean()
        loss.backward()
        if each is model:
            counts.append(counter.frame_count)
        return loss.detach()

    reference = seeded(deep)
    if prepare is not None:
        prepare(reference, "eager")  # for the names: the user's own wrapping is in them
    assert_trains_alike(model, reference, mlp_batches(), run=run)
    # All blocks are one graph: their parameters are its inputs.
    assert counts == [1] * len(counts), counts
    with recorded_operations(model) as operations:
        run(model, mlp_batches()[0][dist.get_rank()])
    blocks = [f"blocks.{index}" for index in range(DEPTH)]
    assert gathered(operations)[1 : DEPTH + 1] == blocks
    assert reduced(operations) == [*reversed(blocks), "the root unit"]


def _compile(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": _compile,
    "recomputed": checkpoint_wrapper,
    "on the host": offload_wrapper,
    "compiled, recomputed": lambda module: checkpoint_wrapper(_compile(module)),
}


@on_ranks(2, timeout=90)
def test_policies_and_plans_look_through_wrappers_and_names_stay_clean() -> None:
    torch._dynamo.reset()
    for name, wrap in WRAPPERS.items():
        module, plain = seeded(Mlp), seeded(Mlp)
        for model in (module, plain):
            model.blocks = nn.ModuleList(map(wrap, model.blocks))
        blocks = [*module.blocks]
        asked = []
        model = ZeRO3(
            module,
            auto_wrap_policy={Block},
            reshard_after_forward=lambda part, fqn, asked=asked: asked.append(part) or True,
        )
        assert asked == [module, *(m for m in module.modules() if type(m) is Block)], name
        assert [unit.module for unit in inner_units(model)] == [module, *blocks], name
        assert_trains_alike(model, plain, mlp_batches(1))
        assert list(model.state_dict()) == list(plain.state_dict()), name
        full = get_model_state_dict(model, full=True)
        assert full.keys() == Mlp().state_dict().keys(), name
        by_plan = seeded(Mlp)
        by_plan.blocks = nn.ModuleList(map(wrap, by_plan.blocks))
        plan = ShardingPlan(apply_modules={"blocks.{*}": {}, "blocks.{*}.up": {}})
        planned = [unit.fqn for unit in units(shard_with_plan(by_plan, plan))]
        inside = [f"blocks.{index}{part}" for index in range(3) for part in ("", ".up")]
        assert sorted(planned) == ["", *inside], name
        for load in (set_model_state_dict, nn.Module.load_state_dict):
            plain = seeded(Mlp, 1)
            plain.blocks = nn.ModuleList(map(wrap, plain.blocks))
            other = ZeRO3(plain, auto_wrap_policy={Block})
            load(other, full if load is set_model_state_dict else model.state_dict())
            assert_same_parameters(get_model_state_dict(other, full=True), full, what=name)


@on_ranks(2)
def test_a_module_in_two_wrappers_is_the_unit_of_both() -> None:
    def build() -> nn.Module:
        block = Block()
        return nn.Sequential(checkpoint_wrapper(block), checkpoint_wrapper(block), block)

    model = zero3(build, Block)
    assert [unit.fqn for unit in units(model)] == ["", "0"]
    assert_trains_alike(model, seeded(build), mlp_batches())


@on_ranks(1)
def test_inputs_of_a_wrapped_norm_that_stays_float32_are_not_cast() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_float32=(nn.LayerNorm,))
    outputs = []
    for norm in (nn.LayerNorm(WIDTH), checkpoint_wrapper(nn.LayerNorm(WIDTH))):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)
        ZeRO3(module, auto_wrap_policy={nn.LayerNorm}, mixed_precision=precision)
        outputs.append(module[1](mlp_batches()[0][0]))
    assert_bitwise(*outputs)


@on_ranks(2, timeout=90)
def test_a_unit_inside_a_compiled_module_runs_between_two_graphs() -> None:
    """A graph ends before a unit inside it, and another goes on after; evaluation too. The module
    is a unit that has no parameters itself."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, plain = zero3(Mlp, Block, nn.Linear), seeded(Mlp)
    for block in model.module.blocks:
        block.compile(backend=counter)
    assert_trains_alike(model, plain, mlp_batches())
    warm = counter.frame_count
    assert warm >= 2, "what a block computes between its two layers, and after them"
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_trains_alike(model, plain, mlp_batches())
    assert counter.frame_count == warm
    with torch.no_grad():
        model.eval()(mlp_batches()[0][0])


@on_ranks(2)
def test_modes_with_cuda_graphs_work_in_an_arena() -> None:
    """torch compares addresses before each replay, and an arena keeps them: in each pass, and for
    each of the blocks that share a graph."""
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        return  # Since torch 2.13.
    torch._dynamo.reset()
    seen: list[list[int]] = []
    """Addresses of full parameters in each call of a compiled graph, forward or backward."""

    def noting(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(
                [x.data_ptr() for x in args if x.untyped_storage()._cdata in full and x.numel()]
            )
            return graph(*args)

        return make_boxed_func(call)

    model = ZeRO3(Mlp(3), auto_wrap_policy={Block}, arena=True)
    handles = [handle for unit in root_state(model).units for handle in unit.handles]
    full = {handle.full.untyped_storage()._cdata for handle in handles}
    model.compile(backend=aot_autograd(fw_compiler=noting))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for _ in range(6):
        model(torch.randn(3, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(seen[:])
        seen.clear()
    assert steps[2:] == [steps[2]] * 4
    # Both passes of three blocks and of the head, and the forward of the stem.
    assert sum(map(bool, steps[2])) == 9, [len(e) for e in steps[2]]


@on_ranks(2)
def test_compilation_around_a_unit_says_that_it_compiles_nothing_there() -> None:
    options: Any = {"auto_wrap_policy": {Block}}
    for unit in ("the root unit", "blocks.0", None):
        torch._dynamo.reset()
        notices._issued.clear()
        module = Mlp(2)
        if unit is None:
            wrap_before(module, "eager")
        model = ZeRO3(_compile(module) if unit == "blocks.0" else module, **options)
        if unit is None:
            model.compile(backend="eager")
        if unit != "blocks.0":
            model = _compile(model)
        with recorded_warnings() as texts:
            for _ in range(2):
                model(torch.ones(1, WIDTH))
        told = [text for text in texts if "compiles nothing" in text]
        assert len(told) == (unit is not None and dist.get_rank() == 0), told
        assert all(f"torch.compile around {unit} compiles nothing" in text for text in told), told


def _compiled_functions_of_the_engine() -> set[str]:
    functions = set()
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] == "layerzero":
            for owner in [module, *filter(inspect.isclass, vars(module).values())]:
                functions |= {*filter(inspect.isfunction, vars(owner).values())}
    return {f.__qualname__ for f in functions if _debug_get_cache_entry_list(f.__code__)}


@on_ranks(2, timeout=90)
def test_a_step_that_is_compiled_as_a_whole_runs_the_engine_as_it_is() -> None:
    """Backward included. Beyond the limit its functions run untraced, and call others."""
    torch._dynamo.reset()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    # In float64: a compiled optimizer rounds otherwise.
    plain, batches = seeded(Mlp).double(), [torch.ones(n, WIDTH).double() for n in range(2, 6)]
    model = ZeRO3(copy.deepcopy(plain), auto_wrap_policy={Block, nn.Linear}, verify="always")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    with torch._dynamo.config.patch(recompile_limit=2):
        compiled = torch.compile(step, backend="eager")
        for batch in batches:  # For each size anew, until the limit.
            losses = compiled(model, optimizers[0], batch), step(plain, optimizers[1], batch)
            torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    assert _compiled_functions_of_the_engine() <= {"ModuleWrapper.forward"}, "around the root unit"
