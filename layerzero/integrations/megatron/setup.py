"""setup_model_and_optimizer: builds and shards this rank's chunks, and makes their optimizer.

Options of `ZeRO3` may come from a YAML file or a mapping:

    zero3_size: 8
    transformer_layers: [TransformerLayer]     # classes, or patterns of names: decoder.layers.{*}
    forward_prefetch: 2
    backward_prefetch: backward_pre
    limit_all_gathers: 4GB
    param_dtype: bf16
    ignored_modules: [vision_model]
    optional_modules: [audio_model]

Keys are arguments of `ZeRO3` and, instead of `mixed_precision`, its fields. Options that Megatron
decides (groups, device, gradient reduction and others) raise ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from torch import nn

from layerzero.integrations.engine import (
    MODULE_OPTIONS,
    ZERO3_OPTIONS,
    clean_name,
    engine_arguments,
    has_forward,
    load_yaml,
    near_matches,
    parse_pattern,
    read_patterns,
    read_plan_options,
    warn_once,
)
from layerzero.integrations.megatron.data_parallel import MegatronRanks, ZeRO3DataParallel, inside
from layerzero.integrations.megatron.optimizer import (
    MakeOptimizer,
    ZeRO3Optimizer,
    get_zero3_optimizer,
)

_LAYERS = "transformer_layers"
_NAMES = (_LAYERS, "ignored_modules", "ignored_parameters", "optional_modules")
"""Keys whose values are names, patterns or classes."""
_REFUSED = {
    "process_group": "it is Megatron's data-parallel group; use zero3_size for shard groups in it",
    "auto_wrap_policy": f"list the modules that become units in {_LAYERS}",
    "gradient_reduction": "it follows calculate_per_token_loss of the TransformerConfig",
    "device": "Megatron places the modules",
    "param_init_fn": "Megatron initialises parameters; for other values load a checkpoint",
    "act_ckpt": "use recompute_granularity of the TransformerConfig",
    "offload_grads": "write offload: {grads: true}",
    "autocast_input": "write cast_forward_inputs",
    "autocast_output": "write output_dtype: fp32",
    "backward_reduce_scatter": "leave it out: gradients are reduced when their unit has them all",
    "ckpt_load_path": "call layerzero.checkpoint.load, or Megatron's load_checkpoint",
}
"""Options that Megatron decides, and names of LayerZeRO's file that are others here."""
OPTIONS = [
    *(name for name in dict.fromkeys((*ZERO3_OPTIONS, *MODULE_OPTIONS)) if name not in _REFUSED),
    _LAYERS,
]
"""All valid keys."""
_POLICY = "auto_wrap_policy"


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
            f"initialize_model_parallel got {global_virtual}: pass the same number to both"
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


def read_options(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `ZeRO3` from a YAML file (needs PyYAML) or a mapping.

    `transformer_layers` becomes the `auto_wrap_policy`. That, `ignored_modules`,
    `ignored_parameters` and `optional_modules` stay patterns; `for_module` replaces all but the
    last by a model's modules and parameters.

    Raises:
        ImportError: PyYAML is not installed.
        OSError: the file cannot be read.
        ValueError, TypeError: unknown keys or bad values; names the file and key.
    """
    where, given = "options", source
    if not isinstance(source, Mapping):
        where, given = str(source), load_yaml(Path(source)) or {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}: expected a mapping of options, got {given!r}")
    for name in given.keys() & _REFUSED.keys():
        raise ValueError(f"{where}: {name}={given[name]!r} cannot be an option: {_REFUSED[name]}")
    patterns = {
        name: read_patterns(f"{where}: {name}", [value] if isinstance(value, str) else value)
        for name in _NAMES
        if (value := given.get(name)) is not None
    }
    values = {name: value for name, value in given.items() if name not in _NAMES}
    arguments = engine_arguments(read_plan_options(where, values, OPTIONS))
    if _LAYERS in patterns:
        arguments[_POLICY] = patterns.pop(_LAYERS)
    return {**arguments, **patterns}


def for_module(options: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Keyword arguments of `ZeRO3(module, ...)` from those of `read_options`: patterns are replaced
    by what they match in a chunk of the model that is not sharded yet. Names are those inside
    Megatron's Float16Module, if there is one.

    Warns about patterns that match nothing, which may be correct on a pipeline stage.
    """
    resolved, inner = dict(options), inside(module)
    modules = [(clean_name(name), each) for name, each in inner.named_modules() if name]
    if _POLICY in options:
        # A pattern may match a ModuleList as well, which no call would unshard.
        called = [(name, each) for name, each in modules if has_forward(each)]
        layers = {id(each) for each in _matching(_LAYERS, options[_POLICY], called)}
        resolved[_POLICY] = lambda module, fqn: id(module) in layers
    parameters = [(clean_name(name), each) for name, each in inner.named_parameters()]
    for key, named in (("ignored_modules", modules), ("ignored_parameters", parameters)):
        if key in options:
            resolved[key] = _matching(key, options[key], named)
    return resolved


def _matching(key: str, texts: Iterable[str], named: Sequence[tuple[str, Any]]) -> list[Any]:
    """What the patterns match by name; layers by the name of a class, too."""
    found: dict[int, Any] = {}
    for text in texts:
        pattern = parse_pattern(text)
        own = {
            id(each): each
            for name, each in named
            if pattern.fullmatch(name) or (key == _LAYERS and text in _class_names(each))
        }
        if not own:
            classes = [type(each).__name__ for _, each in named if key == _LAYERS]
            known = [*classes, *(name for name, _ in named)]
            warn_once(
                f"{key}: {text!r} matches nothing in this chunk of the model"
                f"{near_matches(text, known)}; a pattern must match a whole name, and a pipeline "
                "stage has only its own layers",
                f"{key}: {text}",
            )
        found.update(own)
    return list(found.values())


def _class_names(module: nn.Module) -> list[str]:
    names = [(cls.__module__, cls.__name__) for cls in type(module).__mro__]
    return [name for _, name in names] + [f"{place}.{name}" for place, name in names]
