"""Frozen parameters cost nothing, and what is frozen may change between steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from layerzero import OffloadPolicy, ZeRO3
from layerzero.checkpoint import get_model_state_dict
from layerzero.optim.waiting_gradients import WaitingGradient
from tests.harness.checks import assert_bitwise, named
from tests.harness.compare import assert_same_values, assert_trains_alike, trained_alike, zero3
from tests.harness.models import CASES, WIDTH, Block, Mlp, Parts, TiedInUnit, frozen_parts, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    backward_of,
    backward_of_all_ranks,
    forward_backward,
    full_gradients,
    in_turn,
    mlp_batches,
    on_meta,
    seeded,
)
from tests.harness.traffic import SentBytes


def _bytes_of_a_step(frozen: str, before_wrapping: bool) -> int:
    model: nn.Module = seeded(_wide)
    if before_wrapping:
        _freeze(model, frozen)
    model = ZeRO3(model, auto_wrap_policy={Block})
    _freeze(model, frozen)
    batch = torch.randn(2, _WIDE)
    forward_backward(model, batch)  # the order is recorded
    forward_backward(model, batch)
    sent = SentBytes()
    with sent:
        forward_backward(model, batch)
    return sent.nbytes


def _freeze(model: nn.Module, prefix: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefix))


_WIDE = 64


def _wide() -> nn.Module:
    return nn.Sequential(*(Block(_WIDE, _WIDE) for _ in range(3)))


@on_ranks(3)
def test_no_gradient_bytes_travel_for_what_is_frozen() -> None:
    block = sum(4 * parameter.numel() for parameter in Block(_WIDE, _WIDE).parameters())
    # A rank sends what others own; an implementation may hand over its own part too.
    least = 0.98 * block * (dist.get_world_size() - 1) / dist.get_world_size()
    for before_wrapping in (True, False):
        everything = _bytes_of_a_step("nothing", before_wrapping)
        assert everything >= block, "nothing was counted"
        saved = everything - _bytes_of_a_step("1", before_wrapping)
        assert least <= saved <= 1.02 * block, f"{saved} bytes saved, of {block} of gradients"
        # Nothing before the first block needs a gradient: frozen, it is not even gathered again.
        saved = everything - _bytes_of_a_step("0", before_wrapping)
        assert least <= saved <= 2 * 1.02 * block, f"{saved} bytes saved, of {block} of gradients"
        if before_wrapping:
            # Part of a unit; later it depends on which rank owns the part.
            saved = everything - _bytes_of_a_step("1.up", before_wrapping)
            assert least / 2 <= saved, f"{saved} bytes saved, of {block / 2} of gradients"


@on_ranks(2)
def test_a_wholly_frozen_model_passes_gradients_to_its_input() -> None:
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    batch = mlp_batches(1)[0][0]
    gradients = []
    for each in (model, plain):
        each.requires_grad_(False)
        assert not each(batch).requires_grad
        x = batch.clone().requires_grad_()
        gradients += torch.autograd.grad(each(x).square().sum(), x)
        each.requires_grad_(True)
    assert_bitwise(*gradients, "gradient of the input")
    assert_trains_alike(model, plain)


class _FreezesItself(Mlp):
    """Freezes a block inside a forward, where it is unsharded, and thaws it in the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(self._switch)

    @staticmethod
    def _switch(block: nn.Module, *_: object) -> None:
        block.requires_grad_(not block.up.weight.requires_grad)


@on_ranks(2)
def test_a_forward_may_freeze_its_own_parameters() -> None:
    twice = backward_of(lambda model, batch: loss_of(model(batch)) + loss_of(model(batch)))
    trained_alike(_FreezesItself, Block, run=twice)


def _tables() -> nn.Module:
    """A scale that is stored in eight bits, and integers, beside what is trained."""
    scale = torch.linspace(0.5, 2.0, WIDTH).to(torch.float8_e4m3fn)
    return Parts(
        lambda own, x: own.linear(x[:, own.order]) * own.scale.float(),
        linear=nn.Linear(WIDTH, WIDTH),
        scale=nn.Parameter(scale, requires_grad=False),
        order=nn.Parameter(torch.randperm(WIDTH), requires_grad=False),
    )


@on_ranks(2)
def test_frozen_parameters_of_float8_and_integers_stand_beside_trained_ones() -> None:
    model = trained_alike(_tables)
    forward_backward(model, mlp_batches(1)[0][dist.get_rank()])
    assert model.clip_grad_norm_(1.0).dtype == torch.float32
    state = get_model_state_dict(model, full=True)
    assert state["scale"].dtype == torch.float8_e4m3fn
    assert torch.equal(state["scale"].float(), seeded(_tables).scale.float())


# Hooks on parameters run with the reduced gradient, once it is there, or are refused by name ------


_sgd = OPTIMIZERS["sgd_momentum"]


def _step_in_hooks(model: nn.Module) -> None:
    """An optimizer for each parameter, stepped by its hook: torch's own recipe."""
    optimizers = {parameter: _sgd([parameter]) for parameter in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(step)


def _step_by_torch(model: nn.Module) -> None:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _apply_optimizer_in_backward(torch.optim.SGD, trainable, {"lr": 0.1, "momentum": 0.9})


_SETTINGS: tuple[tuple[type[nn.Module], dict[str, Any]], ...] = (
    (Mlp, {"auto_wrap_policy": {nn.Linear}, "reshard_after_forward": False}),
    (Mlp, {"zero3_size": 1, "outer": "replicate"}),
    (Mlp, {"offload": OffloadPolicy(params=True, grads=True)}),
    (frozen_parts, {}),
    (CASES["unused_parts"].build, {}),
    (TiedInUnit, {}),
)


@on_ranks(2)
def test_an_optimizer_in_post_accumulate_hooks_trains_as_one_that_steps_after_backward() -> None:
    for install in (_step_in_hooks, _step_by_torch):
        for build, options in _SETTINGS if install is _step_in_hooks else _SETTINGS[:1]:
            with named((install.__name__, build.__name__, options)):
                model, reference = zero3(build, Block, **options), seeded(build)
                install(model)
                optimizer = _sgd(reference.parameters())
                for step in mlp_batches(2):
                    with model.no_sync():
                        forward_backward(model, step[dist.get_rank()])
                    waiting = [p.grad for p in model.parameters() if p.grad is not None]
                    assert all(isinstance(each, WaitingGradient) for each in waiting)
                    forward_backward(model, step[dist.get_rank()])
                    assert all(parameter.grad is None for parameter in model.parameters())
                    backward_of_all_ranks(reference, [[x, x] for x in step], in_turn)
                    optimizer.step()
                    optimizer.zero_grad()
                    assert_same_values(model, reference)


def _recomputed_twice() -> nn.Module:
    """One block in two reentrant checkpoints, which reduce it once each."""

    def run(own: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(own.block, x, use_reentrant=True)
        return own.last(x)

    return Parts(run, block=Block(), last=Block())


@on_ranks(2)
def test_hooks_and_steps_in_backward_come_once_however_often_a_unit_was_reduced() -> None:
    x = mlp_batches(1)[0][dist.get_rank()].requires_grad_()
    model = zero3(_recomputed_twice, Block)
    gradients = zero3(_recomputed_twice, Block)
    loss_of(gradients(x)).backward()
    ran: list[Tensor] = []
    weight = model.block.up.weight
    weight.register_hook(lambda gradient: ran.append(gradient.clone()))
    together: list[list[Tensor | None]] = []
    register_multi_grad_hook([weight, model.last.up.bias], lambda found: together.append([*found]))
    loss_of(model(x)).backward()
    assert len(ran) == len(together) == 1
    assert_bitwise(ran[0], gradients.block.up.weight.grad, "the sum of both reductions")
    assert_bitwise(together[0][1], gradients.last.up.bias.grad)

    stepped = zero3(_recomputed_twice, Block)
    optimizer = _sgd(stepped.parameters())
    num_steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: num_steps.append(len(num_steps)))
    stepped.step_in_backward(optimizer)
    stepped.last.up.weight.register_hook(lambda gradient: gradient * 2)
    loss_of(stepped(x)).backward()
    assert len(num_steps) == 2, "one for each unit with parameters"
    optimizer = _sgd(gradients.parameters())
    with torch.no_grad():
        gradients.last.up.weight.grad *= 2
    optimizer.step()
    assert_same_values(stepped, gradients)


@on_ranks(2)
def test_a_hook_put_on_a_full_parameter_in_forward_sees_this_ranks_gradient() -> None:
    """As on parameters of DDP: with this rank's own gradient, before it is reduced."""

    class Hooked(Block):
        def forward(self, x: Tensor) -> Tensor:
            if not self.up.weight._backward_hooks:
                self.up.weight.register_hook(lambda gradient: gradient * (dist.get_rank() + 1))
            return super().forward(x)

    model, plain = (
        zero3(lambda: nn.Sequential(Hooked()), Hooked),
        zero3(lambda: nn.Sequential(Block()), Block),
    )
    x = mlp_batches(1)[0][dist.get_rank()]
    forward_backward(model, x)
    loss = loss_of(plain(x)) * (dist.get_rank() + 1)
    loss.backward()
    ours = full_gradients(model)["0.up.weight"]
    assert ours is not None
    assert_bitwise(ours, full_gradients(plain)["0.up.weight"])
    forward_backward(model, x)  # the hook is still there


@on_ranks(2)
def test_a_hook_on_a_dtensor_parameter_sees_the_piece_of_its_local_gradient() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 4)))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel()})
    model = ZeRO3(module, mesh["dp"])
    ran: list[Tensor] = []
    model.module[0].weight.register_hook(lambda gradient: ran.append(gradient.clone()))
    model(torch.ones(2, 4)).sum().backward()
    assert_bitwise(ran[0], torch.full((8,), 2.0))


_BEFORE: dict[str, Callable[[nn.Parameter], object]] = {
    "register_hook": lambda p: p.register_hook(print),
    "register_post_accumulate_grad_hook": lambda p: p.register_post_accumulate_grad_hook(print),
    "_apply_optimizer_in_backward": lambda p: _apply_optimizer_in_backward(
        torch.optim.SGD, [p], {"lr": 0.1}
    ),
}


@on_ranks(2)
def test_hooks_that_would_never_run_are_refused_by_name() -> None:
    for kind, put in _BEFORE.items():
        module = Mlp()
        put(module.blocks[1].up.weight)
        with pytest.raises(
            ValueError, match=rf"'blocks.1.up.weight' has hooks, registered with {kind}"
        ):
            ZeRO3(module, auto_wrap_policy={Block})
        model = zero3(Mlp, Block)
        with (
            pytest.raises(RuntimeError, match=rf"'blocks.1.up.weight': hooks .*{kind}. inside"),
            model.summon_full_params(),
        ):
            model.blocks[1].up.weight.data.mul_(2.0)
            put(model.blocks[1].up.weight)
        reference = seeded(Mlp)
        reference.blocks[1].up.weight.data.mul_(2.0)
        assert_same_values(model, reference)


class Scaled(nn.Parameter):
    """A parameter that knows how it is used."""

    scale: float

    @property
    def is_scaled(self) -> bool:
        return self.scale != 1


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.weight = Scaled(torch.randn(WIDTH, WIDTH))
        self.weight.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Scaled and self.weight.is_scaled
        return self.block(x) @ (self.weight * self.weight.scale)


class Packed(Tensor):
    """Values with operations of their own, as quantized ones are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Watched(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_a_class_derived_from_parameter_is_kept() -> None:
    for options in ({}, {"zero3_size": 1}):
        model = ZeRO3(seeded(Uses), auto_wrap_policy={Block}, **options)
        assert type(model.weight) is Scaled and model.weight.scale == 0.5
        assert_trains_alike(model, seeded(Uses))
        with model.summon_full_params():
            assert type(model.weight) is Scaled and model.weight.scale == 0.5
            assert model.weight.shape == (WIDTH, WIDTH)
    module = on_meta(Uses)
    module.weight = Scaled(torch.empty(WIDTH, WIDTH, device="meta"))
    module.weight.scale, module.table = 2.0, nn.Buffer(torch.empty(2, device="meta"))
    module.reset_parameters = lambda: [nn.init.ones_(x) for x in (module.weight, module.table)]
    model = ZeRO3(module, auto_wrap_policy={Block})
    assert type(model.weight) is Scaled and model.weight.scale == 2.0
    assert isinstance(model.table, nn.Buffer)


@on_ranks(2)
def test_a_tensor_with_operations_of_its_own_is_refused_by_name() -> None:
    values = torch.ones(WIDTH).as_subclass(Packed)
    for parameter in (nn.Parameter(values), Watched(torch.ones(WIDTH))):
        module = nn.Sequential(Block(), nn.Linear(WIDTH, 2))
        module[0].scale = parameter
        kind = type(parameter).__name__
        with pytest.raises(
            ValueError,
            match=rf"0 \(rank {dist.get_rank()}\): parameter '0\.scale' is a \S+\.{kind}, a tensor "
            "subclass with its own operations.*ignored_parameters",
        ):
            ZeRO3(module, auto_wrap_policy={Block})
        assert module[0].scale is parameter
        ZeRO3(module, auto_wrap_policy={Block}, ignored_parameters=[parameter])
        assert module[0].scale is parameter
    with pytest.raises(ValueError, match=r"parameter '0\.weight' has no shape yet.*lazy.*forward"):
        ZeRO3(nn.Sequential(nn.LazyLinear(3)))
