"""OffloadPolicy: what waits on the host, and that nothing else changes. On a simulated device."""

import gc
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from layerzero import GradScaler, MixedPrecision, OffloadPolicy, ZeRO3, units
from tests.harness.checks import assert_bitwise, assert_same_parameters, named, warns_on_first_rank
from tests.harness.compare import assert_same_values, sharded
from tests.harness.fake_ranks import run_mirrored
from tests.harness.host_memory import FakeRuntime
from tests.harness.internals import host_memory as host
from tests.harness.internals import inner_units, root_state
from tests.harness.models import CASES, WIDTH, Block, Mlp, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.recording import observed, waiting_nbytes
from tests.harness.reference import (
    OPTIMIZERS,
    batches_of,
    forward_backward,
    full_parameters,
    seeded,
)
from tests.harness.simulated_device import simulated_device

POLICIES = {
    "params": OffloadPolicy(params=True),
    "grads": OffloadPolicy(grads=True),
    "both": OffloadPolicy(params=True, grads=True),
}


def _train(
    name: str, options: dict[str, Any], num_micro_batches: int
) -> tuple[list[torch.Tensor], dict]:
    """Losses and parameters after two steps of some micro-batches, with clipping.

    The second step has weights and optimizer state that came from the host, in a known order.
    """
    case = CASES[name]
    model = sharded(case, **options)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    losses = []
    for step in batches_of(case, dist.get_world_size() * num_micro_batches, steps=2):
        own = step[dist.get_rank() * num_micro_batches :][:num_micro_batches]
        optimizer.zero_grad()
        for index, batch in enumerate(own, 1):
            with nullcontext() if index == num_micro_batches else model.no_sync():
                losses.append(forward_backward(model, batch))
        model.clip_grad_norm_(0.5)
        optimizer.step()
    return losses, full_parameters(model)


def _same_as_without(policy: str, name: str, **options: Any) -> None:
    """With three micro-batches, so that the second adds to a sum that is on the host."""
    expected = _train(name, options, 3)
    what = f"{name}, {options}, offloading {policy}:"
    with simulated_device() as device:
        losses, parameters = _train(name, {**options, "offload": POLICIES[policy]}, 3)
    assert device.findings == [], what
    for own, other in zip(losses, expected[0], strict=True):
        assert_bitwise(own, other, f"{what} loss")
    assert_same_parameters(parameters, expected[1], what=what)


def _in_layers() -> None:
    """Each model and way to add up in some layers, and both ways in one of two hops."""
    _same_as_without("both", "unused_parts", accumulation="sharded")
    for name, accumulation in (("unused_parts", "sharded"), ("odd_shapes", "unsharded")):
        _same_as_without("both", name, zero3_size=2, accumulation=accumulation)
    _same_as_without("both", "frozen_parts", zero3_size=1, accumulation="sharded")
    replicate = {"zero3_size": 2, "outer": "replicate"}
    _same_as_without("grads", "unused_parts", **replicate, accumulation="unsharded")
    shard = {"zero3_size": 2, "outer": "shard", "reshard_after_forward": "compute_shard"}
    _same_as_without("both", "unused_parts", **shard, accumulation="sharded")
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    options = {"mixed_precision": half, "accumulation": "unsharded"}
    _same_as_without("params", "odd_shapes", zero3_size=2, **options)


def test_offloading_changes_no_bit() -> None:
    run_mirrored(1, 4, _in_layers)


def _what_is_where() -> None:
    with simulated_device() as device:
        model = sharded(CASES["mlp"], offload=OffloadPolicy(params=True, grads=True))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        handles = [handle for unit in inner_units(model) for handle in unit.handles]
        batch = torch.randn(2, WIDTH)
        with model.no_sync():
            forward_backward(model, batch)
        for handle in handles:
            gradients = handle.gradients
            assert gradients.host_sum is not None and device.is_on_host(gradients.host_sum)
            assert waiting_nbytes(gradients) == 0, "no gradients wait on the device"
        forward_backward(model, batch)
        optimizer.step()
        for handle in handles:
            assert handle.gradients.host_sum is None
            assert device.is_on_host(handle.main_shard)
            assert not device.is_on_host(handle.compute_shard)
        for parameter in model.parameters():
            state = optimizer.state[parameter]
            on_host = [parameter.data, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
            assert all(device.is_on_host(t) for t in on_host if t.numel())


def _freezes_and_unfreezes_amid() -> None:
    batch, found = torch.randn(2, WIDTH), []
    steps = (("stem", False), ("head", False), ("stem", True), ("head", True))
    for policy in (None, OffloadPolicy(grads=True)):
        with simulated_device() as device:
            model = sharded(CASES["mlp"], offload=policy)
            for number, (name, trains) in enumerate(steps, 1):
                getattr(model, name).requires_grad_(trains)
                with nullcontext() if number == len(steps) else model.no_sync():
                    forward_backward(model, batch)
            found.append([(n, p.grad.clone()) for n, p in model.named_parameters()])
        assert device.findings == []
    for (name, expected), (_, own) in zip(*found, strict=True):
        assert_bitwise(own, expected, name)


def _storages_resized_to_their_size() -> None:
    resized = []

    def note(storage: torch.UntypedStorage, nbytes: int) -> None:
        if nbytes and storage.nbytes() == nbytes:
            resized.append(nbytes)

    for policy in (None, OffloadPolicy(grads=True)):
        for accumulation in ("sharded", "unsharded"):
            with simulated_device():
                model = sharded(CASES["mlp"], offload=policy, accumulation=accumulation)
                with observed(torch.UntypedStorage, "resize_", note):
                    for sync in (False, False, True):
                        with nullcontext() if sync else model.no_sync():
                            forward_backward(model, torch.randn(2, WIDTH))
            assert not resized, f"{policy}, {accumulation}: a device allocates again, and copies"


def _registered_exactly() -> None:
    runtime = FakeRuntime()
    with mock.patch.object(host, "get_device_module", lambda _: runtime), simulated_device():
        model = sharded(CASES["mlp"], offload=OffloadPolicy(params=True))
    shards = [h.main_shard for unit in inner_units(model) for h in unit.handles]
    assert runtime.held == {shard.data_ptr(): shard.nbytes for shard in shards}
    del model, shards
    gc.collect()
    assert not runtime.held


def _around_the_step() -> None:
    """Summoning, sums of `.grad` with sync on, and loss scales."""
    with simulated_device():
        model, plain = sharded(CASES["mlp"], offload=OffloadPolicy(params=True)), seeded(Mlp)
        with model.summon_full_params(), torch.no_grad():
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.add_(1.0)
        assert_same_values(model, plain)
        batch = torch.ones(2, WIDTH)
        for _ in range(2):
            forward_backward(model, batch)
            forward_backward(plain, batch)
        with model.summon_full_params(with_grads=True, rank0_only=True):
            for own, other in zip(model.parameters(), plain.parameters(), strict=True):
                if dist.get_rank() == 0:
                    assert_bitwise(own.grad, other.grad, "gradient")
        scaler = GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0


class _Copies(TorchDispatchMode):
    """Lists copies that leave a device, and whether the host waits until they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[bool] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("device") or torch.device("meta")
        if (
            args
            and func is torch.ops.aten._to_copy.default
            and to.type == "cpu" != args[0].device.type
        ):
            self.waited.append(not kwargs.get("non_blocking"))
        return func(*args, **kwargs)


def test_the_host_waits_for_the_scale_by_which_it_divides_gradients() -> None:
    with FakeTensorMode():
        parameter = nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        scaler = GradScaler("cpu")
        scaler._lazy_init_scale_growth_tracker(torch.device("cuda"))
        with mock.patch.object(scaler, "_agree", lambda found, _: found), _Copies() as copies:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
    assert copies.waited == [True, True] and scaler._scale.device.type == "cuda"
    GradScaler("cpu", enabled=False).step(torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def _steps_in_backward(optimizer_name: str, options: dict[str, Any]) -> None:
    """Bitwise as with `optimizer.step()`; `ignored` belongs to no unit."""
    results = []
    for in_backward in (False, True):
        module = seeded(Mlp)
        ignored = [module.head.weight]
        model = ZeRO3(module, auto_wrap_policy={Block}, ignored_parameters=ignored, **options)
        decays = [p for p in model.parameters() if p.numel() % 2]
        others = [p for p in model.parameters() if not p.numel() % 2]
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        optimizer.param_groups[0]["params"] = decays
        optimizer.add_param_group({"params": others, "lr": 0.03})
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if in_backward:
            model.step_in_backward(optimizer)
        for step in batches_of(CASES["mlp"], dist.get_world_size() * 2, steps=3):
            optimizer.zero_grad(set_to_none=False)
            own = step[dist.get_rank() * 2 :][:2]
            seen = own[0].clone().requires_grad_()
            torch.autograd.grad(loss_of(model(seen)), seen)  # Of no parameter: this steps none.
            with model.no_sync():
                forward_backward(model, own[0])
            forward_backward(model, own[1])
            if not in_backward:
                optimizer.step()
            scheduler.step()
        assert len(optimizer.param_groups[0]["params"]) == len(decays)
        results.append(full_parameters(model))
        if in_backward:
            with pytest.raises(RuntimeError, match="clip_grad_norm_ after step_in_backward"):
                model.clip_grad_norm_(1.0)
            model.step_in_backward(None)
            model.clip_grad_norm_(1.0)
    assert_same_parameters(results[1], results[0])


@on_ranks(4)
def test_steps_in_backward_are_those_of_the_optimizer() -> None:
    for optimizer, options in (("adamw", {"zero3_size": 2}), ("sgd_momentum", {})):
        with named(optimizer, options):
            _steps_in_backward(optimizer, options)


def _steps_as_gradients_land() -> None:
    """Offloaded, each unit is stepped before the host waits for the next one's gradients."""
    events: list[str] = []
    with simulated_device() as device:
        model = sharded(CASES["mlp"], offload=OffloadPolicy(params=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        root = root_state(model)
        wait, step = root.streams.wait_on_host, optimizer.step

        def waits(mark: object) -> None:
            events.append("wait" if mark is not None else "")
            wait(mark)

        def steps() -> None:
            events.append("step")
            step()

        root.streams.wait_on_host, optimizer.step = waits, steps
        model.step_in_backward(optimizer)
        output = model(torch.randn(2, WIDTH))
        events.clear()
        output.sum().backward()
        assert [event for event in events if event] == ["wait", "step"] * len(units(model))
        assert device.findings == []


def _without_a_device() -> None:
    for offload in POLICIES.values():
        with warns_on_first_rank("has no effect: the model is on the CPU"):
            model = ZeRO3(Mlp(), offload=offload)
        for handle in (handle for unit in inner_units(model) for handle in unit.handles):
            assert handle.params_on is None and handle.gradients.sums_on is None
        forward_backward(model, torch.randn(2, WIDTH))
    # A unit is of the device that it trains on, wherever its main shards are.
    inner_units(model)[0].context.device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"need one device, got cpu \(.*\) and cuda:0 \("):
        ZeRO3(nn.Sequential(model, nn.Linear(2, 2)))
    message = r"offload: expected an OffloadPolicy\(params=True\) or None, got True"
    with pytest.raises(TypeError, match=message):
        ZeRO3(Mlp(), offload=True)


@on_ranks(2)
def test_what_waits_on_the_host_and_when() -> None:
    _what_is_where()
    _freezes_and_unfreezes_amid()
    _storages_resized_to_their_size()
    _registered_exactly()
    _around_the_step()
    _steps_as_gradients_land()
    _without_a_device()
