"""Where a plan shards nothing, replicas are kept as `DistributedDataParallel` keeps them."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from layerzero import ShardingPlan, shard_with_plan
from tests.harness.checks import assert_bitwise
from tests.harness.models import WIDTH
from tests.harness.ranks import on_ranks
from tests.harness.reference import full_parameters

PLAN = {"apply_modules": ["layers.{*}"], "defaults": {"zero3_size": 1}}


class Normed(nn.Module):
    """Its statistics are of batches, so ranks would have their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def _of_this_rank() -> Normed:
    """Another one on each rank."""
    torch.manual_seed(dist.get_rank())
    module = Normed()
    module.seen.fill_(dist.get_rank())
    return module


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _go(model: Any, kind: str, x: Tensor) -> Tensor:
    """One event of a loop that evaluates and adds micro-batches up."""
    model.train(kind != "evaluate")
    waits = model.no_sync() if kind == "wait" else nullcontext()
    with waits, torch.set_grad_enabled(kind in ("wait", "step")):
        loss = model(x).square().mean()
        if loss.requires_grad:
            loss.backward()
    return loss.detach()


EVENTS = ["step", "look", "look", "wait", "wait", "step", "evaluate", "step", "evaluate", "wait"]


@on_ranks(2)
def test_replicas_start_equal_and_keep_buffers_as_ddp_does() -> None:
    model = shard_with_plan(_of_this_rank(), ShardingPlan(**PLAN))
    module = _of_this_rank()
    ddp = nn.parallel.DistributedDataParallel(module)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, ddp)]
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    for number, kind in enumerate(EVENTS):
        x = torch.randn(3, WIDTH, generator=generator)
        losses = [_go(each, kind, x) for each in (model, ddp)]
        assert_bitwise(*losses, f"{number}, {kind}: loss")
        theirs = _buffers(module)
        for name, buffer in _buffers(model).items():
            assert_bitwise(buffer, theirs[name], f"{number}, {kind}: {name}")
        for optimizer in optimizers if kind == "step" else ():
            optimizer.step()
            optimizer.zero_grad()
    parameters = dict(module.named_parameters())
    for name, value in full_parameters(model).items():
        assert_bitwise(value, parameters[name].detach(), name)


@on_ranks(2)
def test_only_replicas_with_buffers_pay_for_it_and_only_unless_told_otherwise() -> None:
    x = torch.ones(3, WIDTH)
    off = shard_with_plan(_of_this_rank(), ShardingPlan(**PLAN, broadcast_buffers=False))
    assert not off._forward_pre_hooks and not off._forward_hooks
    values = full_parameters(off)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (values, off.seen))
    for name, value in everyone[0][0].items():
        assert_bitwise(value, everyone[1][0][name], name)
    off(x)
    dist.all_gather_object(everyone, off.layers[0][1].running_mean)
    off(x * dist.get_rank())
    dist.all_gather_object(everyone, off.layers[0][1].running_mean)
    assert not torch.equal(*everyone)
    # What has no buffers, or is sharded, or is alone, does nothing at a forward.
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "shard"))
    linear = shard_with_plan(nn.Linear(WIDTH, 3), ShardingPlan(), mesh)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for model in (
        linear,
        shard_with_plan(_of_this_rank(), ShardingPlan(apply_modules=["layers.{*}"])),
        shard_with_plan(_of_this_rank(), ShardingPlan(defaults={"outer": "replicate"}), mesh),
        shard_with_plan(_of_this_rank(), ShardingPlan(), alone),
    ):
        assert not model._forward_pre_hooks and not model._forward_hooks
    own = ShardingPlan(defaults={"sync_module_states": False})
    torch.manual_seed(dist.get_rank())
    unequal = shard_with_plan(nn.Linear(WIDTH, 3), own, mesh)
    dist.all_gather_object(everyone, full_parameters(unequal)["weight"])
    assert not torch.equal(*everyone), "a plan that says so is taken at its word"


@on_ranks(2)
def test_a_model_from_meta_has_float32_main_weights_at_every_size() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    torch.manual_seed(3)
    plan = ShardingPlan(apply_modules=["0"], defaults={"zero3_size": 1}, param_dtype="bf16")
    model = shard_with_plan(module, plan)
    assert {sharded_param.dtype for sharded_param in model.parameters()} == {torch.float32}
    seen = []
    for layer in model.children():
        layer.register_forward_pre_hook(lambda m, _: seen.append(m.weight.dtype))
    model(torch.ones(3, WIDTH))
    assert seen == [torch.bfloat16] * 2
