"""Checks TrainingArguments for use with sharded models."""

from __future__ import annotations

from typing import Any

_ELEMENTWISE = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_anyprecision",
    "sgd",
    "adagrad",
    "rmsprop",
    "schedule_free_adamw",
    "schedule_free_radam",
    "schedule_free_sgd",
)
"""Element-wise optimizers, which work on shards."""

_FULL_EVAL = "it casts the main weights; use bf16=True, or pass zero3={'mixed_precision': ...}"
_REFUSED = {
    "fsdp": (
        "ZeRO3 shards instead: leave fsdp and fsdp_config out, and pass options as zero3={...}, "
        "such as reshard_after_forward or offload"
    ),
    "deepspeed": (
        "ZeRO3 shards instead: leave it out, pass options as zero3={...} and the optimizer as "
        "optim="
    ),
    "parallelism_config": (
        "pass a mesh as zero3={'process_group': mesh}, or shard a model that parallelize_module "
        "split (docs/reference/parallelism.md) and pass that as model"
    ),
    "fp16": (
        "use bf16=True; float16 needs layerzero.GradScaler, whose ranks agree on overflow, in your "
        "own training loop"
    ),
    "fp16_full_eval": _FULL_EVAL,
    "bf16_full_eval": _FULL_EVAL,
    "use_liger_kernel": (
        "it replaces methods that gather parameters; apply liger's kernels before sharding the "
        "model"
    ),
    "auto_find_batch_size": (
        "a rank that runs out of memory would restart alone; set per_device_train_batch_size"
    ),
}
"""Arguments that must not be set, and what to use instead."""


def check_arguments(args: Any) -> None:
    for name, instead in _REFUSED.items():
        if getattr(args, name):
            raise ValueError(f"ZeRO3Trainer: {name} was set: {instead}")
    if args.n_gpu > 1:
        raise ValueError(
            f"ZeRO3Trainer: one process has {args.n_gpu} GPUs, which means DataParallel; start one "
            f"process per GPU: torchrun --nproc-per-node {args.n_gpu} your_script.py"
        )
    optim = getattr(args.optim, "value", args.optim)
    if optim not in _ELEMENTWISE:
        raise ValueError(
            f"ZeRO3Trainer: optim={optim!r}: expected one that is known to work on shards: "
            f"{', '.join(_ELEMENTWISE)}. Or pass optimizer_cls_and_kwargs: an element-wise class, "
            "or (layerzero.optim.WholeTensorOptimizer, {'optimizer_class': ..., 'lr': ...}), which "
            "steps any torch optimizer on whole tensors"
        )
