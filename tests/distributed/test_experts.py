"""Experts on some ranks, the rest of the model on all: trains as the whole model on one process."""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from layerzero import ParallelManager, ShardingPlan, ZeRO3, global_norm, shard_with_plan
from tests.harness.checks import assert_close_in_float64
from tests.harness.compare import assert_follows
from tests.harness.internals import inner_units
from tests.harness.models import Parts
from tests.harness.ranks import on_ranks
from tests.harness.recording import gathered, recorded_operations, reduced
from tests.harness.reference import forward_backward, seeded

WIDTH, EXPERTS = 6, 4


class AllToAll(torch.autograd.Function):
    """Rows to ranks; splits are numbers of rows for, and from, each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: list[int], of: list[int], group: Any) -> Tensor:
        ctx.to, ctx.of, ctx.group = to, of, group
        received = x.new_empty(sum(of), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), of, to, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return AllToAll.apply(grad, ctx.of, ctx.to, ctx.group), None, None, None


class Expert(Parts):
    def __init__(self) -> None:
        down = nn.Linear(5, WIDTH, bias=False)
        super().__init__(up=nn.Linear(WIDTH, 5), act=nn.Tanh(), down=down)


class NamedExperts(nn.Module):
    """Modules named by their number among all."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleDict({str(index): Expert() for index in range(EXPERTS)})

    def keep(self, mesh: DeviceMesh) -> None:
        share, rank = EXPERTS // mesh["ep"].size(), mesh["ep"].get_local_rank()
        for index in range(EXPERTS):
            if index // share != rank:
                del self.each[str(index)]

    def forward(self, parts: Sequence[Tensor]) -> list[Tensor]:
        experts = self.each.values()
        return [e(x) if len(x) else x for e, x in zip(experts, parts, strict=True)]


class StackedExperts(nn.Module):
    """One parameter for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH) / 3)

    def keep(self, mesh: DeviceMesh) -> None:
        for name, whole in list(self.named_parameters()):
            part = distribute_tensor(whole.detach(), mesh["ep"], [Shard(0)])
            setattr(self, name, nn.Parameter(part, whole.requires_grad))

    def forward(self, parts: Sequence[Tensor]) -> list[Tensor]:
        up, down = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.up, self.down)
        )
        return [torch.tanh(x @ up[i]) @ down[i] for i, x in enumerate(parts)]


class Moe(nn.Module):
    """Each token goes to its best experts, wherever they are."""

    closed: list[int] = []  # noqa: RUF012
    """Experts that get no token; set for all layers."""

    def __init__(self, kind: type[nn.Module], top_k: int = 1) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = kind()
        self.group: Any = None
        self.num_ranks, self.top_k = 1, top_k

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x)
        logits = self.router(tokens)
        logits[:, self.closed] -= 99.0
        weights, choices = logits.softmax(-1).topk(self.top_k)
        choice = choices.flatten()
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=EXPERTS).view(self.num_ranks, -1)
        arriving, sent = counts, tokens.repeat_interleave(self.top_k, 0)[order]
        if self.num_ranks > 1:
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts, group=self.group)
            splits = counts.sum(1).tolist(), arriving.sum(1).tolist()
            sent = AllToAll.apply(sent, *splits, self.group)
        # Rank by rank, and expert by expert in each.
        blocks = sent.split(arriving.flatten().tolist())
        share = arriving.shape[1]
        parts = [torch.cat(blocks[index::share]) for index in range(share)]
        mixed = [
            part.split(arriving[:, index].tolist())
            for index, part in enumerate(self.experts(parts))
        ]
        back = torch.cat([block for row in zip(*mixed, strict=True) for block in row])
        if self.num_ranks > 1:
            back = AllToAll.apply(back, *reversed(splits), self.group)
        outputs = back[order.argsort()].unflatten(0, (-1, self.top_k))
        return x + (weights.unsqueeze(2) * outputs).sum(1)


class Model(Parts):
    def __init__(self, kind: type[nn.Module] = NamedExperts) -> None:
        layers = nn.Sequential(Moe(kind), Moe(kind))
        super().__init__(stem=nn.Linear(WIDTH, WIDTH), act=nn.Tanh(), layers=layers)


@functools.cache
def expert_mesh(ep: int, edp: int | None = None) -> DeviceMesh:
    """Two axes, or with `edp` three."""
    size = dist.get_world_size()
    if edp is None:
        return init_device_mesh("cpu", (size // ep, ep), mesh_dim_names=("edp", "ep"))
    shape = (size // edp // ep, edp, ep)
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "edp", "ep"))


def part_of(model: Model, ep: int) -> Model:
    """With this rank's experts alone, and ways to the others."""
    mesh = expert_mesh(ep)
    for layer in model.layers:
        if ep > 1:
            layer.experts.keep(mesh)
            layer.group, layer.num_ranks = mesh["ep"].get_group(), ep
    return model


def wrapped(
    ep: int, kind: type[nn.Module] = NamedExperts, replicates_experts: bool = False, **options: Any
) -> ZeRO3:
    """A rank's part of the model of seed 0."""
    mesh, model = expert_mesh(ep), part_of(seeded(lambda: Model(kind)), ep)

    def choose(module: nn.Module, fqn: str) -> Any:
        if isinstance(module, kind):
            same = expert_mesh(ep, 1)["outer", "edp"] if replicates_experts else mesh["edp"]
            return {"process_group": same}
        return isinstance(module, Moe)

    options.setdefault("auto_wrap_policy", choose)
    return ZeRO3(model, timeout=timedelta(seconds=25), **options)


def batches(steps: int, seed: int = 0, num_tokens: int = 9) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, WIDTH)
    ranks = range(dist.get_world_size())
    return [[torch.randn(shape, generator=generator) for _ in ranks] for _ in range(steps)]


def train(
    model: ZeRO3, reference: nn.Module, steps: int, seed: int = 0, clip: float | None = None
) -> torch.optim.Optimizer:
    """Compare every step; returns the model's optimizer."""
    optimizer = assert_follows(model, reference, batches(steps, seed), clip=clip)
    values = nn.utils.get_total_norm(list(reference.parameters()))
    assert_close_in_float64(global_norm(model.parameters()), values, "norm of values")
    return optimizer


class HalfFrozen(NamedExperts):
    """Some ranks gather two flat parameters, where the others gather one."""

    def __init__(self) -> None:
        super().__init__()
        self.each["0"].requires_grad_(False)


@on_ranks(4, in_float64=True)
def test_experts_of_some_ranks_may_be_frozen() -> None:
    for ep in (2, 4):
        model = wrapped(ep, HalfFrozen, verify="always")
        train(model, seeded(lambda: Model(HalfFrozen)), 2)


@on_ranks(4)
def test_experts_cost_as_many_collectives_as_other_units() -> None:
    model = wrapped(2)
    for _ in range(2):
        with recorded_operations(model) as operations:
            forward_backward(model, batches(1)[0][dist.get_rank()])
    found = inner_units(model)
    assert len(found) == 5
    assert sorted(reduced(operations)) == sorted(unit.label for unit in found)
    assert len(gathered(operations)) == 2 * len(found) - 1
    sizes = {unit.label: unit.handles[0].placement.num_ranks for unit in found}
    experts = {name: size for name, size in sizes.items() if name.endswith("experts")}
    assert set(experts.values()) == {2} and len(experts) == 2
    assert {size for name, size in sizes.items() if name not in experts} == {4}


@on_ranks(4, in_float64=True)
def test_experts_train_beside_tensor_parallelism() -> None:
    """dp 2, tp 2; each rank of dp has two experts, and copies of them are over tp."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("ep", "edp", "tp"))
    model, rank = seeded(Model), mesh["ep"].get_local_rank()
    for layer in model.layers:
        layer.experts.keep(mesh)
        layer.group, layer.num_ranks = mesh["ep"].get_group(), 2
    whole = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"stem": whole})

    def choose(module: nn.Module, fqn: str) -> Any:
        return {"process_group": mesh["edp"]} if isinstance(module, NamedExperts) else False

    model = ZeRO3(model, mesh["ep"], auto_wrap_policy=choose)
    assert_follows(model, seeded(Model), [step[:2] for step in batches(2)], rank, clip=0.01)


@on_ranks(4, in_float64=True)
def test_a_plan_and_a_manager_say_which_units_are_experts() -> None:
    plan = ShardingPlan(
        apply_modules=["layers.{*}", "layers.{*}.experts"], ep_plan=["layers.{*}.experts"]
    )
    mesh = expert_mesh(2)
    for ep, ranks in ((2, mesh), (2, mesh["edp"].get_group()), (2, None), (4, None), (1, None)):
        model = part_of(seeded(Model), ep)
        if ranks is None:
            model = ParallelManager(ep_size=ep).parallelize(model, plan)
        else:
            model = shard_with_plan(model, plan, expert_mesh=ranks)
        sizes = [unit.handles[0].placement.num_ranks for unit in inner_units(model)]
        assert sizes == [4, 4, 4 // ep, 4, 4 // ep]
        train(model, seeded(Model), 1)
    with pytest.raises(ValueError, match=r"ep_plan=\['layers.\{\*\}.experts'\] needs expert_mesh"):
        shard_with_plan(part_of(seeded(Model), 2), plan)


@on_ranks(4)
def test_experts_that_do_not_fit_are_refused_on_every_rank() -> None:
    mesh, rank = expert_mesh(2), dist.get_rank()

    def part(kind: type[nn.Module] = NamedExperts) -> Model:
        model = seeded(lambda: Model(kind))
        for layer in model.layers:
            layer.experts.keep(mesh)
        return model

    def changed(change: Callable[[Any, Any], object], kind: Any = NamedExperts) -> Model:
        """`change` is called with the model and the experts of its first layer."""
        model = part(kind)
        change(model, model.layers[0].experts)
        return model

    def tie(model: Any, experts: Any) -> None:
        model.extra = nn.Linear(1, 5)
        model.extra.bias = next(iter(experts.each.values())).up.bias

    def cut_by_hand(model: Any, experts: Any) -> None:
        for name, whole in list(experts.named_parameters()):
            local = whole.full_tensor().detach().chunk(2)[rank % 2]
            setattr(experts, name, nn.Parameter(local.clone()))

    copied = nn.Parameter(distribute_tensor(torch.zeros(2), mesh["ep"], [Replicate()]))
    copies = changed(lambda model, experts: experts.register_parameter("bias", copied))
    both = changed(lambda model, _: setattr(model.stem, "bias", copied), StackedExperts)
    uneven = changed(lambda _, experts: experts.each.update({"9": Expert()} if rank % 2 else {}))
    where, edp = rf"layers.0.experts \(rank {rank}\)", mesh["edp"]
    wrong = "differ between ranks: ranks 2, 3 have no other expert, where rank 0 has unit 0, no exp"
    refused: list[tuple[nn.Module, Any, type[Exception], str]] = [
        (part(), "edp", TypeError, "layers.0.experts: process_group: expected a ProcessGroup"),
        (part(), mesh["ep"], ValueError, "ranks that have the same experts"),
        (part(), edp if rank < 2 else None, ValueError, wrong),
        (uneven, edp, ValueError, "every rank needs equally many experts"),
        (changed(cut_by_hand, StackedExperts), edp, ValueError, "different parameters under the"),
        (changed(tie), edp, ValueError, f"{where}: one of its parameters is tied to a parameter"),
        (copies, edp, ValueError, r"expected Shard\(dim\)"),
        (both, edp, NotImplementedError, "both DTensors"),
        (part(), mesh["ep"], ValueError, f"{where}: its process_group"),
    ]
    for number, (model, group, error, text) in enumerate(refused, start=1):

        def choose(module: nn.Module, fqn: str, group: Any = group) -> Any:
            is_expert = isinstance(module, (NamedExperts, StackedExperts))
            return {"process_group": group} if is_expert and group is not None else is_expert

        whole = edp if number == len(refused) else None  # The last one's dense units, too.
        with pytest.raises(error, match=text):
            ZeRO3(model, whole, auto_wrap_policy=choose)
