"""Tensor parallelism by torch's `parallelize_module`, sharded by ZeRO3: trains as one process. And
ParallelManager: its groups, what it refuses, context parallelism, and options of models."""

import itertools
import math
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from layerzero import (
    GradScaler,
    MixedPrecision,
    ParallelManager,
    ReductionPolicy,
    ShardingPlan,
    ZeRO3,
    global_norm,
    units,
)
from layerzero.parallel import manager as manager_module
from tests.harness.checks import (
    assert_bitwise,
    assert_close_in_float64,
    assert_same_on_all_ranks,
    assert_same_parameters,
    warns_on_first_rank,
)
from tests.harness.compare import assert_follows
from tests.harness.decoder import VOCAB, Attention, Decoder, DecoderLayer, GatedMlp
from tests.harness.internals import inner_units
from tests.harness.models import Parts
from tests.harness.ranks import on_ranks
from tests.harness.recording import full_nbytes, gathered, recorded_operations, reduced
from tests.harness.reference import (
    RunFn,
    backward_of_all_ranks,
    forward_backward,
    full_gradients,
    full_parameters,
    on_meta,
    seeded,
)

WIDTH, LENGTH = 8, 6
TIMEOUT = timedelta(seconds=25)


class Llama(Decoder):
    def __init__(self, count: int = 1, recomputes: bool = False) -> None:
        layers = []
        for _ in range(count):
            parts = nn.RMSNorm(WIDTH), Attention(WIDTH), nn.RMSNorm(WIDTH), GatedMlp()
            layers.append(DecoderLayer(*parts, recomputes=recomputes))
        super().__init__(WIDTH, layers, nn.RMSNorm(WIDTH))


def parallelize(model: Llama, mesh: DeviceMesh, in_sequence: bool) -> Llama:
    """With `in_sequence` norms compute on a part of the sequence, and are DTensors themselves."""
    between = Shard(1) if in_sequence else Replicate()
    norms: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
    }
    entries: dict[str, Any] = {
        "self_attn": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
        "mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
    }
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(output_layouts=between),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=between),
                **(norms | entries if in_sequence else {}),
            },
        )
    plan: dict[str, Any] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan | ({"norm": SequenceParallel()} if in_sequence else {}))
    return model


def grid(num_data: int) -> DeviceMesh:
    """All ranks, neighbours in tensor-parallel groups."""
    shape = (num_data, dist.get_world_size() // num_data)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def wrapped(
    mesh: DeviceMesh, in_sequence: bool = True, build: Callable[[], Llama] = Llama, **options: Any
) -> ZeRO3:
    model = parallelize(seeded(build), mesh["tp"], in_sequence)
    options.setdefault("auto_wrap_policy", {DecoderLayer})
    return ZeRO3(model, process_group=mesh["dp"], timeout=TIMEOUT, **options)


def batches(steps: int, num_data: int, seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(VOCAB, (2, LENGTH + 1), generator=generator) for _ in range(num_data)]
        for _ in range(steps)
    ]


def follows(
    model: nn.Module,
    plain: nn.Module,
    mesh: DeviceMesh,
    what: str,
    steps: int = 2,
    run: RunFn = forward_backward,
) -> None:
    """Tensor-parallel ranks get the same batch."""
    each = batches(steps, mesh["dp"].size())
    assert_follows(model, plain, each, mesh["dp"].get_local_rank(), run, what=what)


def deep() -> Llama:
    return Llama(2)


def _with_gradients(mesh: DeviceMesh, in_sequence: bool = True) -> tuple[ZeRO3, Llama]:
    """A model and its plain twin after the backward of one step."""
    model, plain, [step] = wrapped(mesh, in_sequence), seeded(Llama), batches(1, 2)
    forward_backward(model, step[mesh["dp"].get_local_rank()])
    backward_of_all_ranks(plain, step)
    return model, plain


@on_ranks(4, in_float64=True)
def test_the_norm_counts_every_element_once_and_is_that_of_all_ranks() -> None:
    mesh = grid(2)
    for in_sequence, norm_type in itertools.product((True, False), (3.0, math.inf)):
        model, plain = _with_gradients(mesh, in_sequence)
        expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
        unclipped, limit = global_norm(model, norm_type), 0.3 * expected.item()
        norm = model.clip_grad_norm_(limit, norm_type)
        assert_bitwise(unclipped, norm, "norm")
        assert_close_in_float64(norm, expected, "norm")
        assert_same_on_all_ranks(norm, f"norm {norm_type}")
        nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type)
        assert_close_in_float64(full_gradients(model), full_gradients(plain), "gradient of")
        whole_norm = nn.utils.get_total_norm(list(plain.parameters()), norm_type)
        assert_close_in_float64(global_norm(model.parameters(), norm_type), whole_norm, "norm")
        # One element on one rank; not the first one of any group.
        own = max(model.parameters(), key=lambda sharded_param: sharded_param.numel())
        if dist.get_rank() == dist.get_world_size() - 1:
            own.grad[0] = math.nan
        assert math.isnan(model.clip_grad_norm_(1.0, norm_type).item())


@on_ranks(4, in_float64=True)
def test_full_parameters_are_dtensors_and_are_written_back() -> None:
    mesh = grid(2)
    model, plain = _with_gradients(mesh)
    before = {name: sharded.detach().clone() for name, sharded in model.named_parameters()}
    with model.summon_full_params(writeback=False, with_grads=True, offload_to_cpu=True):
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor), name
            assert parameter.device_mesh == mesh["tp"]
            assert parameter.grad.placements == parameter.placements
            assert parameter.shape == plain.get_parameter(name).shape
        with torch.no_grad():
            model.lm_head.weight.fill_(7.0)
    after = {name: sharded.detach() for name, sharded in model.named_parameters()}
    assert_same_parameters(after, before, what="without writeback")
    for rank0_only in (False, True):
        with model.summon_full_params(rank0_only=rank0_only, with_grads=True), torch.no_grad():
            is_shown = not rank0_only or mesh["dp"].get_local_rank() == 0
            assert isinstance(model.lm_head.weight, DTensor) == is_shown
            if is_shown:
                for parameter in model.parameters():
                    parameter.mul_(2.0)
                model.norm.weight.grad = None
                # As a partial sum over the two tensor-parallel ranks: 0.5 + 0.5 everywhere; and
                # as one that is still under way.
                rows = torch.full(model.lm_head.weight.shape, 0.5)
                halves = DTensor.from_local(rows, mesh["tp"], [Partial()])
                under_way = halves.redistribute(placements=[Shard(0)], async_op=True)
                model.lm_head.weight.grad = under_way if rank0_only else halves
                model.embed_tokens.weight.grad = torch.ones(
                    model.embed_tokens.weight.shape
                )  # no DTensor
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(2.0)
        plain.norm.weight.grad = None
        for each in (plain.lm_head, plain.embed_tokens):
            each.weight.grad = torch.ones_like(each.weight)
        assert_same_parameters(full_parameters(model), full_parameters(plain), what="doubled")
        gradients = full_gradients(model)
        assert_close_in_float64(gradients, full_gradients(plain), "written gradient of")
        assert_bitwise(gradients["lm_head.weight"], plain.lm_head.weight.grad, "partial")


@on_ranks(4)
def test_all_ranks_of_the_mesh_agree_on_an_overflow() -> None:
    """One rank overflows; a group that leaves out its tensor-parallel peers is enough."""
    mesh = grid(2)
    for group in (None, mesh["dp"]):
        model = wrapped(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", process_group=group, init_scale=4.0)
        for overflows in (True, False):
            before = full_parameters(model)
            optimizer.zero_grad()
            scaler.scale(model(batches(1, 1)[0][0])).backward()
            own = max(model.parameters(), key=lambda sharded_param: sharded_param.numel())
            if overflows and dist.get_rank() == 3:
                own.grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0
            for name, value in full_parameters(model).items():
                assert torch.equal(value, before[name]) == overflows, name


@on_ranks(4)
def test_a_unit_is_gathered_once_into_leaves_that_stay() -> None:
    """Sharded, replicated and plain parameters share a gather; leaves stay what they are."""
    mesh = grid(2)
    model = wrapped(mesh)
    num_units = len(units(model))
    unsharded_params = [
        unsharded
        for unit in inner_units(model)
        for handle in unit.handles
        for unsharded in handle.unsharded_params
    ]
    storages = [unsharded.detach().to_local().untyped_storage() for unsharded in unsharded_params]
    shown: set[int] = set()
    for module in model.modules():
        module.register_forward_pre_hook(
            lambda module, _: shown.update(id(p) for p in module.parameters(recurse=False))
        )
    for _ in range(3):
        with recorded_operations(model) as operations:
            forward_backward(model, batches(1, 1)[0][0])
        assert len(gathered(operations)) == 2 * num_units - 1, operations
        assert len(reduced(operations)) == num_units, operations
        assert all(storage.nbytes() == 0 for storage in storages)
        assert set(full_nbytes(model).values()) == {0}
    assert shown <= {id(unsharded) for unsharded in unsharded_params} and len(shown) == len(
        unsharded_params
    )
    with recorded_operations(model) as operations:
        model.clip_grad_norm_(1.0)
    assert len(operations) == 1, "one gather over data-parallel ranks"


def _on_grid(mesh: DeviceMesh | None = None) -> nn.Module:
    """Parameters on a mesh of two axes, in unequal parts: 2, 1 or no axis cuts them."""
    generator = torch.Generator().manual_seed(0)
    placements = {
        "weight": ((5, 3), (Shard(0), Shard(1))),
        "rows": ((5, 3), (Shard(0), Shard(0))),
        "gain": ((5,), (Replicate(), Shard(0))),
        "bias": ((5,), (Replicate(), Replicate())),
        "single": ((1,), (Shard(0), Replicate())),  # nothing on two of the ranks
    }
    values = {k: torch.randn(at[0], generator=generator) for k, at in placements.items()}
    if mesh is not None:
        values = {k: distribute_tensor(v, mesh, placements[k][1]) for k, v in values.items()}
    values["scale"] = torch.tensor(0.7)

    def run(own: Any, x: Tensor) -> Tensor:
        if mesh is not None:
            x = DTensor.from_local(x, mesh, [Replicate()] * 2, run_check=False)
        out = x @ (own.weight * own.rows).T * own.gain * own.single + own.bias
        out = out.full_tensor() if isinstance(out, DTensor) else out
        return (out * own.scale).square().mean()

    return Parts(run, **{name: nn.Parameter(value) for name, value in values.items()})


@on_ranks(4, in_float64=True)
def test_a_mesh_of_two_axes_works() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))
    plain = _on_grid()
    model = ZeRO3(_on_grid(mesh["a", "b"]), process_group=mesh["dp"])
    splits = {name: p.layerzero.tensor_parallel for name, p in model.named_parameters()}
    assert splits.pop("scale") is None
    copies = {name: split.num_copies for name, split in splits.items()}
    assert copies == {"weight": 1, "rows": 1, "gain": 2, "bias": 4, "single": 2}
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    for norm_type in (2.0, math.inf):
        for each in (model, plain):
            each.zero_grad()
            forward_backward(each, x)
        assert_close_in_float64(full_gradients(model), full_gradients(plain), "gradient")
        norm = model.clip_grad_norm_(1e6, norm_type)
        expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
        assert_close_in_float64(norm, expected, "norm")
        assert_same_on_all_ranks(norm, "norm")
    assert_same_parameters(full_parameters(model), full_parameters(plain), what="on a grid")


def _reset(module: nn.Module) -> None:
    module.reset_parameters()


@on_ranks(4, in_float64=True)
def test_what_ranks_draw_on_the_meta_device_is_equal_over_both_axes_and_trains() -> None:
    """Every rank draws its own numbers; the parts of an embedding are unequal, too."""
    mesh = grid(2)
    for in_sequence, init in ((True, None), (False, _reset)):
        model = parallelize(on_meta(Llama), mesh["tp"], in_sequence)
        torch.manual_seed(dist.get_rank())
        options = {"param_init_fn": init, "sync_module_states": True}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="DTensor random operators")
            own = ZeRO3(model, mesh["dp"], auto_wrap_policy={DecoderLayer}, **options)
        values = full_parameters(own)
        for name, value in values.items():
            assert value.isfinite().all(), name
            assert_same_on_all_ranks(value, f"drawn {name}")
        plain = Llama()
        plain.load_state_dict(values)
        follows(own, plain, mesh, "from meta", steps=1)


def _two(first: Tensor, second: Tensor) -> nn.Module:
    """Two parameters, either of which a test makes a DTensor of its own."""
    return Parts(first=nn.Parameter(first), second=nn.Parameter(second))


@on_ranks(4)
def test_what_cannot_be_sharded_is_refused_before_anything_changes() -> None:
    mesh = grid(2)
    dp, tp = mesh["dp"], mesh["tp"]
    plain = torch.zeros(4)

    def on(mesh: DeviceMesh, *placements: Placement) -> DTensor:
        return DTensor.from_local(torch.zeros(4), mesh, placements, run_check=False)

    swapped = mesh.mesh.flatten()[[0, 3] if dist.get_rank() in (0, 3) else [1, 2]].tolist()
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    assert dist.get_process_group_ranks(crossed) == swapped
    strided = _StridedShard(0, split_factor=2)
    cases: list[tuple[str, nn.Module, Any]] = [
        (r"'second'.*Partial.*redistribute", _two(plain, on(tp, Partial())), dp),
        (r"'first'.*expected Shard\(dim\)", _two(on(tp, strided), plain), dp),
        (r"one mesh.*'first'.*'second'", _two(on(tp, Shard(0)), on(dp, Shard(0))), dp),
        (r"'first'.*process_group=mesh\[\"dp\"\]", _two(on(tp, Shard(0)), plain), None),
        (r"it shares ranks", _two(on(tp, Replicate()), plain), mesh),
        (r"position \([01],\), where rank \d has", _two(on(tp, Shard(0)), plain), crossed),
    ]
    for message, module, group in cases:
        with pytest.raises(ValueError, match=message):
            ZeRO3(module, process_group=group)
        assert all(sharded_param.numel() for sharded_param in module.parameters()), (
            "nothing was changed"
        )
    inner = ZeRO3(_two(on(tp, Shard(0)), plain), process_group=dp)
    with pytest.raises(ValueError, match="one mesh"):
        ZeRO3(nn.Sequential(inner, _two(on(dp, Shard(0)), plain)), process_group=dp)
    model = parallelize(seeded(Llama), tp, True)
    own = ZeRO3(model, process_group=dp, ignored_modules=[model.lm_head])
    forward_backward(own, batches(1, 1)[0][0])
    with pytest.raises(NotImplementedError, match="ignored parameter is a DTensor"):
        own.clip_grad_norm_(1.0)


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


def _odd() -> nn.Module:
    table = nn.Embedding(8, 8)
    module = Parts(
        attention=Parts(head_dim=4, q_proj=nn.Linear(8, 12)),
        up=nn.Linear(8, 5),
        down=nn.Linear(5, 8),
        norm=nn.LayerNorm(8),
        table=table,
        head=nn.Linear(8, 8),
    )
    module.head.weight = table.weight
    return module


@on_ranks(2)
def test_plans_that_do_not_fit_are_refused_before_anything_changes() -> None:
    manager = ParallelManager(tp_size=2)
    tied = {"table": "embedding_colwise", "head": "colwise_gather_output"}
    for message, plan in [
        (r"expected 'auto', 'llama', 'model', a mapping.*got 'lama'", "lama"),
        (r"'no.such.PLAN' cannot be imported: No module named 'no'", "no.such.PLAN"),
        (r"does not fit Parts: it has no module.*self_attn.q_proj", "auto"),
        (r"Parts has no tensor-parallel plan", "model"),
        (r"'up': layerzero has no tensor-parallel style 'colwize'.*'rowwise'", {"up": "colwize"}),
        (r"'upp' matches no module of Parts, whose children are \['attention'", {"upp": "colwise"}),
        (r"'up.weight' names a parameter", {"up.weight": "colwise"}),
        (r"none of \['up'\] splits a module", {"up": "replicate"}),
        (r"up: tp_size=2 does not divide its out_features=5", {"up": "colwise"}),
        (r"down: tp_size=2 does not divide its in_features=5", {"down": RowwiseParallel()}),
        (r"norm: ColwiseParallel splits .* got LayerNorm", {"norm": "colwise_rep"}),
        (r"tp_size=2 does not divide its 3 heads .*=12, head_dim=4", {"attention.*": "colwise"}),
        (r"'table.weight' and 'head.weight' are tied.*dim=1.*dim=0.*styles that split", tied),
    ]:
        module = _odd()
        with pytest.raises(ValueError, match=message):
            manager.parallelize(module, tp_plan=plan)
        changed = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        assert changed == (plan is tied)
    with pytest.raises(TypeError, match="expected a mapping from module names"):
        manager.parallelize(_odd(), tp_plan={"up": ColwiseParallel})
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


def _small() -> nn.Module:
    """Something split, something frozen, a tie, an attribute; and a module of another class."""
    module = Parts(
        embedding=nn.Embedding(8, 8),
        norm=nn.LayerNorm(8).requires_grad_(False),
        mlp=GatedMlp(),
        head=nn.Linear(8, 8, bias=False),
    )
    module.head.weight = module.embedding.weight
    module.mlp.up_proj.weight.is_marked = True
    return module


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
    module = _small()
    nn.init.normal_(module.norm.weight)
    model = manager.parallelize(module, tp_plan=SMALL)
    assert model.head.weight is model.embedding.weight
    assert not model.norm.weight.requires_grad and model.mlp.up_proj.weight.requires_grad
    assert model.mlp.up_proj.weight.is_marked
    torch.manual_seed(0)
    plain = _small()
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
            manager.parallelize(_small(), plan, tp_plan=SMALL),
            manager.parallelize(
                _small(), tp_plan=HERE, auto_wrap_policy={GatedMlp}, reduction=ReductionPolicy()
            ),
        ):
            assert [unit.fqn for unit in units(model)] == ["", "mlp"]
            # The optimizer's weights are float32 even where dp x cp is one rank.
            assert {sharded_param.dtype for sharded_param in model.parameters()} == {torch.float32}
            seen: list[Tensor] = []
            for part in model.modules():
                if hasattr(part, "weight"):
                    part.register_forward_pre_hook(lambda m, _, seen=seen: seen.append(m.weight))
            model(torch.arange(8).view(2, 4)).square().mean().backward()
            assert len(seen) == 6 and {weight.dtype for weight in seen} == {torch.bfloat16}
            assert {isinstance(weight, DTensor) for weight in seen} == {manager.sizes.tp > 1}
            gradients = {p.grad.dtype for p in model.parameters() if p.requires_grad}
            assert gradients == {torch.float32}
            placement = inner_units(model)[0].handles[0].placement
            assert placement.shard_group.size == 1
            assert placement.num_ranks == manager.data_mesh.size()
        module = _small()
        with pytest.raises(TypeError, match=r"\['timeout'\] and a plan"):
            manager.parallelize(module, plan, tp_plan=SMALL, timeout=TIMEOUT)
        with pytest.raises(TypeError, match="expected a ShardingPlan"):
            manager.parallelize(module, {"apply_modules": ["mlp"]})
        with pytest.raises(ValueError, match="mpl"):
            manager.parallelize(module, ShardingPlan(apply_modules=["mpl"]), tp_plan=SMALL)
        assert not any(isinstance(each, DTensor) for each in module.parameters())
