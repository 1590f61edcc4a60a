"""ParallelManager: its groups, what it refuses, context parallelism, and options of models."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from layerzero import MixedPrecision, ParallelManager, ShardingPlan, units
from layerzero.parallel import manager as manager_module
from tests.distributed.test_tensor_parallel import (
    LENGTH,
    VOCAB,
    WIDTH,
    Attention,
    Block,
    GatedMlp,
    gradients_of,
    loss_backward,
    values_of,
    whole_gradients,
    whole_values,
)
from tests.harness.checks import (
    assert_close_in_float64,
    assert_same_parameters,
    warns_on_first_rank,
)
from tests.harness.internals import inner_units
from tests.harness.ranks import on_ranks
from tests.harness.reference import OPTIMIZERS, backward_of_all_ranks, seeded

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
        meshes = {axis: manager.mesh[axis] for axis in ("pp", "dp", "cp", "tp")}
        meshes |= {axis: manager.expert_mesh[axis] for axis in ("edp", "ep")}
        meshes["dp_cp"] = manager.data_mesh
        own = {axis: mesh.get_local_rank() for axis, mesh in meshes.items()}
        of_ranks: list[Any] = [None] * 8
        dist.all_gather_object(of_ranks, own)
        places = {axis: [of_rank[axis] for of_rank in of_ranks] for axis in meshes}
        _, dp, cp, tp = manager.sizes.shape
        assert rank == ((own["pp"] * dp + own["dp"]) * cp + own["cp"]) * tp + own["tp"]
        assert own["dp_cp"] == own["dp"] * cp + own["cp"]
        assert own["dp_cp"] == own["edp"] * manager.sizes.ep + own["ep"]
        within = {"dp_cp": ("pp", "tp"), "edp": ("pp", "tp", "ep"), "ep": ("pp", "tp", "edp")}
        for axis, mesh in meshes.items():
            others = within.get(axis, {"pp", "dp", "cp", "tp"} - {axis})
            expected = [
                peer
                for peer in range(8)
                if all(places[other][peer] == places[other][rank] for other in others)
            ]
            assert _members(mesh.get_group()) == expected, (sizes, axis)
            assert mesh.size() == len(expected)
            assert mesh.get_local_rank() == expected.index(rank)


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
    for of_nemo, message in (
        ("device_mesh", r'pass sizes.*ZeRO3\(model, mesh\["dp"\]\)'),
        ("tp_sise", "expected sizes, mixed_precision, offload or backend"),
    ):
        with pytest.raises(TypeError, match=rf"no argument {of_nemo} \(got 2\): .*{message}"):
            ParallelManager(**{of_nemo: 2})
    with warns_on_first_rank("no effect: tp_size is 1"):
        ParallelManager(sequence_parallel=True)


def test_a_missing_process_group_is_named() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ParallelManager()


class PartAttention(Attention):
    """Queries of a part of the sequence, keys and values of all of it."""

    group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], -1, WIDTH // 2)
        query, key, value = (
            each(x).view(split).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        length, start = x.shape[1], 0
        if self.group is not None:
            start = length * self.group.rank()
            # torch 2.11 gathers only what is contiguous.
            key, value = (
                all_gather_tensor_autograd(each.contiguous(), 2, self.group)
                for each in (key, value)
            )
        visible = torch.arange(key.shape[2]) <= torch.arange(length)[:, None] + start
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Takes symbols and those that come next, [batch, length], or the same part of both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        for block in self.blocks:
            block.attention = PartAttention()
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, both: Tensor) -> Tensor:
        x = self.embedding(both[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), both[1].flatten())


TP_PLAN = {
    "blocks.*.attention.query": ColwiseParallel(),
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": RowwiseParallel(),
    "blocks.*.mlp.*": "colwise",
    "blocks.*.mlp.down": "rowwise",  # the later one wins
    "embedding": "embedding_rowwise",
    "head": "colwise_gather_output",
}


def batches(num_data: int, steps: int = 2) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, LENGTH + 1)
    symbols = [torch.randint(VOCAB, shape, generator=generator) for _ in range(num_data * steps)]
    both = [torch.stack([each[:, :-1], each[:, 1:]]) for each in symbols]
    return [both[step * num_data : (step + 1) * num_data] for step in range(steps)]


def _follow(manager: ParallelManager, what: str, module: nn.Module, **options: Any) -> None:
    """Beside the unsharded model on whole sequences: products are summed in other parts."""
    for block in module.blocks:
        block.attention.group = manager.mesh["cp"].get_group() if manager.sizes.cp > 1 else None
    model = manager.parallelize(module, tp_plan=TP_PLAN, timeout=TIMEOUT, **options)
    assert [unit.fqn for unit in units(model)] == ["", "blocks.0", "blocks.1"]
    plain = seeded(Model)
    own, expected = (OPTIMIZERS["sgd_momentum"](each.parameters()) for each in (model, plain))
    for index, step in enumerate(batches(manager.sizes.dp)):
        own.zero_grad()
        expected.zero_grad()
        whole = step[manager.mesh.get_local_rank("dp")]
        loss = loss_backward(
            model, whole.chunk(manager.sizes.cp, 2)[manager.mesh.get_local_rank("cp")]
        )
        losses = backward_of_all_ranks(plain, step, loss_backward)
        dist.all_reduce(loss, group=manager.data_mesh.get_group())
        mean = torch.stack(losses).mean()
        assert_close_in_float64(loss / manager.data_mesh.size(), mean, f"{what}, {index}: loss")
        assert_close_in_float64(
            whole_gradients(model), gradients_of(plain), f"{what}, {index}: gradient of"
        )
        own.step()
        expected.step()
    assert_close_in_float64(whole_values(model), values_of(plain), f"{what}: parameter")


@on_ranks(4, timeout=120, in_float64=True)
def test_context_parallel_ranks_train_as_one_process_on_whole_sequences() -> None:
    for sizes in ({"cp_size": 2, "zero3_size": 2}, {"cp_size": 2, "tp_size": 2}):
        manager = ParallelManager(**sizes)
        module = seeded(Model)
        if manager.sizes.tp > 1:
            module.blocks[0].compile(backend="eager")
        _follow(manager, str(sizes), module)


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
        mlp = parallelize_module(GatedMlp(), manager.mesh["tp"], {"up": ColwiseParallel()})
        manager.parallelize(mlp, tp_plan={"gate": "colwise"})
    for options in ({"process_group": None}, {"zero3_sise": 1}):
        with pytest.raises(TypeError, match="unknown argument"):
            manager.parallelize(GatedMlp(), **options)
    with pytest.raises(ValueError, match="ep_size=2, but no plan names the experts"):
        ParallelManager(ep_size=2).parallelize(GatedMlp())
    in_sequence = ParallelManager(tp_size=2, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"no SequenceParallel\(\)"):
        in_sequence.parallelize(GatedMlp(), tp_plan={"up": "colwise"})


class _LlamaLayer(nn.Module):
    """With the names of Llama's, and with no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.self_attn.add_module(name, nn.Linear(8, 8, bias=False))
        for name, (width, out) in {"gate": (8, 16), "up": (8, 16), "down": (16, 8)}.items():
            self.mlp.add_module(f"{name}_proj", nn.Linear(width, out, bias=False))
        self.self_attn.forward = self._attend
        self.mlp.forward = self._mix

    def _attend(self, hidden: Tensor) -> Tensor:
        own = self.self_attn
        return own.o_proj(own.q_proj(hidden) * own.k_proj(hidden) + own.v_proj(hidden))

    def _mix(self, hidden: Tensor) -> Tensor:
        own = self.mlp
        return own.down_proj(F.silu(own.gate_proj(hidden)) * own.up_proj(hidden))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 8)
        self.layers = nn.ModuleList([_LlamaLayer(), _LlamaLayer()])
        self.norm = nn.LayerNorm(8)

    def forward(self, symbols: Tensor) -> Tensor:
        hidden = self.embed_tokens(symbols)
        assert hidden.shape == (*symbols.shape, 8), "models make positions and masks of it"
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden).pow(3).mean()


@on_ranks(2, in_float64=True)
def test_an_embeddings_output_that_is_under_way_does_not_reach_a_compiled_layer() -> None:
    symbols = torch.arange(8).view(2, 4) % 7
    module, plain = seeded(_Decoder), seeded(_Decoder)
    module.layers[0].compile(backend="aot_eager")
    model = ParallelManager(tp_size=2).parallelize(module, timeout=TIMEOUT)
    loss = loss_backward(model, symbols)
    assert_close_in_float64(loss, loss_backward(plain, symbols), "loss")
    assert_close_in_float64(whole_gradients(model), gradients_of(plain), "gradient of")


class _Small(nn.Module):
    """Something split, something frozen, a tie, an attribute; and a module of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.norm = nn.LayerNorm(8).requires_grad_(False)
        self.mlp = GatedMlp()
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.mlp.up.weight.is_marked = True

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.norm(self.embedding(x)))).square().mean()


SMALL = {
    "embedding": "embedding_rowwise",
    "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
    "mlp.*": "colwise",
    "mlp.down": "rowwise",
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
    assert not model.norm.weight.requires_grad and model.mlp.up.weight.requires_grad
    assert model.mlp.up.weight.is_marked
    torch.manual_seed(0)
    plain = _Small()
    nn.init.normal_(plain.norm.weight)
    assert_same_parameters(whole_values(model), values_of(plain), what="the first rank's")
    symbols = torch.arange(8).view(2, 4)
    assert_close_in_float64(loss_backward(model, symbols), loss_backward(plain, symbols), "loss")
    assert_close_in_float64(whole_gradients(model), gradients_of(plain), "gradient of")
    # By hand on the manager's mesh, and nothing more from the manager.
    mlp = seeded(GatedMlp)
    parallelize_module(mlp, manager.mesh["tp"], {"up": ColwiseParallel()})
    assert manager.parallelize(mlp, tp_plan={}).up.weight.layerzero.tensor_parallel is not None


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
            manager.parallelize(_Small(), tp_plan=HERE, auto_wrap_policy={GatedMlp}),
        ):
            assert [unit.fqn for unit in units(model)] == ["", "mlp"]
            # The optimizer's weights are float32 even where dp x cp is one rank.
            assert {sharded_param.dtype for sharded_param in model.parameters()} == {torch.float32}
            seen = []
            model.mlp.up.register_forward_pre_hook(lambda m, _, seen=seen: seen.append(m.weight))
            model(torch.arange(8).view(2, 4))
            assert seen[0].dtype == torch.bfloat16
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
