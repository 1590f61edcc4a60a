"""Megatron's distributed checkpoints: the same of a sharded model as of Megatron's own."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load_sharded_metadata,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from layerzero import MixedPrecision, ZeRO3, checkpoint
from layerzero.checkpoint import CheckpointError
from layerzero.integrations.megatron import ZeRO3DataParallel, ZeRO3Optimizer, get_zero3_optimizer
from layerzero.integrations.megatron.several import SeveralOptimizers
from layerzero.integrations.megatron_checkpoint import (
    load_main_parameters,
    load_model_state_dict,
    load_optimizer_state_dict,
    optimizer_sharded_state_dict,
    sharded_state_dict,
)
from layerzero.optim import WholeTensorOptimizer
from tests.harness.ranks import on_ranks, run_ranks
from tests.harness.recording import full_nbytes, recorded_operations
from tests.harness.reference import full_parameters
from tests.harness.saved_models import assert_same_state, values_and_states
from tests.harness.traffic import SentBytes
from tests.integrations.megatron_ranks import (
    batch,
    ddp,
    gpt,
    loss_of,
    megatron_on_cpu,
    train,
    zero3,
)


def _folder(root: str, name: str) -> str:
    """A new folder, for all ranks."""
    folder = Path(root) / name.replace(" ", "-").replace(",", "")
    folder.mkdir(exist_ok=True)
    dist.barrier()
    return str(folder)


def _load_plain(model: nn.Module, folder: str) -> None:
    wanted = {"model": model.sharded_state_dict()}
    model.load_state_dict(dist_checkpointing.load(wanted, folder)["model"])


def _entries(
    model: ZeRO3, optimizer: torch.optim.Optimizer, is_loading: bool = False
) -> dict[str, Any]:
    own = sharded_state_dict(model)
    state = optimizer_sharded_state_dict([model], optimizer, {"model": own}, is_loading)
    return {"model": own, "optimizer": state, "iteration": 7}


def _resume(
    model: ZeRO3, optimizer: torch.optim.Optimizer, folder: str, strategy: Any = None
) -> None:
    wanted = _entries(model, optimizer, is_loading=True)
    loaded = dist_checkpointing.load(wanted, folder, strategy)
    assert loaded["iteration"] == 7
    load_model_state_dict(model, loaded["model"])
    load_optimizer_state_dict([model], optimizer, loaded["optimizer"])


def _everything(model: ZeRO3, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and state of the optimizer, by names among all experts."""
    weights, moments = values_and_states(model, optimizer)
    return {**_tensors(weights), **moments}


def _with_experts(seed: int) -> GPTModel:
    """Four experts in each layer, split over the expert-parallel ranks, unequal ones on each."""
    place, size = (
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    module = gpt(
        seed=seed,
        num_moe_experts=4,
        moe_ffn_hidden_size=8,
        add_bias_linear=False,
        expert_model_parallel_size=size,
        moe_token_dispatcher_type="allgather",
        hetereogenous_dist_checkpoint=True,
    )
    with torch.no_grad():
        for parameter in module.parameters():
            if not getattr(parameter, "allreduce", True):
                parameter += place + 1
    return module


def _chunk(
    module: GPTModel,
    lr: float = 1e-2,
    clip: float = 0.5,
    make_optimizer: Any = None,
    **options: Any,
) -> tuple[ZeRO3DataParallel, ZeRO3Optimizer]:
    settings = DistributedDataParallelConfig(gradient_reduce_div_fusion=False)
    chunk = ZeRO3DataParallel(module.config, settings, module, **options)
    config = OptimizerConfig(optimizer="adam", lr=lr, clip_grad=clip)
    return chunk, get_zero3_optimizer(config, [chunk], make_optimizer=make_optimizer)


def _both(chunk: ZeRO3DataParallel, optimizer: ZeRO3Optimizer, is_loading: bool) -> dict[str, Any]:
    own = chunk.sharded_state_dict()
    return {"model": own, "optimizer": optimizer.sharded_state_dict({"model": own}, is_loading)}


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


Make = Callable[..., GPTModel]
_GATED = dict(gated_linear_unit=True, add_bias_linear=False)
_BY_NAME = dict(untied=True, hetereogenous_dist_checkpoint=True, **_GATED)
_EXPERTS = dict(num_moe_experts=2, moe_ffn_hidden_size=24, **_GATED)
MODELS: dict[str, tuple[int, Make, dict[str, Any]]] = {
    "tied": (1, gpt, dict(zero3_size=1)),
    "untied, gated, layers by name": (
        *(1, functools.partial(gpt, **_BY_NAME)),
        dict(zero3_size=1, outer="replicate"),
    ),
    "experts": (1, functools.partial(gpt, **_EXPERTS), {}),
    "experts of a rank": (2, _with_experts, {}),
}
"""Over how many ranks experts are split, what makes the model, and options of the engine."""


def _num_written(entries: dict[str, Any]) -> int:
    """Elements that all ranks together write."""
    written = torch.tensor(0)
    for entry in entries.values():
        for box in entry.build() if isinstance(entry, ShardedTensorFactory) else ():
            written += box.data.numel() if is_main_replica(box.replica_id) else 0
    dist.all_reduce(written)
    return int(written)


def _described(folder: str) -> dict[str, Any]:
    found = load_sharded_metadata(folder)
    return {
        name: (each.global_shape, each.dtype) if isinstance(each, ShardedTensor) else None
        for name, each in found.items()
    }


@on_ranks(2)
def test_a_checkpoint_of_megatrons_own_data_parallelism_loads_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    root = str(tmp_path)
    for kind, (split, make, options) in MODELS.items():
        with megatron_on_cpu(expert_parallel_size=split):
            theirs = ddp(make(seed=3)).module
            expected = _tensors(theirs.state_dict())
            before, after = _folder(root, kind), _folder(root, f"{kind} ours")
            dist_checkpointing.save({"model": theirs.sharded_state_dict()}, before)
            chunk, _ = _chunk(make(seed=5), **options)
            loaded = dist_checkpointing.load({"model": chunk.sharded_state_dict()}, before)
            load_model_state_dict(chunk.engine, loaded["model"])
            assert_same_state(_tensors(chunk.state_dict_for_save_checkpoint()), expected)
            entries = chunk.sharded_state_dict()
            if split == 1:
                assert _num_written(entries) == sum(p.numel() for p in theirs.parameters())
            dist_checkpointing.save({"model": entries}, after)
            assert _described(after) == _described(before)
            back = ddp(make(seed=4)).module
            _load_plain(back, after)
            assert_same_state(_tensors(back.state_dict()), expected)
            # As of a rank's file in Megatron's `torch` format.
            for way in ("chunk", "optimizer"):
                chunk, optimizer = _chunk(make(seed=5), **options)
                if way == "chunk":
                    chunk.load_state_dict(expected)
                else:
                    optimizer.reload_model_params({"model": expected})
                assert_same_state(_tensors(chunk.state_dict_for_save_checkpoint()), expected)


@on_ranks(2)
def test_building_the_sharded_state_dict_sends_and_gathers_nothing() -> None:
    with megatron_on_cpu():
        model = zero3(gpt())
        optimizer = torch.optim.AdamW(model.parameters())
        resident = full_nbytes(model)
        with SentBytes() as sent, recorded_operations(model) as operations:
            entries = _entries(model, optimizer)
        assert (sent.nbytes, operations) == (0, [])
        assert full_nbytes(model) == resident == dict.fromkeys(resident, 0)
        # And the modules show the shards again.
        assert all(not parameter.is_meta for parameter in model.parameters())
        assert entries["model"].keys() >= dict(model.named_parameters()).keys()
        assert not optimizer.state
        _entries(model, optimizer, is_loading=True)
        assert optimizer.state.keys() == set(model.parameters())
        train(model, optimizer, range(1))

        model.unshard()
        whole = {name: id(parameter) for name, parameter in model.named_parameters()}
        assert model.get_parameter("decoder.final_layernorm.weight").shape == (16,)
        _entries(model, optimizer)
        assert whole == {name: id(parameter) for name, parameter in model.named_parameters()}
        model.reshard()


def _groups(model: ZeRO3) -> list[dict[str, Any]]:
    """As Megatron makes them: weights decay, biases and norms do not."""
    same = dict(lr_mult=1.0, is_expert_parallel=False, is_decoupled_lr=False)
    decayed = [p for p in model.parameters() if len(p.layerzero.shape) > 1]
    others = [p for p in model.parameters() if len(p.layerzero.shape) == 1]
    return [
        {"params": decayed, "weight_decay": 0.01, "wd_mult": 1.0, **same},
        {"params": others, "weight_decay": 0.0, "wd_mult": 0.0, **same},
    ]


def _adamw(model: ZeRO3, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(model), lr=lr)


def _sgd(model: ZeRO3, lr: float = 1e-2) -> torch.optim.Optimizer:
    """Groups that nothing but their order tells apart."""
    sharded_params = list(model.parameters())
    groups = [{"params": sharded_params[:5], "lr": lr / 2}, {"params": sharded_params[5:]}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def _frozen(model: ZeRO3, lr: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW over a part of the model, and over all of it that is trained."""
    for name, sharded_param in model.named_parameters():
        sharded_param.requires_grad_(not name.startswith("decoder.layers.0."))
    return torch.optim.AdamW(_groups(model), lr=lr)


@on_ranks(2)
def test_training_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    """With SGD by Megatron's strategies that save and load in parallel."""
    root = str(tmp_path)
    with megatron_on_cpu():
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for make, steps in ((_adamw, 0), (_adamw, 1), (_sgd, 1), (_frozen, 1)):
            options = dict(hetereogenous_dist_checkpoint=make is _frozen)
            model = zero3(gpt(**options))
            optimizer = make(model)
            train(model, optimizer, range(steps))
            parameters, moments = full_parameters(model), values_and_states(model, optimizer)[1]
            folder = _folder(root, f"{make.__name__} {steps}")
            saving = loading = None
            if make is _sgd:
                saving = get_default_save_sharded_strategy()
                saving = FullyParallelSaveStrategyWrapper(saving, group, True)
            dist_checkpointing.save(_entries(model, optimizer), folder, saving)
            if make is _sgd:
                loading = get_default_load_sharded_strategy(folder)
                loading = FullyParallelLoadStrategyWrapper(loading, group)
            losses = train(model, optimizer, range(steps, steps + 2))
            # The one that went on, with weights gathered; and a new one.
            for seed, resumed in ((0, model), (1, zero3(gpt(seed=1, **options)))):
                again = optimizer if seed == 0 else make(resumed, lr=1.0)
                _resume(resumed, again, folder, loading)
                assert_same_state(full_parameters(resumed), parameters)
                if steps:
                    assert_same_state(values_and_states(resumed, again)[1], moments)
                assert train(resumed, again, range(steps, steps + 2)) == losses


class _Megatrons:
    def __init__(self, seed: int, is_distributed: bool, bf16: bool = False) -> None:
        module = gpt(seed=seed, bf16=bf16)
        self.model = module
        self.wrapped = ddp(
            Float16Module(module.config, module) if bf16 else module,
            use_distributed_optimizer=is_distributed,
        )
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.01,
            clip_grad=0.0,
            bf16=bf16,
            use_distributed_optimizer=is_distributed,
        )
        self.optimizer = get_megatron_optimizer(config, [self.wrapped])
        self._metadata = {"distrib_optim_sharding_type": "fully_reshardable"}

    def entries(self, is_loading: bool = False) -> dict[str, Any]:
        own = self.model.sharded_state_dict(metadata=dict(self._metadata))
        state = self.optimizer.sharded_state_dict(own, is_loading, metadata=self._metadata)
        return {"model": own, "optimizer": state, "iteration": 7}

    def train(self, steps: range) -> list[float]:
        return train(self.wrapped, self.optimizer, steps)


@on_ranks(2)
def test_the_state_of_megatrons_optimizers_loads_and_the_other_way_round(tmp_path: Path) -> None:
    root = str(tmp_path)
    with megatron_on_cpu():
        for is_distributed in (False, True):
            theirs = _Megatrons(3, is_distributed)
            theirs.train(range(2))
            folder = _folder(root, f"distributed {is_distributed}")
            dist_checkpointing.save(theirs.entries(), folder)
            model = zero3(gpt(seed=4))
            optimizer = _adamw(model, lr=1.0)
            _resume(model, optimizer, folder)
            assert train(model, optimizer, range(2, 4)) == theirs.train(range(2, 4))

        folder = _folder(root, "back")
        dist_checkpointing.save(_entries(model, optimizer), folder)
        theirs = _Megatrons(5, is_distributed=False)
        loaded = dist_checkpointing.load(theirs.entries(is_loading=True), folder)
        theirs.model.load_state_dict(loaded["model"])
        theirs.optimizer.load_state_dict(loaded["optimizer"])
        assert theirs.train(range(4, 6)) == train(model, optimizer, range(4, 6))


def _their_values(folder: str, prefix: str) -> dict[str, Tensor]:
    """Full values saved under a prefix, by way of an unsharded model."""
    plain = gpt(seed=9)
    wanted = {
        name: entry
        for name, entry in plain.sharded_state_dict().items()
        if isinstance(entry, ShardedTensor)
    }
    add_prefix_for_sharding(wanted, prefix)
    return dict(dist_checkpointing.load({"values": wanted}, folder)["values"])


def _without_prefix(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("module."): value for name, value in values.items()}


def _narrowed(values: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What 16 bits hold of them."""
    return {name: value.bfloat16().to(dtype) for name, value in values.items()}


@pytest.mark.slow
@on_ranks(2)
def test_sixteen_bit_models_load_with_the_float32_weights_of_their_optimizer(
    tmp_path: Path,
) -> None:
    root = str(tmp_path)
    with megatron_on_cpu():
        for is_distributed in (False, True):
            theirs = _Megatrons(3, is_distributed, bf16=True)
            theirs.train(range(2))
            folder = _folder(root, f"distributed {is_distributed}")
            dist_checkpointing.save(theirs.entries(), folder)
            expected = {
                name: _their_values(folder, f"optimizer.state.{name}.")
                for name in ("param" if is_distributed else "fp32_param", "exp_avg")
            }

            module = Float16Module(theirs.wrapped.config, gpt(seed=4, bf16=True)).float()
            model = zero3(module, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
            optimizer = _adamw(model, lr=1.0)
            _resume(model, optimizer, folder)
            main, average = expected.values()
            assert any(not value.equal(_narrowed(main)[name]) for name, value in main.items())
            assert_same_state(_without_prefix(full_parameters(model)), _narrowed(main))
            assert load_main_parameters(model, folder)
            assert_same_state(_without_prefix(full_parameters(model)), main)
            moments = _without_prefix(values_and_states(model, optimizer)[1])
            assert_same_state({name: moments[f"{name}: exp_avg"] for name in main}, average)
            assert {float(v) for name, v in moments.items() if name.endswith(": step")} == {2.0}
            train(model, optimizer, range(2, 3))

        folder = _folder(root, "back")
        dist_checkpointing.save({"model": sharded_state_dict(model)}, folder)
        assert not load_main_parameters(model, folder)
        narrow = gpt(seed=5, bf16=True).bfloat16()
        _load_plain(narrow, folder)
        expected = _narrowed(_without_prefix(full_parameters(model)), torch.bfloat16)
        assert_same_state(full_parameters(narrow), expected)


def _train_and_save(root: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with megatron_on_cpu():
        model = zero3(gpt())
        optimizer = _adamw(model)
        train(model, optimizer, range(2))
        dist_checkpointing.save(_entries(model, optimizer), _folder(root, "2"))
        values = _everything(model, optimizer)
    with megatron_on_cpu(expert_parallel_size=2):
        chunk, own = _chunk(_with_experts(3), clip=0.0)
        train(chunk, own, range(1))
        dist_checkpointing.save(_both(chunk, own, False), _folder(root, "experts"))
        with pytest.raises(NotImplementedError, match="use outer='zero1'"):
            _chunk(_with_experts(4), zero3_size=1, outer="replicate")
        return values, _everything(chunk.engine, own.optimizer)


def _resize(root: str, expected: dict[str, Tensor]) -> None:
    with megatron_on_cpu():
        for way in (dict(zero3_size=2), dict(zero3_size=2, outer="replicate")):
            assert_same_state(_loaded_values(f"{root}/2", **way), expected)
    for axis in ("tensor_parallel_size", "pipeline_size"):
        with megatron_on_cpu(**{axis: 2}):
            model = zero3(gpt(seed=1))
            optimizer = _adamw(model, lr=1.0)
            _resume(model, optimizer, f"{root}/2")
            plain = gpt(seed=2)
            _load_plain(plain, f"{root}/2")
            assert_same_state(full_parameters(model), full_parameters(plain))
            dist_checkpointing.save(_entries(model, optimizer), _folder(root, axis))


def _loaded_values(folder: str, **way: Any) -> dict[str, Tensor]:
    model = zero3(gpt(seed=1), **way)
    optimizer = _adamw(model, lr=1.0)
    _resume(model, optimizer, folder)
    return _everything(model, optimizer)


def _load_on_one_rank(root: str, expected: dict[str, Tensor], experts: dict[str, Tensor]) -> None:
    with megatron_on_cpu():
        for name in ("2", "tensor_parallel_size", "pipeline_size"):
            assert_same_state(_loaded_values(f"{root}/{name}"), expected)
        chunk, own = _chunk(_with_experts(6), clip=0.0)
        loaded = dist_checkpointing.load(_both(chunk, own, True), f"{root}/experts")
        load_model_state_dict(chunk.engine, loaded["model"])
        own.load_state_dict(loaded["optimizer"])
        assert_same_state(_everything(chunk.engine, own.optimizer), experts)


@pytest.mark.slow
def test_a_checkpoint_loads_at_other_sizes_of_data_tensor_pipeline_and_expert_parallel_groups(
    tmp_path: Path,
) -> None:
    of_ranks = run_ranks(2, _train_and_save, str(tmp_path))
    values, _ = of_ranks[0]
    experts = {name: value for _, each in of_ranks for name, value in each.items()}
    run_ranks(4, _resize, str(tmp_path), values)
    run_ranks(1, _load_on_one_rank, str(tmp_path), values, experts, timeout=120)


class _Odd(nn.Linear):
    """Saves its weight in ways of its own."""

    def __init__(self, way: str) -> None:
        super().__init__(4, 6)
        self.way = way

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        key, replica_id = f"{prefix}weight", (0, 0, dist.get_rank())
        as_entry = functools.partial(ShardedTensor.from_rank_offsets, replica_id=replica_id)

        def build(key: str, weight: Tensor, *_: Any) -> list[ShardedTensor]:
            if self.way == "columns":
                return [as_entry(key + str(n), half) for n, half in enumerate(weight.split(2, 1))]
            return [as_entry(key, weight[1:])]

        if self.way == "transposed":
            return {key: as_entry(key, self.weight.t().contiguous())}
        if self.way == "rows":
            return {key: as_entry(key, self.weight[:3])}
        return {key: ShardedTensorFactory(key, self.weight, build, torch.cat, replica_id)}


@on_ranks(2)
def test_what_cannot_be_saved_or_loaded_is_an_error_that_names_it() -> None:
    with megatron_on_cpu(tensor_parallel_size=2):
        everyone = ZeRO3(gpt(), dist.group.WORLD)
        with pytest.raises(ValueError, match=r"sharded over ranks \[0, 1\], expected .* \[\d\]"):
            sharded_state_dict(everyone)
    with megatron_on_cpu():
        for way, message in (
            ("transposed", "weight: its module saves a new tensor"),
            ("rows", "weight: its module saves a part of weight"),
            ("columns", "weight: its module rearranges weight"),
            ("less", "weight: its module does not save each element once of weight"),
        ):
            with pytest.raises(NotImplementedError, match=message):
                sharded_state_dict(zero3(_Odd(way)))
        model = zero3(gpt())
        with (
            model.summon_full_params(),
            pytest.raises(RuntimeError, match="inside summon_full_params"),
        ):
            sharded_state_dict(model)
        with pytest.raises(RuntimeError, match=r"Missing key.*word_embeddings"):
            load_model_state_dict(model, {})
        optimizer = _adamw(model)
        train(model, optimizer, range(1))
        own = sharded_state_dict(model)
        save = functools.partial(optimizer_sharded_state_dict, [model], optimizer)
        with pytest.raises(CheckpointError, match="is not in the model's sharded state dict"):
            save({})
        foreign = r"has a parameter of shape .* that does not belong to the model"
        with pytest.raises(CheckpointError, match=foreign):
            optimizer_sharded_state_dict([zero3(gpt())], optimizer, own)
        some_model = zero3(gpt())
        holes = r"no state for decoder\.layers\.0\..*non_homogene"
        with pytest.raises(CheckpointError, match=holes):
            _entries(some_model, _frozen(some_model))
        groups = save(own)["param_groups"]
        loaded: dict[str, Any] = {"state": {}, "param_groups": groups}
        with pytest.raises(CheckpointError, match=r"optimizer state .*'exp_avg'.* was not loaded"):
            load_optimizer_state_dict([model], optimizer, loaded)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        loaded["state"] = {number: dict(optimizer.state[p]) for number, p in enumerate(parameters)}
        for number, group in enumerate(groups):
            group["wd_mult"] = 5.0 + number
        with pytest.raises(CheckpointError, match=r"group 0 is not in .* to be one of \[\(5"):
            load_optimizer_state_dict([model], optimizer, loaded)
        state = optimizer.state[next(p for p in parameters if p.numel())]
        state["rows"] = torch.zeros(2, 2)
        with pytest.raises(CheckpointError, match=r"'rows' of .* got shape \(2, 2\)"):
            save(own)
        del state["rows"]
        state["step"] += 1
        with pytest.raises(CheckpointError, match=r"made 2 steps on .* and 1 on|made 1 steps on"):
            save(own)


def _with_several(seed: int, lr: float = 1e-2) -> tuple[ZeRO3DataParallel, ZeRO3Optimizer]:
    def make(groups: list[dict[str, Any]]) -> dict[str, torch.optim.Optimizer]:
        parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in groups:
            for is_matrix, part in parts.items():
                own = [p for p in group["params"] if (p.layerzero.ndim == 2) == is_matrix]
                part.append({**group, "params": own})
        muon = WholeTensorOptimizer(parts[True], torch.optim.Muon, lr=lr)
        return {"matrices": muon, "rest": torch.optim.AdamW(parts[False], lr=lr)}

    return _chunk(gpt(seed=seed), lr, make_optimizer=make)


@on_ranks(2)
def test_several_optimizers_train_and_go_on(tmp_path: Path) -> None:
    with megatron_on_cpu():
        chunk, optimizer = _with_several(0)
        assert isinstance(optimizer.optimizer, SeveralOptimizers)
        train(chunk, optimizer, range(2))
        own = copy.deepcopy(optimizer.state_dict())
        weights = full_parameters(chunk.engine)
        with pytest.raises(NotImplementedError, match=r"Several.*; use layerzero.checkpoint.save"):
            _both(chunk, optimizer, False)
        checkpoint.save(tmp_path, chunk.engine, optimizer.optimizer.optimizers)
        expected = train(chunk, optimizer, range(2, 4))
        again, its_optimizer = _with_several(1, lr=1.0)
        assert isinstance(its_optimizer.optimizer, SeveralOptimizers)
        checkpoint.load(tmp_path, again.engine, its_optimizer.optimizer.optimizers)
        assert {group["lr"] for group in its_optimizer.param_groups} == {1e-2}
        assert train(again, its_optimizer, range(2, 4)) == expected
        checkpoint.load(tmp_path, again.engine)
        assert_same_state(full_parameters(again.engine), weights)
        its_optimizer.load_state_dict(own)
        assert train(again, its_optimizer, range(2, 4)) == expected
        chained = ChainedOptimizer([optimizer, optimizer])
        loss_of(chunk, batch(0)).backward()
        with pytest.raises(NotImplementedError, match="make_optimizer returns a dict"):
            chained.step()
        sgd = torch.optim.SGD
        for make in (lambda g: {"a": sgd(g), "b": sgd(g)}, lambda g: {"a": sgd(g[:1])}):
            with pytest.raises(ValueError, match="are in none or in several"):
                _chunk(gpt(), make_optimizer=make)
    with megatron_on_cpu(tensor_parallel_size=2):
        split = r"needs whole tensors, but .*qkv.weight.* are split over 2 tensor-parallel ranks"
        with pytest.raises(NotImplementedError, match=split):
            _with_several(0)
