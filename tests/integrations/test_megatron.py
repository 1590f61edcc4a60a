"""Megatron's own GPTModel and schedules, on the engine and on Megatron's DistributedDataParallel.

Both train the same model on the same data. Where data-parallel ranks are two, sums have the same
terms in the same order: losses are equal bit for bit. Norms are sums of all elements in another
order.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from layerzero import MixedPrecision
from layerzero.optim.waiting_gradients import WaitingGradient
from tests.harness.checks import of_floats
from tests.harness.internals import ShardState
from tests.harness.ranks import on_ranks, run_ranks
from tests.harness.recording import gathered, observed, recorded_operations, recorded_regions

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallelConfig as _ddp
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from layerzero.integrations.megatron import ZeRO3DataParallel, get_zero3_optimizer
from layerzero.integrations.megatron.arguments import check_optimizer_config
from layerzero.integrations.megatron.data_parallel import MegatronRanks
from tests.integrations import megatron_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--seq", "16", "--width", "32", "--vocab", "64", "--steps", "3", "--layers", "2"]


def _example() -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("train_megatron_gpt")


def _on_megatrons_ranks(arguments: Sequence[str], run: Callable[[Any], Any]) -> Any:
    """Call `run(options)` with Megatron's process groups for these arguments of the example."""
    example = _example()
    options = example.parse(list(arguments))
    with megatron_ranks.joined(lambda: example.join_groups(options)):
        return run(options)


def _train(options: Any, engine: str = "layerzero") -> Any:
    options.engine = engine
    return _example().train(options, torch.device("cpu"))


@contextlib.contextmanager
def _norms_in_float64() -> Iterator[None]:
    """Of both engines: then their order shows in no bit of what is clipped by them."""
    norms_of = torch._foreach_norm

    def ours(tensors: list[Tensor], order: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
        assert dtype == torch.float32
        return norms_of(tensors, order, dtype=torch.float64)

    def theirs(_chunk: int, _flag: Tensor, lists: list[list[Tensor]], _each: bool) -> Any:
        flat = torch.cat([tensor.flatten() for tensor in lists[0]])
        return torch.linalg.vector_norm(flat, dtype=torch.float64)[None], None

    with (
        mock.patch.object(torch, "_foreach_norm", ours),
        mock.patch("megatron.core.optimizer.clip_grads.l2_norm_impl", theirs),
    ):
        yield


@contextlib.contextmanager
def _two_contribute() -> Iterator[None]:
    """Of the data-parallel ranks, in turns: then a gradient is the sum of two terms and of zeros,
    which is the same in every order."""
    example, turns = _example(), itertools.count()
    loss_of = example.ForwardStep.loss

    def loss(step: Any, output: Tensor) -> tuple[Any, ...]:
        groups, turn = example.parallel_state, next(turns) // 2  # Micro-batches.
        place = groups.get_data_parallel_rank() - turn
        mean, *others = loss_of(step, output)
        return mean * (place % groups.get_data_parallel_world_size() < 2), *others

    with mock.patch.object(example.ForwardStep, "loss", loss):
        yield


def _embeddings_have_their_own_rate() -> contextlib.AbstractContextManager[None]:
    """Then parameters in the wrong group give other losses."""

    def decouple(config: Any, _: Any) -> None:
        config.decoupled_lr = 0.02

    return observed(_example(), "optimizer_config", after=decouple)


def _compare(arguments: Sequence[str], ends_at: tuple[float, float] | None = None) -> list[str]:
    """What differs between the two engines on this rank, step by step.

    Args:
        ends_at: last loss and norm on the last rank, as the page says, to half a unit of a digit.
    """

    def train(options: Any, engine: str) -> Any:
        rates = contextlib.nullcontext() if ends_at else _embeddings_have_their_own_rate()
        with _norms_in_float64(), _two_contribute(), rates:
            return _train(options, engine)

    got, expected = _on_megatrons_ranks(
        arguments, lambda options: (train(options, "layerzero"), train(options, "ddp"))
    )
    wrong = []
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        where = f"{' '.join(arguments)}: step {index}:"
        for name in ("succeeded", "num_zeros", "loss", "grad_norm"):
            one, other = getattr(ours, name), getattr(theirs, name)
            if one != (of_floats(other) if name == "grad_norm" and other else other):
                wrong.append(f"{where} {name} {one!r}, expected {other!r}")
    if ends_at is not None and dist.get_rank() == dist.get_world_size() - 1:
        assert (got[-1].loss, got[-1].grad_norm) == pytest.approx(ends_at, abs=5e-3)
    return wrong


def _same_numbers(cases: Sequence[list[str]], others: Sequence[str] = ()) -> None:
    wrong = [*others, *(line for arguments in cases for line in _compare(arguments))]
    assert not wrong, "\n".join(wrong)


@on_ranks(2, timeout=120)
def test_losses_and_norms_are_those_of_megatrons_ddp_on_two_ranks() -> None:
    """The example as docs/reference/megatron.md runs it, then each setting in a small one."""
    wrong = _compare([], ends_at=(5.21, 3.15))
    scale = ["--initial-loss-scale", str(2.0**25)]
    experts = ["--experts", "4", "--expert-parallel", "2"]
    _same_numbers(
        [
            [*SMALL, "--clip", "1", "--schedule", "--recompute"],
            [*SMALL, "--dtype", "bf16", "--per-token-loss", "--context", "2"],
            [*SMALL, "--dtype", "fp16", *scale],
            [*SMALL, "--dtype", "fp16", "--loss-scale", "1024", "--untie", "--optimizer", "sgd"],
            [*SMALL, *experts, "--dtype", "bf16"],
        ],
        wrong,
    )


@pytest.mark.slow
def test_losses_and_norms_are_those_of_megatrons_ddp_with_model_parallel_ranks(
    in_full: bool,
) -> None:
    """`make soak`: axes also with other dtypes, which are compared on two ranks every day."""
    pipeline = ["--pipeline", "2", "--micro-batches", "4"]
    sequence = ["--tensor", "2", "--sequence-parallel"]
    experts = ["--experts", "4", "--expert-parallel", "2"]
    cases = [
        [*SMALL, "--zero3-size", "1", "--outer", "replicate", *sequence],
        [*SMALL, *pipeline, "--virtual", "2", "--layers", "4"],
        [*SMALL, *pipeline, *sequence, "--deallocate"],
        [*SMALL, *experts, "--zero3-size", "2"],
        [*SMALL, *experts, *sequence],
        [*SMALL, *experts, *pipeline, "--untie"],
    ]
    if in_full:
        scale = ["--initial-loss-scale", str(2.0**25)]
        cases += [
            [*SMALL, *sequence, "--dtype", "fp16", *scale],
            [*SMALL, *pipeline, "--untie", "--dtype", "bf16", "--per-token-loss"],
        ]
    run_ranks(4, _same_numbers, cases, timeout=120)


@on_ranks(4, fresh=True)
def test_an_overflow_on_one_rank_is_seen_on_every_axis() -> None:
    def run(options: Any) -> tuple[bool, float]:
        example = _example()
        chunks, optimizer, _ = example.with_layerzero(options, example.transformer_config(options))
        optimizer.zero_grad()
        for sharded_param in chunks[0].parameters():
            sharded_param.grad = torch.ones_like(sharded_param)
        if dist.get_rank() == 3:
            next(p for p in chunks[0].parameters() if p.numel()).grad.fill_(math.inf)
        succeeded, norm, _ = optimizer.step()
        assert norm is None
        return succeeded, float(optimizer.get_loss_scale())

    both = (["--tensor", "2"], ["--pipeline", "2"])
    settings = ["--dtype", "fp16", "--initial-loss-scale", "1024"]
    assert [_on_megatrons_ranks([*SMALL, *settings, *axes], run) for axes in both] == [
        (False, 512.0)
    ] * 2


@on_ranks(1)
def test_shards_of_a_16_bit_model_are_float32() -> None:
    def run(options: Any) -> None:
        example = _example()
        config = example.transformer_config(options)
        model = example.Float16Module(config, example.MakeModel(options, config)())
        frozen = model.module.decoder.final_layernorm.requires_grad_(False)
        router = model.module.decoder.layers[0].mlp.linear_fc1
        router.weight.data = router.weight.data.float()  # as Megatron has some
        chunk = ZeRO3DataParallel(config, _ddp(), model, ignored_modules=[frozen])
        dtypes = {name: p.dtype for name, p in chunk.module.named_parameters()}
        kept = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
        prefix = "module.decoder.final_layernorm."
        assert kept == {prefix + "weight", prefix + "bias"}
        assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
        full = {
            (name, handle.full.dtype)
            for unit in chunk.root.units
            for handle in unit.handles
            for name in handle.fqns
        }
        wide = {name for name, dtype in full if dtype == torch.float32}
        assert wide == {"module.decoder.layers.0.mlp.linear_fc1.weight"}

    _on_megatrons_ranks([*SMALL, "--dtype", "bf16"], run)


class _Surface:
    """Checks of one wrapped chunk on two ranks."""

    def __init__(self, options: Any, **changed: Any) -> None:
        """`changed`: names of the example's module, with other values."""
        self.example = _example()
        self.options = options
        self.config = self.example.transformer_config(options)
        with mock.patch.multiple(self.example, **changed) if changed else contextlib.nullcontext():
            (self.chunk,), self.optimizer, _ = self.example.with_layerzero(options, self.config)

    def run(self, micro_batches: int = 1, evaluate: bool = False) -> None:
        schedule = self.example.get_forward_backward_func()
        self.chunk.zero_grad_buffer()
        with torch.set_grad_enabled(not evaluate):
            schedule(
                forward_step_func=self.example.ForwardStep(self.options, torch.device("cpu")),
                data_iterator=self.example.batches(self.options),
                model=self.chunk,
                num_microbatches=micro_batches,
                seq_length=self.options.seq,
                micro_batch_size=self.options.batch,
                forward_only=evaluate,
            )

    def gradients(self) -> list[torch.Tensor]:
        grads = [p.grad for p in self.chunk.parameters() if p.grad is not None]
        return [grad.clone() for grad in grads if not isinstance(grad, WaitingGradient)]


def _gradients_of(options: Any) -> None:
    surface = _Surface(options)
    chunk = surface.chunk
    assert surface.config.no_sync_func == chunk.no_sync
    surface.run(micro_batches=2)
    expected = surface.gradients()
    assert expected
    for factor in (torch.tensor([0.5]), 0.5):
        chunk.scale_gradients(factor)
    for half, whole in zip(surface.gradients(), expected, strict=True):
        assert torch.equal(half, whole / 4)

    # A loop that tells by `start_grad_sync` alone that the micro-batches are over.
    surface.config.finalize_model_grads_func, finalize = None, surface.example.finalize_model_grads
    inside = surface.config.no_sync_func
    with inside():
        surface.run(micro_batches=2)
        assert not surface.gradients(), "they wait"
    chunk.start_grad_sync(chunk.parameters())
    finalize([chunk], None)
    for ours, whole in zip(surface.gradients(), expected, strict=True):
        assert torch.equal(ours, whole)

    with inside():
        surface.run()
    chunk.zero_grad_buffer()
    chunk.finish_grad_sync(force_all_reduce=True)
    assert not surface.gradients(), "what waited is dropped"

    checked = _Surface(options, ddp_config=lambda _: _ddp(check_for_nan_in_grad=True))
    checked.run()
    if dist.get_rank() == 1:
        next(p for p in checked.chunk.parameters() if p.numel()).data[0] = math.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        checked.run()

    # Groups of a collection, with those left out that Megatron may leave out.
    collection = ProcessGroupCollection.use_mpu_process_groups()
    assert MegatronRanks.of(collection, 1) == MegatronRanks.of(None, 1)
    minimal = ProcessGroupCollection(
        **{name: getattr(collection, name) for name in ("dp", "dp_cp", "tp", "pp", "ep")}
    )
    norms = []
    for given in (collection, minimal):
        surface = _Surface(options, ENGINE={"pg_collection": given})
        assert dist.get_process_group_ranks(surface.chunk.dp_cp_group) == [0, 1]
        surface.run()
        norms.append(surface.optimizer.step())
    assert norms[0] == norms[1] and norms[0][0]
    theirs, ours = map(inspect.signature, (get_megatron_optimizer, get_zero3_optimizer))
    assert list(ours.parameters)[: len(theirs.parameters)] == list(theirs.parameters)
    settings = surface.example.optimizer_config(options)
    get_zero3_optimizer(settings, [surface.chunk], None, False, collection, None)


def _entries(surface: _Surface, is_loading: bool) -> dict[str, Any]:
    model = surface.chunk.sharded_state_dict()
    return {
        "model": model,
        "optimizer": surface.optimizer.sharded_state_dict(model, is_loading=is_loading),
    }


def _state_of(options: Any, folder: Path) -> None:
    surface = _Surface(options)
    chunk, optimizer = surface.chunk, surface.optimizer
    surface.run()
    optimizer.step()
    # Full tensors with the names and shapes of Megatron's.
    (theirs,), _, _ = surface.example.with_ddp(options, surface.config)
    expected = theirs.state_dict_for_save_checkpoint("chunk.")
    full = copy.deepcopy(chunk.state_dict_for_save_checkpoint("chunk."))
    assert list(full) == list(expected)
    for name, value in expected.items():
        assert getattr(full[name], "shape", None) == getattr(value, "shape", None), name
    # They load, with what float32 holds and 16 bits do not.
    before = [sharded_param.detach().clone() for sharded_param in chunk.parameters()]
    fine = {n[6:]: v + 2.0**-20 if torch.is_tensor(v) else v for n, v in full.items()}
    optimizer.reload_model_params()
    for load in (
        lambda: optimizer.reload_model_params({"model": fine, "iteration": 3}),
        lambda: chunk.load_state_dict(fine),
    ):
        for sharded_param in chunk.parameters():
            torch.nn.init.zeros_(sharded_param)
        load()
        for sharded_param, value in zip(chunk.parameters(), before, strict=True):
            assert torch.equal(sharded_param, value + 2.0**-20)
            assert sharded_param.dtype is torch.float32
    # The optimizer's state, of this rank alone.
    saved, scale = optimizer.state_dict(), float(optimizer.get_loss_scale())
    options.initial_loss_scale *= 2
    other = _Surface(options).optimizer
    other.load_state_dict(saved)
    assert float(other.get_loss_scale()) == scale
    for mine, own in zip(other.get_parameters(), optimizer.get_parameters(), strict=True):
        for key, value in optimizer.state[own].items():
            assert torch.equal(other.state[mine][key], value)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, saved)
    with pytest.raises(ValueError, match="belongs to another rank, or to other units"):
        other.load_state_dict(everyone[1 - dist.get_rank()])

    # From Megatron's checkpoint, with options from a file.
    megatron_ranks.let_saves_work()
    options.options = str(folder / f"{dist.get_rank()}.yaml")
    Path(options.options).write_text("zero3_size: 1\ntransformer_layers: [TransformerLayer]\n")
    (folder / "step").mkdir(exist_ok=True)
    dist_checkpointing.save(_entries(surface, is_loading=False), str(folder / "step"))
    second = _Surface(options)
    assert second.chunk.root.placements[0].outer_group is not None, "the file says so"
    loaded = dist_checkpointing.load(_entries(second, is_loading=True), str(folder / "step"))
    second.chunk.load_state_dict(loaded["model"])
    second.optimizer.load_state_dict(loaded["optimizer"])
    assert float(second.optimizer.get_loss_scale()) == scale
    for each in (surface, second):
        each.run()
        each.optimizer.step()
    expected = chunk.state_dict_for_save_checkpoint()
    for name, value in second.chunk.state_dict_for_save_checkpoint().items():
        assert value is None or torch.equal(value, expected[name]), name


@on_ranks(2)
def test_gradients_parameters_and_state_are_handled_as_megatron_asks(tmp_path: Path) -> None:
    _on_megatrons_ranks(SMALL, _gradients_of)
    fp16 = ["--dtype", "fp16", "--initial-loss-scale", "1024"]
    _on_megatrons_ranks([*SMALL, *fp16], functools.partial(_state_of, folder=tmp_path))


def _gathers_of_a_stage(reshards: bool) -> Callable[[Any], list[int]]:
    def run(options: Any) -> list[int]:
        surface = _Surface(options, ENGINE={"reshard_between_micro_batches": reshards})
        counts = []
        for evaluate in (False, False, True):
            with recorded_operations(surface.chunk.engine) as operations:
                surface.run(micro_batches=4, evaluate=evaluate)
            counts.append(len(gathered(operations)))
            states = [unit.state for unit in surface.chunk.root.units]
            assert set(states) == {ShardState.SHARDED}, states
        return counts

    return run


def _both_ways() -> list[list[int]]:
    arguments = [*SMALL, "--pipeline", "2", "--layers", "4"]
    return [_on_megatrons_ranks(arguments, _gathers_of_a_stage(way)) for way in (False, True)]


def test_a_stage_gathers_each_unit_once_a_step_unless_told_otherwise() -> None:
    num_units = 4  # the stage, its embedding or output, and two layers
    for stays, reshards in run_ranks(4, _both_ways):
        assert stays == [num_units] * 3
        assert all(count > 2 * num_units for count in reshards)


def _config(**changes: Any) -> Any:
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_what_is_not_supported_is_refused_with_what_to_use() -> None:
    virtual = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    tensor = {"num_moe_experts": 2, "expert_tensor_parallel_size": 2}
    for config, ddp, message in (
        ({}, {"use_distributed_optimizer": True}, "leave it off"),
        ({}, {"use_megatron_fsdp": True}, "another engine"),
        ({}, {"data_parallel_sharding_strategy": "optim_grads_params"}, "another engine"),
        ({}, {"num_distributed_optimizer_instances": 2}, "zero3_size="),
        ({}, {"overlap_param_gather": True}, "forward_prefetch="),
        ({"gradient_accumulation_fusion": True}, {}, "main_grad"),
        ({"cuda_graph_impl": "local"}, {}, "set 'none'"),
        (tensor, {}, "set it to tensor_model_parallel_size=1"),
        ({"calculate_per_token_loss": True}, {"average_in_collective": True}, "leave average"),
        (virtual, {}, "overlap_p2p_comm=True"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            ZeRO3DataParallel(_config(**config), _ddp(**ddp), torch.nn.Linear(2, 2))
    for settings, message in (
        ({"use_distributed_optimizer": True}, "leave it off"),
        ({"optimizer_cpu_offload": True}, "OffloadPolicy"),
        ({"optimizer": "muon"}, "make_optimizer="),
    ):
        with pytest.raises(ValueError, match=message):
            check_optimizer_config(OptimizerConfig(lr=0.1, **settings), has_own_optimizer=False)


@on_ranks(2)
def test_optional_modules_are_named_and_combinations_refused_before_anything_is_sent() -> None:
    def chunk_of(options: Any, **arguments: Any) -> ZeRO3DataParallel:
        example = _example()
        config = example.transformer_config(options)
        model = example.MakeModel(options, config)()
        model = model if options.dtype == "fp32" else example.Float16Module(config, model)
        return ZeRO3DataParallel(config, _ddp(), model, **arguments)

    def run(options: Any) -> None:
        example = _example()
        collection = ProcessGroupCollection.use_mpu_process_groups()
        del collection.tp, collection.pp
        with pytest.raises(ValueError, match=r"\['pp', 'tp'\] are missing"):
            MegatronRanks.of(collection, 1)
        with pytest.raises(NotImplementedError, match="freeze or shard them"):
            packed = torch.nn.Linear(2, 2)
            ZeRO3DataParallel(_config(), _ddp(), packed, ignored_modules=[packed])
        packed.weight.allreduce = False
        with pytest.raises(NotImplementedError, match=r"^weight: .*moe_grouped_gemm=False"):
            ZeRO3DataParallel(_config(), _ddp(), packed)
        packed.local_experts = torch.nn.ModuleList()
        collection = ProcessGroupCollection.use_mpu_process_groups()
        del collection.expt_dp
        with pytest.raises(ValueError, match="'ep' and 'expt_dp' are needed"):
            ZeRO3DataParallel(_config(), _ddp(), packed, pg_collection=collection)
        chunk, config = chunk_of(options), example.transformer_config(options)
        config.virtual_pipeline_model_parallel_size = 2
        with pytest.raises(ValueError, match="pass the same number to both"):
            example.with_layerzero(options, config)
        chunk.config.virtual_pipeline_model_parallel_size = 2
        with pytest.raises(ValueError, match=r"got 1 chunks of the model.*interleaved schedule"):
            get_zero3_optimizer(example.optimizer_config(options), [chunk])
        options.dtype = "bf16"
        with pytest.raises(ValueError, match="expected one 16-bit dtype"):
            chunk_of(options, mixed_precision=MixedPrecision(param_dtype=torch.float16))
        with recorded_regions() as found:
            optional = {"optional_modules": ["decoder.layers.{0-1}"]}
            chunk_of(options, optional_mean="participants", **optional)
        layers = {f"module.decoder.layers.{i}": f"module.decoder.layers.{i}" for i in (0, 1)}
        assert found == [(layers, "participants")]

    def in_stages(options: Any) -> None:
        with pytest.raises(NotImplementedError, match="optional_modules with 2 pipeline st"):
            chunk_of(options, optional_modules=["decoder.layers.{0-1}"])

    _on_megatrons_ranks(SMALL, run)
    _on_megatrons_ranks([*SMALL, "--pipeline", "2"], in_stages)
