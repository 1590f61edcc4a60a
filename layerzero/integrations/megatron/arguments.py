"""Checks Megatron's settings: the adapter raises for those it does not support, with advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class _Refusal(NamedTuple):
    """A setting, a test for its unsupported values, and what to use instead."""

    name: str
    is_refused: Callable[[Any], bool]
    instead: str


def _is_set(value: Any) -> bool:
    return bool(value)


_DISTRIBUTED_OPTIMIZER = (
    "layerzero splits the optimizer's state over all data-parallel ranks anyway: leave it off"
)
_OTHER_ENGINE = "it selects another engine: leave it off, or do not use ZeRO3 here"

_DDP = (
    _Refusal("use_distributed_optimizer", _is_set, _DISTRIBUTED_OPTIMIZER),
    _Refusal("use_megatron_fsdp", _is_set, _OTHER_ENGINE),
    _Refusal("use_custom_fsdp", _is_set, _OTHER_ENGINE),
    _Refusal("data_parallel_sharding_strategy", lambda v: v != "no_shard", _OTHER_ENGINE),
    _Refusal(
        "outer_dp_sharding_strategy",
        lambda v: v != "no_shard",
        "use zero3_size= and outer= of ZeRO3DataParallel",
    ),
    _Refusal(
        "num_distributed_optimizer_instances",
        lambda v: v not in (None, 1),
        "use zero3_size=, with outer='replicate' for copies of the optimizer's state",
    ),
    _Refusal(
        "overlap_param_gather",
        _is_set,
        "parameters are always prefetched (forward_prefetch=): leave it off",
    ),
    _Refusal("align_param_gather", _is_set, "parameters are gathered when used: leave it off"),
    _Refusal("fp8_param_gather", _is_set, "parameters are gathered in bf16 or fp16: leave it off"),
    _Refusal("reuse_grad_buf_for_mxfp8_param_ag", _is_set, "there is no such buffer: leave it off"),
    _Refusal("nccl_ub", _is_set, "buffers are not registered with NCCL: leave it off"),
    _Refusal("fsdp_double_buffer", _is_set, "use limit_all_gathers= of ZeRO3DataParallel"),
    _Refusal(
        "delay_wgrad_compute",
        _is_set,
        "a unit is reduced when its backward ends, weight gradients included: leave it off",
    ),
    _Refusal(
        "check_for_large_grads",
        _is_set,
        "use the norm that the optimizer's step() returns, and leave it off",
    ),
)

_MODEL = (
    _Refusal(
        "gradient_accumulation_fusion",
        _is_set,
        "its kernels add to `main_grad` of full parameters, which exist only while they are used: "
        "set gradient_accumulation_fusion=False",
    ),
    _Refusal(
        "defer_embedding_wgrad_compute",
        _is_set,
        "it computes gradients after their unit was freed: leave it off",
    ),
    _Refusal(
        "delay_wgrad_compute",
        _is_set,
        "a unit is reduced when its backward ends, weight gradients included: leave it off",
    ),
    _Refusal(
        "overlap_moe_expert_parallel_comm",
        _is_set,
        "it runs parts of layers outside their forward: leave it off",
    ),
    _Refusal(
        "cuda_graph_impl",
        lambda v: v not in (None, "none"),
        "a graph keeps addresses of parameters, whose memory is freed and reallocated: set 'none'",
    ),
    _Refusal("fp8_param", _is_set, "parameters are gathered in bf16 or fp16: leave it off"),
)

_OPTIMIZER = (
    _Refusal("use_distributed_optimizer", _is_set, _DISTRIBUTED_OPTIMIZER),
    _Refusal("overlap_param_gather", _is_set, "leave it off: parameters are always prefetched"),
    _Refusal(
        "overlap_param_gather_with_optimizer_step",
        _is_set,
        "leave it off: parameters are gathered when they are used",
    ),
    _Refusal(
        "optimizer_cpu_offload",
        _is_set,
        "use offload=OffloadPolicy(params=True) of ZeRO3DataParallel",
    ),
    _Refusal(
        "use_precision_aware_optimizer",
        _is_set,
        "it belongs to Megatron's distributed optimizer: pass make_optimizer= for other dtypes of "
        "the optimizer's state",
    ),
    _Refusal(
        "optimizer",
        lambda v: v not in ("adam", "sgd"),
        "expected 'adam' or 'sgd'; pass make_optimizer= for another one that works element-wise",
    ),
)


def check_model_config(config: Any, ddp_config: Any) -> None:
    """Raise for settings that `ZeRO3DataParallel` does not support. Not collective.

    Settings are the same on every rank, so all ranks raise or none does.

    Raises:
        ValueError: names the setting, and what to use instead.
    """
    _refuse("DistributedDataParallelConfig", ddp_config, _DDP)
    _refuse("TransformerConfig", config, _MODEL)
    stages = getattr(config, "pipeline_model_parallel_size", 1)
    is_interleaved = getattr(config, "virtual_pipeline_model_parallel_size", None) is not None
    if is_interleaved and stages == 2 and not getattr(config, "overlap_p2p_comm", True):
        raise ValueError(
            "TransformerConfig.overlap_p2p_comm=False with virtual stages on "
            "pipeline_model_parallel_size=2: both neighbours of a stage are the same rank, so "
            "Megatron confuses its batched messages, and gradients are silently wrong; set "
            "overlap_p2p_comm=True and batch_p2p_comm=False"
        )
    tensor = getattr(config, "tensor_model_parallel_size", 1)
    expert_tensor = getattr(config, "expert_tensor_parallel_size", None)
    if getattr(config, "num_moe_experts", None) and expert_tensor not in (None, tensor):
        raise ValueError(
            f"TransformerConfig.expert_tensor_parallel_size={expert_tensor}: experts would have "
            f"other data-parallel ranks than the rest; set it to "
            f"tensor_model_parallel_size={tensor}"
        )
    if getattr(ddp_config, "average_in_collective", False) and config.calculate_per_token_loss:
        raise ValueError(
            "DistributedDataParallelConfig.average_in_collective with "
            "TransformerConfig.calculate_per_token_loss, with which gradients are summed and "
            "divided by the number of tokens; leave average_in_collective off"
        )


def check_optimizer_config(config: Any, has_own_optimizer: bool) -> None:
    """Raise for settings that `get_zero3_optimizer` does not support.

    Args:
        has_own_optimizer: whether `make_optimizer` is given; then `optimizer` is not checked.

    Raises:
        ValueError: names the setting, and what to use instead.
    """
    refusals = [r for r in _OPTIMIZER if not (has_own_optimizer and r.name == "optimizer")]
    _refuse("OptimizerConfig", config, refusals)


def check_chunks(config: Any, num_chunks: int) -> None:
    """Raise if Megatron's schedule for this config would not run all chunks.

    Raises:
        ValueError: the number of chunks differs from the number of virtual stages.
    """
    stages = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if num_chunks != (stages or 1):
        raise ValueError(
            f"got {num_chunks} chunks of the model, but "
            f"virtual_pipeline_model_parallel_size={stages} needs {stages or 1} on each rank: "
            "the interleaved schedule runs one chunk per virtual stage, other schedules run one "
            "chunk; use the same number for both, or no virtual stages"
        )


def _refuse(kind: str, config: Any, refusals: Sequence[_Refusal]) -> None:
    for name, is_refused, instead in refusals:
        # Not every version of Megatron has every setting.
        if hasattr(config, name) and is_refused(getattr(config, name)):
            raise ValueError(f"{kind}.{name}={getattr(config, name)!r}: {instead}")
