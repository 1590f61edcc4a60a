"""Checks and converts the arguments of ZeRO3Strategy, and settings of the run it is used in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    MixedPrecision,
    Precision,
    TorchCheckpointIO,
    XLAPrecision,
)

from layerzero import GradScaler, ShardingPlan
from layerzero.integrations.engine import WrapPolicy

StateDictType = Literal["full", "sharded"]
DEVICE_IS_THE_TRAINERS = (
    "ZeRO3Strategy: device cannot be chosen here; use accelerator and devices of the Trainer"
)


def check_arguments(
    auto_wrap_policy: WrapPolicy, plan: Any, state_dict_type: str, options: Mapping[str, Any]
) -> None:
    if state_dict_type not in get_args(StateDictType):
        raise ValueError(
            f"state_dict_type: expected one of {list(get_args(StateDictType))}, got "
            f"{state_dict_type!r}"
        )
    if plan is not None and (auto_wrap_policy is not None or options):
        given = ["auto_wrap_policy"] if auto_wrap_policy is not None else list(options)
        raise ValueError(
            f"ZeRO3Strategy: plan and {given[0]} are both given; set it in the plan, as "
            "apply_modules, a field or in defaults"
        )
    if "device" in options:
        raise ValueError(DEVICE_IS_THE_TRAINERS)


def read_plan(plan: ShardingPlan | Mapping[str, Any] | str | Path | None) -> ShardingPlan | None:
    if plan is None or isinstance(plan, ShardingPlan):
        return plan
    return (
        ShardingPlan.from_dict(plan) if isinstance(plan, Mapping) else ShardingPlan.from_yaml(plan)
    )


def adapted(plugin: Precision) -> Precision:
    """The precision plugin, with a grad scaler whose overflow check spans all ranks.

    Raises:
        ValueError: it is for another engine, makes parameters that cannot be flattened, or has an
            unknown scaler.
    """
    if isinstance(plugin, (FSDPPrecision, DeepSpeedPrecision, XLAPrecision, BitsandbytesPrecision)):
        raise ValueError(
            f"ZeRO3Strategy: {type(plugin).__name__} is for another engine; use Trainer("
            "precision=...) with '32-true', 'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or "
            "'64-true'"
        )
    scaler = getattr(plugin, "scaler", None)
    if isinstance(plugin, MixedPrecision) and type(scaler) is torch.amp.GradScaler:
        plugin.scaler = GradScaler(plugin.device, enabled=scaler.is_enabled())
        plugin.scaler.load_state_dict(scaler.state_dict())
    elif scaler is not None and not isinstance(scaler, GradScaler):
        raise ValueError(
            f"ZeRO3Strategy: with a {type(scaler).__name__} ranks would not agree on an overflow; "
            "use layerzero.GradScaler"
        )
    return plugin


def check_run(trainer: Trainer, module: LightningModule, state_dict_type: StateDictType) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"ZeRO3Strategy: {type(callback).__name__} copies the whole module, but a sharded "
                "module cannot be copied; average the weights of saved checkpoints instead"
            )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise ValueError(
            "ZeRO3Strategy: the whole LightningModule was compiled by torch.compile; call "
            "compile() of its layers in configure_model instead, or trainer.model.compile() in "
            "on_fit_start"
        )
    if state_dict_type == "sharded":
        checkpoint_io = trainer.strategy.checkpoint_io
        if type(checkpoint_io) is not TorchCheckpointIO:
            raise ValueError(
                f"ZeRO3Strategy: {type(checkpoint_io).__name__} cannot write sharded checkpoints, "
                "which every rank writes; use state_dict_type='full'"
            )
