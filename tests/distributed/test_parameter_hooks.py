"""Hooks on parameters run with the reduced gradient, once it is there, or are refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
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
from layerzero.step.placeholders import WaitingGradient
from tests.harness.checks import assert_bitwise, assert_same_on_all_ranks, assert_same_parameters
from tests.harness.compare import assert_same_values, zero3
from tests.harness.models import WIDTH, Block, FrozenParts, Mlp, TiedInUnit, UnusedParts, loss_of
from tests.harness.ranks import run_ranks
from tests.harness.reference import backward_of_all_ranks, forward_backward, full_gradients, seeded


def _batches(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    size = dist.get_world_size()
    return [[torch.randn(4, WIDTH, generator=generator) for _ in range(size)] for _ in range(steps)]


@contextlib.contextmanager
def _named(what: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in {what}")
        raise


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


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
    (Mlp, {}),
    (Mlp, {"auto_wrap_policy": {nn.Linear}, "reshard_after_forward": False}),
    (Mlp, {"zero3_size": 1}),
    (Mlp, {"zero3_size": 1, "outer": "replicate"}),
    (Mlp, {"offload": OffloadPolicy(params=True, grads=True)}),
    (FrozenParts, {}),
    (UnusedParts, {}),
    (TiedInUnit, {}),
)


def _optimize_in_backward() -> None:
    for install in (_step_in_hooks, _step_by_torch):
        for build, options in _SETTINGS if install is _step_in_hooks else _SETTINGS[:3]:
            with _named((install.__name__, build.__name__, options)):
                model, reference = zero3(build, Block, **options), seeded(build)
                install(model)
                optimizer = _sgd(reference.parameters())
                for step in _batches(2):
                    with model.no_sync():
                        forward_backward(model, step[dist.get_rank()])
                    waiting = [p.grad for p in model.parameters() if p.grad is not None]
                    assert all(isinstance(each, WaitingGradient) for each in waiting)
                    forward_backward(model, step[dist.get_rank()])
                    assert all(parameter.grad is None for parameter in model.parameters())
                    backward_of_all_ranks(reference, step, _twice)
                    optimizer.step()
                    optimizer.zero_grad()
                    assert_same_values(model, reference)


def _twice(model: nn.Module, x: Tensor) -> Tensor:
    forward_backward(model, x)
    return forward_backward(model, x)


def test_an_optimizer_in_post_accumulate_hooks_trains_as_one_that_steps_after_backward() -> None:
    run_ranks(2, _optimize_in_backward)


def _replace_gradients() -> None:
    model, reference = zero3(Mlp, Block), seeded(Mlp)
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    order: list[str] = []

    def replace(name: str, gradient: Tensor) -> Tensor:
        order.append(f"hook {name}")
        seen[name].append(gradient.clone())
        return gradient.clamp(-0.01, 0.01) * 2

    def note(name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        order.append(f"post {name}")

    handles: list[Any] = []
    for name, parameter in model.named_parameters():
        if name != "head.weight":
            handles.append(parameter.register_hook(partial(replace, name)))
            handles.append(parameter.register_post_accumulate_grad_hook(partial(note, name)))
    for index, step in enumerate(_batches(2)):
        forward_backward(model, step[dist.get_rank()])
        before = [parameter.grad for parameter in reference.parameters()]
        reference.zero_grad()
        backward_of_all_ranks(reference, step)
        with torch.no_grad():
            for (name, parameter), old in zip(reference.named_parameters(), before, strict=True):
                assert parameter.grad is not None
                if name != "head.weight":
                    own = dict(model.named_parameters())[name].layerzero.range
                    expected = parameter.grad.view(-1)[slice(*own)]
                    assert_bitwise(seen[name][index], expected, f"what the hook of {name} saw")
                    parameter.grad = parameter.grad.clamp(-0.01, 0.01) * 2
                if old is not None:
                    parameter.grad += old
        assert_same_parameters(full_gradients(model), full_gradients(reference), what="gradient of")
    assert all(order.index(f"hook {n}") < order.index(f"post {n}") for n in seen if n[0] != "h")
    assert_same_on_all_ranks(order)
    for handle in handles:
        handle.remove()
    order.clear()
    forward_backward(model, _batches(1)[0][dist.get_rank()])
    assert not order


def test_hooks_see_and_replace_this_backwards_reduced_gradient() -> None:
    run_ranks(2, _replace_gradients)


class _RecomputedTwice(nn.Module):
    """One block in two reentrant checkpoints, which reduce it once each."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.last(x)


def _run_once_a_backward() -> None:
    x = _batches(1)[0][dist.get_rank()].requires_grad_()
    model = zero3(_RecomputedTwice, Block)
    gradients = zero3(_RecomputedTwice, Block)
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

    stepped = zero3(_RecomputedTwice, Block)
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


def test_hooks_and_steps_in_backward_come_once_however_often_a_unit_was_reduced() -> None:
    run_ranks(2, _run_once_a_backward)


def _hook_leaves_in_forward() -> None:
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
    x = _batches(1)[0][dist.get_rank()]
    forward_backward(model, x)
    loss = loss_of(plain(x)) * (dist.get_rank() + 1)
    loss.backward()
    ours = full_gradients(model)["0.up.weight"]
    assert ours is not None
    assert_bitwise(ours, full_gradients(plain)["0.up.weight"])
    forward_backward(model, x)  # the hook is still there


def test_a_hook_put_on_a_full_parameter_in_forward_sees_this_ranks_gradient() -> None:
    run_ranks(2, _hook_leaves_in_forward)


def _hook_tensor_parallel_parameters() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 4)))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel()})
    model = ZeRO3(module, mesh["dp"])
    ran: list[Tensor] = []
    model.module[0].weight.register_hook(lambda gradient: ran.append(gradient.clone()))
    model(torch.ones(2, 4)).sum().backward()
    assert_bitwise(ran[0], torch.full((8,), 2.0))


def test_a_hook_on_a_dtensor_parameter_sees_the_piece_of_its_local_gradient() -> None:
    run_ranks(2, _hook_tensor_parallel_parameters)


_BEFORE: dict[str, Callable[[nn.Parameter], object]] = {
    "register_hook": lambda p: p.register_hook(print),
    "register_post_accumulate_grad_hook": lambda p: p.register_post_accumulate_grad_hook(print),
    "_apply_optimizer_in_backward": lambda p: _apply_optimizer_in_backward(
        torch.optim.SGD, [p], {"lr": 0.1}
    ),
}


def _refuse() -> None:
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


def test_hooks_that_would_never_run_are_refused_by_name() -> None:
    run_ranks(2, _refuse)
