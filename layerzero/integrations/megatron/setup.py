"""setup_model_and_optimizer: builds and shards this rank's chunks, and makes their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from torch import nn

from layerzero.integrations.megatron.data_parallel import ZeRO3DataParallel
from layerzero.integrations.megatron.optimizer import (
    MakeOptimizer,
    ZeRO3Optimizer,
    get_zero3_optimizer,
)
from layerzero.integrations.megatron.options import for_module, read_options
from layerzero.integrations.megatron.ranks import MegatronRanks


def setup_model_and_optimizer(
    model_provider: Callable[..., nn.Module],
    config: Any,
    optimizer_config: Any,
    *,
    ddp_config: Any = None,
    scheduler: Mapping[str, Any] | None = None,
    options: str | Path | Mapping[str, Any] | None = None,
    config_overrides: Any = None,
    make_optimizer: MakeOptimizer | None = None,
    pg_collection: Any = None,
    **zero3_options: Any,
) -> tuple[list[ZeRO3DataParallel], ZeRO3Optimizer, OptimizerParamScheduler | None]:
    """Build the chunks of this rank, shard them and make their optimizer, ready for a schedule.

    Collective over all ranks. Sets the functions on `config` that Megatron's schedules call:
    `no_sync_func`, `grad_scale_func` and `finalize_model_grads_func`.

    Args:
        model_provider: called with `pre_process`, `post_process` and `vp_stage` for each chunk.
        config: the TransformerConfig object that the model provider uses.
        optimizer_config: Megatron's OptimizerConfig.
        ddp_config: DistributedDataParallelConfig; None: its defaults.
        scheduler: arguments of Megatron's OptimizerParamScheduler. With a scheduler, `wd_mult` of
            each group decides its weight decay (none for biases and norms). Without one, Megatron
            decays all parameters, and so does this.
        options: a YAML file or mapping with options of the engine (docs/reference/megatron.md).
        config_overrides, make_optimizer: as for `get_zero3_optimizer`.
        pg_collection, **zero3_options: as for `ZeRO3DataParallel`.

    Returns:
        The chunks (one without virtual stages), the optimizer, the scheduler or None.

    Raises:
        ValueError, TypeError, NotImplementedError: something is not supported; says what to use.
    """
    read = {} if options is None else read_options(options)
    if twice := sorted(read.keys() & zero3_options.keys()):
        raise ValueError(f"{twice} are both in options and arguments; set each in one place only")
    if ddp_config is None:
        ddp_config = DistributedDataParallelConfig()
    ranks = MegatronRanks.of(pg_collection, getattr(config, "context_parallel_size", 1))
    num_virtual = config.virtual_pipeline_model_parallel_size
    global_virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if pg_collection is None and num_virtual != global_virtual:
        raise ValueError(
            f"TransformerConfig.virtual_pipeline_model_parallel_size={num_virtual}, but "
            f"initialize_model_parallel was called with {global_virtual}: the schedule would use "
            "one number and the model the other; pass the same number to both"
        )
    if torch.accelerator.is_available():
        zero3_options.setdefault("device", torch.accelerator.current_device_index())
    chunks = []
    for stage in range(num_virtual or 1):
        vp_stage = None if num_virtual is None else stage
        module = _make_chunk(model_provider, config, ranks, vp_stage)
        own = {**for_module(read, module), **zero3_options}
        chunk = ZeRO3DataParallel(config, ddp_config, module, pg_collection=pg_collection, **own)
        chunks.append(chunk)
    optimizer = get_zero3_optimizer(
        optimizer_config, chunks, config_overrides, make_optimizer=make_optimizer
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if scheduler is None:
        return chunks, optimizer, None
    return chunks, optimizer, OptimizerParamScheduler(optimizer, **scheduler)


def _make_chunk(
    model_provider: Callable[..., nn.Module],
    config: Any,
    ranks: MegatronRanks,
    vp_stage: int | None,
) -> nn.Module:
    num_virtual = config.virtual_pipeline_model_parallel_size or 1
    is_first, is_last = vp_stage in (None, 0), vp_stage in (None, num_virtual - 1)
    stage, num_stages = ranks.pipeline.rank(), ranks.pipeline.size()
    module = model_provider(
        pre_process=is_first and stage == 0,
        post_process=is_last and stage == num_stages - 1,
        vp_stage=vp_stage,
    )
    for parameter in module.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return Float16Module(config, module) if config.fp16 or config.bf16 else module
