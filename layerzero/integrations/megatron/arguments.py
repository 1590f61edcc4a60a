"""Checks Megatron's settings: the adapter raises for those it does not support, with advice."""

from __future__ import annotations

from typing import Any

_OTHER_ENGINE = "it selects another engine: leave it off, or do not use ZeRO3 here"
_IS_PREFETCHED = "parameters are always prefetched (forward_prefetch=): leave it off"
_IN_16_BIT = "parameters are gathered in bf16 or fp16: leave it off"
_REFUSED = {
    "use_distributed_optimizer": "the optimizer's state is split anyway: leave it off",
    "use_megatron_fsdp": _OTHER_ENGINE,
    "data_parallel_sharding_strategy": _OTHER_ENGINE,
    "num_distributed_optimizer_instances": "use zero3_size=, with outer='replicate' for copies",
    "overlap_param_gather": _IS_PREFETCHED,
    "overlap_param_gather_with_optimizer_step": _IS_PREFETCHED,
    "fp8_param": _IN_16_BIT,
    "fp8_param_gather": _IN_16_BIT,
    "delay_wgrad_compute": "a unit is reduced when its backward ends: leave it off",
    "gradient_accumulation_fusion": "sharded parameters have no main_grad: leave it off",
    "defer_embedding_wgrad_compute": "it runs after its unit was freed: leave it off",
    "overlap_moe_expert_parallel_comm": "it runs parts of layers by themselves: leave it off",
    "cuda_graph_impl": "a graph keeps addresses of parameters, whose memory is freed: set 'none'",
    "optimizer_cpu_offload": "use offload=OffloadPolicy(params=True) of ZeRO3DataParallel",
    "use_precision_aware_optimizer": "pass make_optimizer= for other dtypes of the state",
    "optimizer": "expected 'adam' or 'sgd'; pass make_optimizer= for another element-wise one",
}
"""Settings that are refused in any config that has them, and what to use instead."""
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "data_parallel_sharding_strategy": ("no_shard",),
    "num_distributed_optimizer_instances": (None, 1),
    "cuda_graph_impl": (None, "none"),
    "optimizer": ("adam", "sgd"),
}
"""Values of these settings that are supported; of others, those that are false."""


def check_model_config(config: Any, ddp_config: Any) -> None:
    """Raise ValueError for settings that `ZeRO3DataParallel` does not support. Not collective:
    settings are the same on every rank, so all ranks raise or none does."""
    _refuse("DistributedDataParallelConfig", ddp_config)
    _refuse("TransformerConfig", config)
    stages = getattr(config, "pipeline_model_parallel_size", 1)
    is_interleaved = getattr(config, "virtual_pipeline_model_parallel_size", None) is not None
    if is_interleaved and stages == 2 and not getattr(config, "overlap_p2p_comm", True):
        raise ValueError(
            "TransformerConfig.overlap_p2p_comm=False with virtual stages on 2 pipeline ranks: "
            "Megatron confuses its messages, and gradients are silently wrong; set "
            "overlap_p2p_comm=True and batch_p2p_comm=False"
        )
    tensor = getattr(config, "tensor_model_parallel_size", 1)
    expert_tensor = getattr(config, "expert_tensor_parallel_size", None)
    if getattr(config, "num_moe_experts", None) and expert_tensor not in (None, tensor):
        raise ValueError(
            f"TransformerConfig.expert_tensor_parallel_size={expert_tensor}: experts would have "
            f"data-parallel ranks of their own; set it to tensor_model_parallel_size={tensor}"
        )
    if getattr(ddp_config, "average_in_collective", False) and config.calculate_per_token_loss:
        raise ValueError(
            "DistributedDataParallelConfig.average_in_collective, but calculate_per_token_loss "
            "sums gradients; leave average_in_collective off"
        )


def check_optimizer_config(config: Any, has_own_optimizer: bool) -> None:
    """Raise ValueError for settings that `get_zero3_optimizer` does not support; `optimizer` may
    have any value where `make_optimizer` is given (`has_own_optimizer`)."""
    _refuse("OptimizerConfig", config, but="optimizer" if has_own_optimizer else "")


def check_chunks(config: Any, num_chunks: int) -> None:
    stages = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if num_chunks != (stages or 1):
        raise ValueError(
            f"got {num_chunks} chunks of the model for "
            f"virtual_pipeline_model_parallel_size={stages}: the interleaved schedule runs one "
            "chunk per virtual stage, others run one; use the same number for both"
        )


def _refuse(kind: str, config: Any, but: str = "") -> None:
    for name, instead in _REFUSED.items():
        if name == but or not hasattr(config, name):
            continue  # Not every version of Megatron has every setting.
        value, supported = getattr(config, name), _SUPPORTED.get(name)
        if value not in supported if supported else value:
            raise ValueError(f"{kind}.{name}={value!r}: {instead}")
