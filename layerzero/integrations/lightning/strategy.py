"""ZeRO3Strategy: Lightning's Trainer on layerzero. See docs/reference/lightning.md.

Note [Weights wait for the model]
    Lightning restores a checkpoint before it sets up the strategy, because callbacks need it that
    early (finetuning-scheduler rebuilds the optimizer's groups in `on_fit_start`). The model is not
    sharded yet then, and may be on meta, so weights are kept until it is sharded. Optimizer state
    is loaded when Lightning restores it, after `on_fit_start`.

Note [One wrapper for the life of a model]
    Sharding changes a LightningModule in place and permanently. When the module is used again
    (`test` after `fit`, another Trainer), its wrapper is found in its `__dict__`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    CheckpointIO,
    ClusterEnvironment,
    DeepSpeedPrecision,
    FSDPPrecision,
    MixedPrecision,
    Precision,
    TorchCheckpointIO,
    XLAPrecision,
)
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric

from layerzero import GradScaler, ShardingPlan, ZeRO3, shard_with_plan
from layerzero.checkpoint import (
    CheckpointError,
    get_model_state_dict,
    get_optimizer_state_dict,
    load,
    save,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from layerzero.checkpoint.adapters import Names
from layerzero.integrations.engine import WrapPolicy, get_unit, optional_by_name
from layerzero.integrations.lightning.checkpoints import (
    FOLDER,
    map_file,
    named,
    numbered,
    open_folder,
)
from layerzero.integrations.lightning.parallel import MeshStrategy, Size
from layerzero.integrations.lightning.patches import patch_lightning
from layerzero.integrations.shared import by_number, on_first_rank

_WRAPPER = "_layerzero_lightning_wrapper"
_WRITTEN_BY_ENGINE = ("state_dict", "optimizer_states")
StateDictType = Literal["full", "sharded"]
_DEVICE_IS_THE_TRAINERS = (
    "ZeRO3Strategy: device cannot be chosen here; use accelerator and devices of the Trainer"
)


class ZeRO3Strategy(MeshStrategy):
    """Shards the LightningModule with `ZeRO3`. Also `Trainer(strategy="layerzero")`.

    Processes, process group and small collectives come from Lightning's DDPStrategy, but not its
    DDP wrapper. `device_mesh`, also available in the module's `configure_model`, has the axes of
    Lightning's ModelParallelStrategy, "data_parallel" and "tensor_parallel".

    Args:
        auto_wrap_policy: as for `ZeRO3`; names are those of the LightningModule.
        plan: replaces `auto_wrap_policy`: a `ShardingPlan`, a mapping of its fields, or the path of
            a YAML file.
        state_dict_type: "full": checkpoints are ordinary Lightning files, gathered on rank 0.
            "sharded": checkpoints are folders, which every rank writes its shards to.
        data_parallel_size, tensor_parallel_size: number of ranks along each axis of `device_mesh`.
            "auto": the world divided by the other; both "auto": one tensor-parallel group for each
            node.
        process_group: as for `ZeRO3`, in place of sizes: this rank's data-parallel ranks, from your
            own mesh.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend: as for Lightning's own strategies.
        timeout: for the process group and for every collective of the engine. None: Lightning's
            default for the former, the engine's for the latter.
        **zero3_options: arguments of `ZeRO3`. `sync_module_states` defaults to True, and `layout`
            to "rows", with which parameters keep their `ndim`; `optional_modules` may list names,
            or patterns as in plans.

    Raises:
        ValueError, TypeError: a bad argument, or arguments that exclude each other.
    """

    strategy_name = "layerzero"

    plan: ShardingPlan | None
    """How the model is sharded, if not by `auto_wrap_policy`."""
    before_restore: Callable[[], None] | None
    """Called when a run resumes from a checkpoint, before callbacks restore their state."""
    before_sharding: Callable[[nn.Module], None] | None
    """Called with the module after `configure_model`, before it is sharded."""

    def __init__(
        self,
        auto_wrap_policy: WrapPolicy = None,
        plan: ShardingPlan | Mapping[str, Any] | str | Path | None = None,
        state_dict_type: StateDictType = "full",
        *,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = 1,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **zero3_options: Any,
    ) -> None:
        _check_arguments(auto_wrap_policy, plan, state_dict_type, zero3_options)
        super().__init__(
            data_parallel_size,
            tensor_parallel_size,
            process_group,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout or default_pg_timeout,
        )
        self.auto_wrap_policy = auto_wrap_policy
        self.plan = _read_plan(plan)
        self.before_restore = None
        self.before_sharding = None
        self._state_dict_type = state_dict_type
        # As under DDP: the first rank's values, and a module's own rules by `ndim`.
        defaults = {"sync_module_states": True, "layout": "rows"}
        self._zero3_options = {**defaults, **zero3_options, "timeout": timeout}
        self._is_set_up = False
        self._pending: tuple[Mapping[str, Any], bool] | None = None

    def use_plan(self, plan: ShardingPlan, giver: str) -> None:
        """Shard by this plan; where it is silent, the strategy's own options apply. `giver`: where
        the plan comes from, for the error if the strategy has a plan or policy already."""
        given = [name for name in ("plan", "auto_wrap_policy") if getattr(self, name) is not None]
        if given and self.plan != plan:  # They are equal if the same model is fitted again.
            raise ValueError(
                f"ZeRO3Strategy: {given[0]} is given, but {giver} has a plan; set one of them only"
            )
        self.plan = plan

    @MeshStrategy.precision_plugin.setter  # type: ignore[untyped-decorator]
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else _adapted(plugin)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """A context in which modules are made in host memory; with `empty_init`, on meta."""
        where: AbstractContextManager[Any] = torch.device("meta") if empty_init else nullcontext()
        with where, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, load pending weights, then make optimizers. Collective."""
        self.accelerator.setup(trainer)
        module = self.lightning_module
        _check_run(trainer, module, self._state_dict_type)
        self.model = self._setup_model(module)
        self._is_set_up = True
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.load_model_state_dict(*pending)
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        wrapped = model.__dict__.get(_WRAPPER)
        if wrapped is None:
            if self._layer_sync:
                model = self._layer_sync.apply(model)
            wrapped = self._shard(self.precision_plugin.convert_module(model))
            model.__dict__[_WRAPPER] = wrapped
        for module in model.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)
        # Sets `self.device` of the module. Moving the module itself would undo offloading.
        _update_properties(model, device=self.root_device)
        return wrapped

    def _shard(self, model: nn.Module) -> ZeRO3:
        if get_unit(model) is not None:
            raise RuntimeError(
                f"ZeRO3Strategy: this {type(model).__name__} is wrapped already; leave wrapping it "
                "to the strategy, and wrap only modules inside it yourself"
            )
        if self.before_sharding is not None:
            self.before_sharding(model)
        defaults = {} if self.plan is None else self.plan.defaults
        options = {**self._zero3_options, "device": self.root_device, **defaults}
        self.prepare_mesh(model, options["sync_module_states"])
        group = self.data_parallel_group
        optional = options.pop("optional_modules", ())
        if self.plan is None:
            return ZeRO3(
                model,
                group,
                auto_wrap_policy=self.auto_wrap_policy,
                optional_modules=optional_by_name(model, optional),
                **options,
            )
        if "device" in self.plan.defaults:
            raise ValueError(_DEVICE_IS_THE_TRAINERS)
        plan = replace(self.plan, defaults=options, optional=self.plan.optional or optional)
        return shard_with_plan(model, plan, group)

    def model_to_device(self) -> None:
        """Does nothing: `ZeRO3` moves the model, unit by unit."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step` as a forward of the root unit.

        With manual optimization, backward and the optimizer run inside the step, so it is called
        directly: each call of the module, or of one inside, is then a forward of its own.
        """
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """`no_sync` of the model; Lightning enters it for all micro-batches but the last."""
        assert isinstance(self.model, ZeRO3), "setup has sharded it"
        return self.model.no_sync()

    def teardown(self) -> None:
        """Tear down; the model stays sharded (Note [One wrapper for the life of a model])."""
        self._is_set_up, self._pending = False, None
        for each in (self.cluster_environment, self.precision_plugin, self.accelerator):
            each.teardown()
        self.checkpoint_io.teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full tensors on rank 0 ({} on others), or this rank's shards. Collective."""
        if self._state_dict_type == "sharded":
            return get_model_state_dict(self._sharded)
        return get_model_state_dict(self._sharded, full=True, cpu_offload=True, rank0_only=True)

    @property
    def _sharded(self) -> ZeRO3:
        """The wrapper of the module, which another Trainer may have made."""
        model = self.model
        assert model is not None, "connect() comes first"
        wrapped = model.__dict__.get(_WRAPPER, model)
        if not isinstance(wrapped, ZeRO3):
            raise RuntimeError(
                "ZeRO3Strategy: the model is not sharded yet; save it after fit or test has begun"
            )
        return wrapped

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Full state on rank 0, as an unsharded optimizer's `state_dict`. Collective.

        {} on other ranks, and for sharded checkpoints, which read the optimizer directly.
        """
        if self._state_dict_type == "sharded":
            return {}
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state = get_optimizer_state_dict(
            self.model, optimizer, full=True, cpu_offload=True, rank0_only=True
        )
        return numbered(state) if state else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a file (rank 0), or a folder (all ranks). Collective.

        Raises:
            RuntimeError, CheckpointError: on all ranks, even if only one failed.
        """
        filepath = self.broadcast(filepath)
        if self._state_dict_type == "sharded":
            if storage_options is not None:
                raise TypeError("ZeRO3Strategy: sharded checkpoints take no storage_options")
            self._save_folder(checkpoint, filepath)
            return
        write = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        on_first_rank(write, f"{filepath}: rank 0 could not write it")

    def _save_folder(self, checkpoint: dict[str, Any], filepath: str | Path) -> None:
        if "://" in str(filepath):
            raise ValueError(
                f"{filepath}: sharded checkpoints are folders, no URL; use state_dict_type='full'"
            )
        path, model = Path(filepath), self._sharded
        own_names = get_model_state_dict(model).keys()
        if checkpoint["state_dict"].keys() != own_names:
            raise CheckpointError(
                f"{path}: on_save_checkpoint changed the names in 'state_dict', which sharded "
                "checkpoints take from the model itself; use state_dict_type='full'"
            )
        optimizer = by_number(self.optimizers) if "optimizer_states" in checkpoint else None
        rest = {name: each for name, each in checkpoint.items() if name not in _WRITTEN_BY_ENGINE}
        rest["has_optimizer"] = "optimizer_states" in checkpoint
        step = int(checkpoint["global_step"])
        save(path, model, optimizer, step=step, extra=rest, keep=1)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file, or a folder without its tensors. Collective; every rank gets the result.

        A local file is mmapped, so that ranks on one machine share its pages, and read only those
        of their own shards.
        """
        path = self.broadcast(checkpoint_path)
        if Path(path).is_dir():
            return open_folder(Path(path))
        if Path(path).is_file() and type(self.checkpoint_io) is TorchCheckpointIO:
            return map_file(Path(path), weights_only)
        return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights, or keep them until the model is sharded. Collective if it is sharded.

        See Note [Weights wait for the model].
        """
        if not self._is_set_up:
            if self.before_restore is not None:
                self.before_restore()
            names = checkpoint.keys() & {"state_dict", FOLDER}
            kept = {name: checkpoint[name] for name in names}
            self._pending = kept, strict
        elif FOLDER in checkpoint:
            load(checkpoint[FOLDER], self.model, strict=strict)
        else:
            set_model_state_dict(self.model, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer state from a checkpoint of this or another strategy. Collective.

        Raises:
            ValueError, CheckpointError: it is the state of another optimizer.
        """
        if FOLDER in checkpoint:
            # This loads the weights again: `load` reads and verifies a checkpoint as a whole.
            strict = self.lightning_module.strict_loading
            load(checkpoint[FOLDER], self.model, by_number(self.optimizers), strict=strict)
            return
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint has the state of {len(states)} optimizers, configure_optimizers "
                f"returned {len(self.optimizers)}; return those of the saved run"
            )
        names = Names(self.model)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            set_optimizer_state_dict(self.model, optimizer, named(state, optimizer, names))


def _check_arguments(
    auto_wrap_policy: WrapPolicy, plan: Any, state_dict_type: str, options: Mapping[str, Any]
) -> None:
    if state_dict_type not in get_args(StateDictType):
        raise ValueError(
            f"state_dict_type: expected one of {list(get_args(StateDictType))}, got "
            f"{state_dict_type!r}"
        )
    if plan is not None and (auto_wrap_policy is not None or options):
        given = ["auto_wrap_policy"] if auto_wrap_policy is not None else list(options)
        raise ValueError(f"ZeRO3Strategy: plan and {given[0]} are both given; set it in the plan")
    if "device" in options:
        raise ValueError(_DEVICE_IS_THE_TRAINERS)


def _read_plan(plan: ShardingPlan | Mapping[str, Any] | str | Path | None) -> ShardingPlan | None:
    if plan is None or isinstance(plan, ShardingPlan):
        return plan
    return (
        ShardingPlan.from_dict(plan) if isinstance(plan, Mapping) else ShardingPlan.from_yaml(plan)
    )


def _adapted(plugin: Precision) -> Precision:
    """The precision plugin, with a grad scaler whose overflow check spans all ranks."""
    if isinstance(plugin, (FSDPPrecision, DeepSpeedPrecision, XLAPrecision, BitsandbytesPrecision)):
        raise ValueError(
            f"ZeRO3Strategy: {type(plugin).__name__} is for another engine; use Trainer(precision=)"
        )
    scaler = getattr(plugin, "scaler", None)
    if isinstance(plugin, MixedPrecision) and type(scaler) is torch.amp.GradScaler:
        plugin.scaler = GradScaler(plugin.device, enabled=scaler.is_enabled())
        plugin.scaler.load_state_dict(scaler.state_dict())
    elif scaler is not None and not isinstance(scaler, GradScaler):
        raise ValueError(
            f"ZeRO3Strategy: {type(scaler).__name__}: ranks would differ: use layerzero.GradScaler"
        )
    return plugin


def _check_run(trainer: Trainer, module: LightningModule, state_dict_type: StateDictType) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__}: average the weights of saved checkpoints instead"
            )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise ValueError(
            "ZeRO3Strategy: torch.compile compiled the whole module: call compile() of its layers"
        )
    if state_dict_type == "sharded":
        checkpoint_io = trainer.strategy.checkpoint_io
        if type(checkpoint_io) is not TorchCheckpointIO:
            raise ValueError(
                f"ZeRO3Strategy: {type(checkpoint_io).__name__} cannot write sharded checkpoints, "
                "which every rank writes; use state_dict_type='full'"
            )


patch_lightning()
StrategyRegistry.register(
    ZeRO3Strategy.strategy_name, ZeRO3Strategy, description="ZeRO-3 on flat parameters (layerzero)"
)
