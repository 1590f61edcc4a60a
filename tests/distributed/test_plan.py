"""Sharding by a plan: each feature beside the unsharded reference, on two gloo ranks; and units
with arguments of their own, given by `auto_wrap_policy`."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from layerzero import (
    MixedPrecision,
    OffloadPolicy,
    ShardingPlan,
    ZeRO3,
    checkpoint,
    shard_with_plan,
    units,
)
from tests.harness.checks import assert_bitwise, warns_on_first_rank
from tests.harness.compare import Shared, assert_trains_alike, zero3
from tests.harness.internals import inner_units, root_state
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.plan_models import Model
from tests.harness.ranks import on_ranks
from tests.harness.recording import full_nbytes, gathered, recorded_operations, recorded_regions
from tests.harness.reference import mlp_batches, seeded, train_rank


def batch() -> Tensor:
    return mlp_batches(1)[0][dist.get_rank()]


def sharded(module: nn.Module | None = None, **plan: Any) -> ZeRO3:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return shard_with_plan(module or seeded(Model), ShardingPlan.from_dict(plan))


def trains_alike(model: ZeRO3, steps: int = 2, truth: Shared | None = None) -> None:
    assert_trains_alike(model, truth or seeded(Model), mlp_batches(steps))


def fqns(model: ZeRO3) -> list[str]:
    return sorted(unit.fqn for unit in units(model))


EXPERTS = [f"layers.{layer}.experts.{expert}" for layer in range(3) for expert in range(2)]
ATTENTIONS = [f"layers.{layer}.attn" for layer in range(3)]
LAYERS = [f"layers.{layer}" for layer in range(3)]


@on_ranks(2)
def test_patterns_name_the_units() -> None:
    truth = Shared(seeded(Model))
    for patterns, expected in (
        ([], []),
        (["layers.{*}", "head"], [*LAYERS, "head"]),
        (["layers.{1-2}"], LAYERS[1:]),
        (["*.experts.?"], EXPERTS),
        ([r"re:layers\.\d\.attn"], ATTENTIONS),
        # Named, and inside something named: a unit of its own.
        (["layers.{*}", "*attn"], [*LAYERS, *ATTENTIONS]),
    ):
        module = seeded(Model)
        names = [name for name, _ in module.named_modules()]
        model = sharded(module, apply_modules=patterns)
        assert fqns(model) == sorted(["", *expected]), patterns
        assert [name for name, _ in model.named_modules()] == names
        trains_alike(model, 1, truth)
    module, plain = seeded(Model), seeded(Model)
    for each in (module, plain):
        each.layers[1].requires_grad_(False)
        each.embed.bias.requires_grad_(False)
    ignored = {"ignored_modules": ["layers.1"], "ignored_parameters": ["embed.bias"]}
    model = sharded(module, apply_modules=["layers.{*}", "*attn"], **ignored)
    assert fqns(model) == ["", "layers.0", "layers.0.attn", "layers.2", "layers.2.attn"]
    assert module.layers[1].attn.up.weight.shape == (7, WIDTH)
    assert not hasattr(module.embed.bias, "layerzero")
    trains_alike(model, 1, Shared(plain))


@on_ranks(2)
def test_options_of_patterns_win_over_defaults_and_those_of_later_ones_over_earlier() -> None:
    model = sharded(
        apply_modules={
            "layers.{*}": {"reshard_after_forward": False},
            "layers.1": {},
            "layers.{*}.attn": {"param_dtype": "fp32", "output_dtype": "bf16"},
            "head": {"mixed_precision": {"param_dtype": "fp16"}, "gradient_reduction": "sum"},
        },
        param_dtype="bf16",
        reduce_dtype="fp32",
        output_dtype="fp64",
        defaults={"reshard_after_forward": True, "deterministic": True},
    )
    by_fqn = {unit.fqn: unit for unit in inner_units(model)}
    reshard = {fqn: unit.options.reshard_after_forward for fqn, unit in by_fqn.items()}
    assert [fqn for fqn in reshard if not reshard[fqn]] == ["layers.0", "layers.2"]
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert by_fqn["layers.1"].options.mixed_precision.param_dtype is torch.bfloat16
    assert by_fqn["layers.1"].output_dtype is None, "the model's output is not a layer's"
    assert by_fqn["layers.1.attn"].options.mixed_precision == MixedPrecision(
        param_dtype=torch.float32, reduce_dtype=bf16.reduce_dtype, output_dtype=torch.bfloat16
    )
    # A whole mixed_precision takes nothing over.
    assert by_fqn["head"].options.mixed_precision == MixedPrecision(param_dtype=torch.float16)
    assert by_fqn["head"].options.gradient_scale == 1.0
    assert by_fqn["layers.1"].options.gradient_scale == 0.5
    assert model(batch()).dtype is torch.float64


@on_ranks(2)
def test_a_hook_module_gathers_and_frees_what_is_not_its_own() -> None:
    truth = Shared(seeded(Model))
    for layers in ([], ["layers.{*}"]):
        model = sharded(
            apply_modules=[*layers, "layers.{*}.bank", "layers.{*}.experts"],
            hook_modules=["layers.{*}"],
        )
        with recorded_operations(model) as operations, torch.no_grad():
            model(batch())
        order = gathered(operations)
        assert order.count("layers.1.bank") == 1
        assert "layers.1.bank" in order[: order.index("layers.2.bank")]
        trains_alike(model, truth=truth)
        assert not any(full_nbytes(model).values())


@on_ranks(2)
def test_numbers_of_units_to_prefetch_reach_the_engine() -> None:
    model = sharded(
        apply_modules=["embed", "layers.{*}", "layers.{*}.experts.{*}", "head"],
        num_to_forward_prefetch=1,
        num_to_backward_prefetch=2,
    )
    scheduler = root_state(model).scheduler
    assert (scheduler.forward_depth, scheduler.backward_depth) == (1, 2)
    trains_alike(model)
    root = root_state(sharded(num_to_forward_prefetch=0, num_to_backward_prefetch=0))
    assert (root.scheduler.forward_depth, root.scheduler.backward_prefetch) == (0, None)


@on_ranks(2)
def test_activations_are_recomputed_or_kept_on_the_host_with_clean_names() -> None:
    truth = Shared(seeded(Model))
    for choice in (
        "composable",
        ("wrapped", {"preserve_rng_state": False, "checkpoint_impl": None}),
        ["wrapped_offload", {"pin_memory": False}],
    ):
        calls: list[str] = []
        module = seeded(Model)
        names = [name for name, _ in module.named_modules()]
        keys = list(module.state_dict())
        units_of = {"layers.{*}": {}, "layers.1": {"act_ckpt": None}, "layers.{*}.attn": {}}
        plan = ShardingPlan.from_dict({"apply_modules": units_of, "act_ckpt": choice})
        model = shard_with_plan(module, plan)
        assert [name for name, _ in model.named_modules()] == names
        assert list(model.state_dict()) == keys == [name for name, _ in model.named_parameters()]
        assert fqns(model) == sorted(["", *LAYERS, *ATTENTIONS])
        for layer in module.layers:
            layer.attn.up.register_forward_hook(lambda *_, calls=calls: calls.append("up"))
        trains_alike(model, 1, truth)
        assert len(calls) == (3 if isinstance(choice, list) else 5), choice


class Knowing(Model):
    answer: Any = True

    def fully_shard(self, plan: ShardingPlan, mesh: Any) -> Any:
        if self.answer is False:
            return False
        for layer in self.layers:
            ZeRO3(layer, mesh)
        return ZeRO3(self, mesh) if self.answer == "itself" else True

    def set_modules_to_prefetch(self, plan: ShardingPlan, forward: int, backward: int) -> bool:
        self.numbers = forward, backward
        if self.answer is False:
            return False
        first = next(unit for unit in units(self) if unit.fqn == "layers.0")
        first.set_modules_to_forward_prefetch([self.layers[2]])
        return True


class AsMindSpeed(Knowing):
    """The methods as MindSpeed-MM calls them."""

    def fully_shard(self, *, fsdp_plan: ShardingPlan) -> Any:
        return super().fully_shard(fsdp_plan, init_device_mesh("cpu", (2,)))

    def set_modules_to_prefetch(self, fsdp_plan: ShardingPlan, ep_plan: ShardingPlan) -> bool:
        assert ep_plan is fsdp_plan
        return super().set_modules_to_prefetch(fsdp_plan, fsdp_plan.num_forward, 1)


@on_ranks(2)
def test_a_model_may_shard_itself_and_set_its_own_lists() -> None:
    assert fqns(shard_with_plan(seeded(AsMindSpeed), ShardingPlan())) == ["", *LAYERS]
    for answer in (True, "itself", False):
        module = seeded(Knowing)
        module.answer = answer
        plan = ShardingPlan(apply_modules=["head"], num_to_forward_prefetch=3)
        mesh = init_device_mesh("cpu", (2,))
        model = shard_with_plan(module, plan, mesh)
        assert fqns(model) == (["", "head"] if answer is False else ["", *LAYERS])
        assert module.numbers == (3, 1)
        trains_alike(model)


@on_ranks(2)
def test_optional_modules_of_a_plan_reach_the_engine() -> None:
    layers = {f"layers.{i}{rest}": f"layers.{i}" for i in (1, 2) for rest in ("", ".attn")}
    units_of = ["layers.{*}", "layers.{*}.attn", "head"]
    with recorded_regions() as found:
        sharded(
            apply_modules=units_of,
            optional=["layers.{1-2}*"],
            defaults={"optional_mean": "participants"},
        )
        for answer in (True, False):  # By its own `fully_shard`, and by the plan.
            module = seeded(Knowing)
            module.answer = answer
            plan = ShardingPlan(apply_modules=["layers.{*}"], optional=["layers.1"])
            shard_with_plan(module, plan)
        with pytest.raises(ValueError, match="optional: 'layer_1' matches no module"):
            shard_with_plan(seeded(Knowing), ShardingPlan(optional=["layer_1"]))
    assert found[0] == (layers, "participants")
    own = [each for each in found[1:] if each is not None]
    assert own == [({"layers.1": "layers.1"}, "all")] * 2


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused_before_anything_is_changed() -> None:
    plan = ShardingPlan(apply_modules=["layers.{*}"])
    with pytest.raises(TypeError, match=r"expected a ShardingPlan, got \{"):
        shard_with_plan(seeded(Model), {"apply_modules": []})
    model = shard_with_plan(seeded(Model), plan)
    for again in (model, model.module):
        for call in (plan.validate, lambda given: shard_with_plan(given, plan)):
            with pytest.raises(RuntimeError, match="wrapped already"):
                call(again)
    module = seeded(Model)
    with pytest.raises(ValueError, match=r"'layer\.\{\*\}' matches no module; near matches"):
        shard_with_plan(module, ShardingPlan(apply_modules=["layer.{*}"], act_ckpt="wrapped"))
    assert "forward" not in module.layers[0].__dict__, "nothing was changed"


@on_ranks(2)
def test_directives_for_what_is_sharded_or_cannot_be_called_are_skipped_with_a_warning() -> None:
    for own, expected in (
        (ShardingPlan(apply_modules={"layers.{*}": {"act_ckpt": "wrapped"}}), LAYERS),
        (ShardingPlan(apply_modules=["*attn"]), ["layers.0.attn", "layers.1", "layers.2.attn"]),
    ):
        module = seeded(Model)
        ZeRO3(module.layers[1], reshard_after_forward=False)
        with warns_on_first_rank(
            r"does not apply to 'layers\.1(\.attn)?': sharded already, and keeps its own options"
        ):
            model = shard_with_plan(module, own)
        assert fqns(model) == sorted(["", *expected])
        assert not inner_units(module.layers[1])[0].options.reshard_after_forward
        calls: list[str] = []
        for fqn in ("embed", "layers.1.attn.up"):
            called = module.get_submodule(fqn)
            called.register_forward_hook(lambda *_, fqn=fqn, calls=calls: calls.append(fqn))
        trains_alike(model)
        assert calls.count("layers.1.attn.up") == calls.count("embed"), "nor is it recomputed"
    # A list of modules has no call that would gather it: what is inside belongs to the root.
    plan = ShardingPlan(apply_modules={"layers": {"act_ckpt": "wrapped"}, "layers.0": {}})
    with warns_on_first_rank(r"to 'layers': nothing would gather it, because it has no forward"):
        model = shard_with_plan(seeded(Model), plan)
    assert fqns(model) == ["", "layers.0"]
    trains_alike(model)


def policy(**own: dict[str, Any]):
    """Blocks are units; a block has the arguments given under its index."""

    def choose(module: nn.Module, fqn: str) -> bool | dict[str, Any]:
        return isinstance(module, Block) and own.get(f"block{fqn.rpartition('.')[2]}", True)

    return choose


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecision(param_dtype=torch.float32, output_dtype=torch.bfloat16)


@on_ranks(2)
def test_a_unit_with_arguments_of_its_own_is_as_one_with_a_wrapper_of_its_own() -> None:
    full = {"mixed_precision": FP32, "reshard_after_forward": False}
    summed = {"gradient_reduction": "sum"}
    own = policy(block0=summed, block1=full)
    model = zero3(Mlp, auto_wrap_policy=own, mixed_precision=BF16)
    module = seeded(Mlp)
    ZeRO3(module.blocks[0], mixed_precision=BF16, **summed)
    ZeRO3(module.blocks[1], **full)
    nested = ZeRO3(module, auto_wrap_policy={Block}, mixed_precision=BF16)
    seen: list[torch.dtype] = []
    model.module.blocks[1].register_forward_hook(
        lambda block, args, output: seen.extend([block.up.weight.dtype, args[0].dtype])
    )
    model.module.blocks[2].register_forward_pre_hook(
        lambda block, args: seen.extend([block.up.weight.dtype, args[0].dtype])
    )
    losses = [
        train_rank(each, torch.optim.SGD(each.parameters(), lr=0.1), mlp_batches(), dist.get_rank())
        for each in (model, nested)
    ]
    for own, other in zip(*losses, strict=True):
        assert_bitwise(own, other, "loss")
    assert seen[:4] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    kept = {unit.fqn: unit.options.reshard_after_forward for unit in inner_units(model)}
    assert kept == {"": True, "blocks.0": True, "blocks.1": False, "blocks.2": True}


@on_ranks(2)
def test_what_units_share_and_bad_values_are_refused() -> None:
    for own, error, message in (
        ({"timeout": 3}, ValueError, r"blocks\.1: .* returned timeout=3; expected arg"),
        ({"mixed_precision": "bf16"}, TypeError, r"blocks\.1: mixed_precision: expected a Mixed"),
        ({"reshard_after_forward": 3}, ValueError, r"blocks\.1: reshard_after_forward: expected"),
        ({"gradient_reduction": "avg"}, ValueError, r"blocks\.1: gradient_reduction: expected"),
        ({"offload": True}, TypeError, r"blocks\.1: offload: expected an OffloadPolicy"),
        ({"hook_module": "mlp"}, TypeError, r"blocks\.1: hook_module: expected an nn\.Module"),
    ):
        module = Mlp()
        with pytest.raises(error, match=message):
            ZeRO3(module, auto_wrap_policy=policy(block1=own))
        assert module.stem.weight.shape == (WIDTH, WIDTH), "nothing was changed"
    with warns_on_first_rank("has no effect: the model is on the CPU"):
        own = {"offload": OffloadPolicy(params=True)}
        ZeRO3(Mlp(), auto_wrap_policy=policy(block1=own))


def _names(model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if isinstance(value, Tensor)}


@on_ranks(2)
def test_parts_may_be_on_fewer_ranks() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in range(2)]
    model = nn.Sequential(ZeRO3(Mlp(), groups[rank]), ZeRO3(Mlp(), groups[rank]))
    assert checkpoint.get_model_state_dict(model, full=True).keys() == _names(model)
    mixed = nn.Sequential(ZeRO3(Mlp(), groups[rank]), ZeRO3(Mlp()))
    assert checkpoint.get_model_state_dict(mixed, full=True).keys() == _names(mixed)
    with pytest.raises(ValueError, match="expected a ZeRO3 module, got Mlp, which contains none"):
        checkpoint.get_model_state_dict(Mlp(), full=True)
