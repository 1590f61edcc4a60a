"""ParallelManager: its groups, what it refuses, context parallelism, and options of models."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from layerzero import MixedPrecision, ParallelManager, ReductionPolicy, ShardingPlan, units
from layerzero.parallel import manager as manager_module
from tests.distributed.test_tensor_parallel import deep, follows
from tests.harness.checks import assert_same_parameters, warns_on_first_rank
from tests.harness.compare import assert_follows
from tests.harness.decoder import GatedMlp
from tests.harness.internals import inner_units
from tests.harness.ranks import on_ranks
from tests.harness.reference import full_parameters, seeded

TIMEOUT = timedelta(seconds=25)


def _members(group: dist.ProcessGroup) -> list[int]:
    """Of a group, as the group itself tells by a collective."""
    seen = torch.zeros(dist.get_world_size())
    seen[dist.get_rank()] = 1
    dist.all_reduce(seen, group=group)
    return seen.nonzero().flatten().tolist()


@on_ranks(8)
def test_every_axis_has_the_ranks_that_differ_in_it_alone() -> None:
    rank = dist.get_rank()
    for sizes in (
        {"tp_size": 2, "cp_size": 2, "ep_size": 2},  # dp 2
        {"tp_size": 2, "pp_size": 2, "ep_size": 2},
        {"dp_size": 8, "ep_size": 8},
        {"pp_size": 8, "backend": "gloo"},
    ):
        manager = ParallelManager(**sizes)
        pp, dp, cp, tp = manager.sizes.shape
        ranks, edp = torch.arange(8).view(pp, dp, cp, tp), dp * cp // manager.sizes.ep
        of_data = ranks.movedim(3, 1).reshape(pp, tp, dp * cp)
        of_experts = of_data.view(pp, tp, edp, manager.sizes.ep)
        expected = {axis: ranks.movedim(place, 3) for place, axis in enumerate(("pp", "dp", "cp"))}
        expected |= {"tp": ranks, "dp_cp": of_data, "edp": of_experts.mT, "ep": of_experts}
        meshes = {axis: manager.mesh[axis] for axis in ("pp", "dp", "cp", "tp")}
        meshes |= {axis: manager.expert_mesh[axis] for axis in ("edp", "ep")}
        meshes["dp_cp"] = manager.data_mesh
        for axis, mesh in meshes.items():
            rows = expected[axis].reshape(-1, mesh.size()).tolist()
            [members] = [row for row in rows if rank in row]
            assert _members(mesh.get_group()) == members, (sizes, axis)
            assert mesh.get_local_rank() == members.index(rank)


@on_ranks(2)
def test_wrong_sizes_are_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"differ between ranks.*rank 0: .*tp=1.*rank 1: .*tp=2"):
        ParallelManager(tp_size=1 + rank)
    with pytest.raises(ValueError, match=r"rank 0: .*parallel=True; rank 1: .*=False"):
        ParallelManager(tp_size=2, sequence_parallel=rank == 0)
    with pytest.raises(ValueError, match=r"tp_size=3 = 3 ranks do not divide the world of 2"):
        ParallelManager(tp_size=3)
    with pytest.raises(TypeError, match="expected a MixedPrecision"):
        ParallelManager(mixed_precision=torch.bfloat16)
    with warns_on_first_rank("no effect: tp_size is 1"):
        ParallelManager(sequence_parallel=True)


def test_a_missing_process_group_is_named() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ParallelManager()


TP_PLAN = {
    "layers.*.self_attn.q_proj": ColwiseParallel(),
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": RowwiseParallel(),
    "layers.*.mlp.*": "colwise",
    "layers.*.mlp.down_proj": "rowwise",  # the later one wins
    "embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}


@on_ranks(4, timeout=120, in_float64=True)
def test_context_parallel_ranks_train_as_one_process_on_whole_sequences() -> None:
    """With a compiled layer, which the output of an embedding that is under way must not reach."""
    for sizes in ({"cp_size": 2, "zero3_size": 2}, {"cp_size": 2, "tp_size": 2}):
        manager = ParallelManager(**sizes)
        mesh, module = manager.mesh["cp"], seeded(deep)
        for layer in module.layers:
            layer.self_attn.group = mesh.get_group()
        if manager.sizes.tp > 1:
            module.layers[0].compile(backend="aot_eager")
        model = manager.parallelize(module, tp_plan=TP_PLAN, timeout=TIMEOUT)
        assert [unit.fqn for unit in units(model)] == ["", "layers.0", "layers.1"]

        def run(each: nn.Module, symbols: Tensor, model: nn.Module = model) -> Tensor:
            both = symbols[:, :-1], symbols[:, 1:]
            if each is model:
                both = (part.chunk(2, 1)[mesh.get_local_rank()] for part in both)  # noqa: B023
            loss = each(*both)
            loss.backward()
            loss = loss.detach()
            if each is model:
                dist.all_reduce(loss, group=mesh.get_group())  # noqa: B023
            return loss / 2 if each is model else loss

        follows(model, seeded(deep), manager.mesh, str(sizes), run=run)


@on_ranks(2, fresh=True)
def test_torchs_context_parallel_attention_is_used_or_refused() -> None:
    """What can be seen without CUDA: cutting, and that nothing happens without cp."""
    manager = ParallelManager(cp_size=2)
    symbols, mask = torch.arange(8).repeat(3, 1), torch.zeros(8)
    with pytest.raises(NotImplementedError, match="not on 'cpu'"):
        manager.context_parallel([symbols], [1])
    manager_module._DEVICES_OF_CONTEXT_PARALLEL = ("cpu",)
    for buffers, dims in (([symbols], [0]), ([symbols, mask[:4]], [1, 0])):
        with pytest.raises(ValueError, match="one sequence length, divisible by cp_size=2"):
            manager.context_parallel(buffers, dims)
    before = F.scaled_dot_product_attention
    with manager.context_parallel([symbols, mask], [1, 0]):
        places = [[0, 1, 6, 7], [2, 3, 4, 5]][manager.mesh.get_local_rank("cp")]
        assert symbols.tolist() == [places] * 3 and mask.shape == (4,)
        assert F.scaled_dot_product_attention is not before
    assert symbols.shape == (3, 8) and F.scaled_dot_product_attention is before
    with ParallelManager().context_parallel([symbols[:, :3]], [1]):
        assert F.scaled_dot_product_attention is before


class _Heads(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj = nn.Linear(8, num_heads * 4)


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = _Heads(3)
        self.up = nn.Linear(8, 5)
        self.down = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.table = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.table.weight


@on_ranks(2)
def test_plans_that_do_not_fit_are_refused_before_anything_changes() -> None:
    manager = ParallelManager(tp_size=2)
    tied = {"table": "embedding_colwise", "head": "colwise_gather_output"}
    for message, plan in [
        (r"expected 'auto', 'llama', 'model', a mapping.*got 'lama'", "lama"),
        (r"'no.such.PLAN' cannot be imported: No module named 'no'", "no.such.PLAN"),
        (r"does not fit _Odd: it has no module.*self_attn.q_proj", "auto"),
        (r"_Odd has no tensor-parallel plan", "model"),
        (r"'up': layerzero has no tensor-parallel style 'colwize'.*'rowwise'", {"up": "colwize"}),
        (r"'upp' matches no module of _Odd, whose children are \['attention'", {"upp": "colwise"}),
        (r"'up.weight' names a parameter", {"up.weight": "colwise"}),
        (r"none of \['up'\] splits a module", {"up": "replicate"}),
        (r"up: tp_size=2 does not divide its out_features=5", {"up": "colwise"}),
        (r"down: tp_size=2 does not divide its in_features=5", {"down": RowwiseParallel()}),
        (r"norm: ColwiseParallel splits .* got LayerNorm", {"norm": "colwise_rep"}),
        (r"tp_size=2 does not divide its 3 heads .*=12, head_dim=4", {"attention.*": "colwise"}),
        (r"'table.weight' and 'head.weight' are tied.*dim=1.*dim=0.*styles that split", tied),
    ]:
        module = _Odd()
        with pytest.raises(ValueError, match=message):
            manager.parallelize(module, tp_plan=plan)
        changed = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        assert changed == (plan is tied)
    with pytest.raises(TypeError, match="expected a mapping from module names"):
        manager.parallelize(_Odd(), tp_plan={"up": ColwiseParallel})
    with pytest.raises(ValueError, match="is a DTensor already"):
        mlp = parallelize_module(GatedMlp(), manager.mesh["tp"], {"up_proj": ColwiseParallel()})
        manager.parallelize(mlp, tp_plan={"gate_proj": "colwise"})
    for options in ({"process_group": None}, {"zero3_sise": 1}):
        with pytest.raises(TypeError, match="unknown argument"):
            manager.parallelize(GatedMlp(), **options)
    with pytest.raises(ValueError, match="ep_size=2, but no plan names the experts"):
        ParallelManager(ep_size=2).parallelize(GatedMlp())
    in_sequence = ParallelManager(tp_size=2, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"no SequenceParallel\(\)"):
        in_sequence.parallelize(GatedMlp(), tp_plan={"up_proj": "colwise"})


class _Small(nn.Module):
    """Something split, something frozen, a tie, an attribute; and a module of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.norm = nn.LayerNorm(8).requires_grad_(False)
        self.mlp = GatedMlp()
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.mlp.up_proj.weight.is_marked = True

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.norm(self.embedding(x)))).square().mean()


SMALL = {
    "embedding": "embedding_rowwise",
    "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
    "mlp.*": "colwise",
    "mlp.down_proj": "rowwise",
    "head": "colwise_gather_output",
}
HERE = f"{__name__}.SMALL"  # as recipes of NeMo name a plan


@on_ranks(2, in_float64=True)
def test_ties_freezing_attributes_and_equal_values_survive_the_split() -> None:
    torch.manual_seed(dist.get_rank())  # values of the first rank count, also of what is not split
    manager = ParallelManager(tp_size=2)
    module = _Small()
    nn.init.normal_(module.norm.weight)
    model = manager.parallelize(module, tp_plan=SMALL)
    assert model.head.weight is model.embedding.weight
    assert not model.norm.weight.requires_grad and model.mlp.up_proj.weight.requires_grad
    assert model.mlp.up_proj.weight.is_marked
    torch.manual_seed(0)
    plain = _Small()
    nn.init.normal_(plain.norm.weight)
    assert_same_parameters(full_parameters(model), full_parameters(plain), what="the first rank's")
    assert_follows(model, plain, [[torch.arange(8).view(2, 4)]], place=0)
    # By hand on the manager's mesh, and nothing more from the manager.
    mlp = seeded(GatedMlp)
    parallelize_module(mlp, manager.mesh["tp"], {"up_proj": ColwiseParallel()})
    assert manager.parallelize(mlp, tp_plan={}).up_proj.weight.layerzero.tensor_parallel is not None


@on_ranks(2)
def test_the_managers_options_go_to_every_model() -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Types and names as for `fully_shard` and for NeMo's managers.
    policies = {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": None,
    }
    for sizes in ({"tp_size": 2}, {"tp_size": 1, "zero3_size": 1}):
        manager = ParallelManager(**policies, **sizes)
        assert manager.mixed_precision == low
        plan = ShardingPlan(apply_modules=["mlp"], defaults={"timeout": TIMEOUT})
        for model in (
            manager.parallelize(_Small(), plan, tp_plan=SMALL),
            manager.parallelize(
                _Small(), tp_plan=HERE, auto_wrap_policy={GatedMlp}, reduction=ReductionPolicy()
            ),
        ):
            assert [unit.fqn for unit in units(model)] == ["", "mlp"]
            # The optimizer's weights are float32 even where dp x cp is one rank.
            assert {sharded_param.dtype for sharded_param in model.parameters()} == {torch.float32}
            seen: list[Tensor] = []
            for part in model.modules():
                if hasattr(part, "weight"):
                    part.register_forward_pre_hook(lambda m, _, seen=seen: seen.append(m.weight))
            model(torch.arange(8).view(2, 4)).backward()
            assert len(seen) == 6 and {weight.dtype for weight in seen} == {torch.bfloat16}
            assert {isinstance(weight, DTensor) for weight in seen} == {manager.sizes.tp > 1}
            gradients = {p.grad.dtype for p in model.parameters() if p.requires_grad}
            assert gradients == {torch.float32}
            placement = inner_units(model)[0].handles[0].placement
            assert placement.shard_group.size == 1
            assert placement.num_ranks == manager.data_mesh.size()
        module = _Small()
        with pytest.raises(TypeError, match=r"\['timeout'\] and a plan"):
            manager.parallelize(module, plan, tp_plan=SMALL, timeout=TIMEOUT)
        with pytest.raises(TypeError, match="expected a ShardingPlan"):
            manager.parallelize(module, {"apply_modules": ["mlp"]})
        with pytest.raises(ValueError, match="mpl"):
            manager.parallelize(module, ShardingPlan(apply_modules=["mpl"]), tp_plan=SMALL)
        assert not any(isinstance(each, DTensor) for each in module.parameters())
