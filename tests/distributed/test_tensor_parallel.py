"""Tensor parallelism by torch's `parallelize_module`, sharded by ZeRO3: trains as one process."""

import itertools
import math
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from layerzero import GradScaler, ZeRO3, global_norm, units
from tests.harness.checks import (
    assert_bitwise,
    assert_close_in_float64,
    assert_same_on_all_ranks,
    assert_same_parameters,
)
from tests.harness.compare import assert_follows
from tests.harness.decoder import VOCAB, Attention, Decoder, DecoderLayer, GatedMlp
from tests.harness.internals import inner_units
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
    mesh: DeviceMesh,
    in_sequence: bool = True,
    build: Callable[[], Llama] = Llama,
    **options: Any,
) -> ZeRO3:
    model = parallelize(seeded(build), mesh["tp"], in_sequence)
    options.setdefault("auto_wrap_policy", {DecoderLayer})
    return ZeRO3(model, process_group=mesh["dp"], timeout=timedelta(seconds=25), **options)


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


class _OnGrid(nn.Module):
    """Parameters on a mesh of two axes, in unequal parts: 2, 1 or no axis cuts them."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        placements = {
            "weight": ((5, 3), (Shard(0), Shard(1))),
            "rows": ((5, 3), (Shard(0), Shard(0))),
            "gain": ((5,), (Replicate(), Shard(0))),
            "bias": ((5,), (Replicate(), Replicate())),
            "single": ((1,), (Shard(0), Replicate())),  # nothing on two of the ranks
        }
        for name, (shape, placed) in placements.items():
            value = torch.randn(shape, generator=generator)
            if mesh is not None:
                value = distribute_tensor(value, mesh, placed)
            self.register_parameter(name, nn.Parameter(value))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Replicate()] * 2, run_check=False)
        out = x @ (self.weight * self.rows).T * self.gain * self.single + self.bias
        out = out.full_tensor() if isinstance(out, DTensor) else out
        return (out * self.scale).square().mean()


@on_ranks(4, in_float64=True)
def test_a_mesh_of_two_axes_works() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))
    plain = _OnGrid()
    model = ZeRO3(_OnGrid(mesh["a", "b"]), process_group=mesh["dp"])
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


class _Two(nn.Module):
    """Two parameters, either of which a test makes a DTensor of its own."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first = nn.Parameter(first)
        self.second = nn.Parameter(second)


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
        (r"'second'.*Partial.*redistribute", _Two(plain, on(tp, Partial())), dp),
        (r"'first'.*expected Shard\(dim\)", _Two(on(tp, strided), plain), dp),
        (r"one mesh.*'first'.*'second'", _Two(on(tp, Shard(0)), on(dp, Shard(0))), dp),
        (r"'first'.*process_group=mesh\[\"dp\"\]", _Two(on(tp, Shard(0)), plain), None),
        (r"it shares ranks", _Two(on(tp, Replicate()), plain), mesh),
        (r"position \([01],\), where rank \d has", _Two(on(tp, Shard(0)), plain), crossed),
    ]
    for message, module, group in cases:
        with pytest.raises(ValueError, match=message):
            ZeRO3(module, process_group=group)
        assert all(sharded_param.numel() for sharded_param in module.parameters()), (
            "nothing was changed"
        )
    inner = ZeRO3(_Two(on(tp, Shard(0)), plain), process_group=dp)
    with pytest.raises(ValueError, match="one mesh"):
        ZeRO3(nn.Sequential(inner, _Two(on(dp, Shard(0)), plain)), process_group=dp)
    model = parallelize(seeded(Llama), tp, True)
    own = ZeRO3(model, process_group=dp, ignored_modules=[model.lm_head])
    forward_backward(own, batches(1, 1)[0][0])
    with pytest.raises(NotImplementedError, match="ignored parameter is a DTensor"):
        own.clip_grad_norm_(1.0)
