"""ZeRO3Trainer: transformers' Trainer for sharded models.

The Trainer's `model` is the module inside the wrapper, so that code that inspects its class, config
or names works; `model_wrapped` is the ZeRO3 module that it trains. Calls of either unshard units.
A checkpoint-N (docs/reference/transformers.md) is complete once it has trainer_state.json.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers import trainer as trainer_module

from layerzero import ZeRO3
from layerzero.checkpoint import load, save
from layerzero.integrations.engine import attach, get_unit
from layerzero.integrations.shared import count, is_sharded
from layerzero.integrations.transformers.accelerator import (
    adopt,
    check_accelerator,
    check_optimizer,
    prepare,
    random_states,
    set_random_states,
    use_bf16,
)
from layerzero.integrations.transformers.pretrained import (
    load_pretrained,
    load_weights,
    make_ready,
    shard,
    sharded_before,
    sharded_inside,
)
from layerzero.integrations.transformers.pretrained_saving import is_peft_model, save_pretrained

__all__ = ["ZeRO3Trainer", "load_pretrained", "prepare", "save_pretrained", "shard"]

_logger = logging.getLogger(__name__)
_OURS = "layerzero"
_STATE = "trainer_state.json"
_NEEDS_ALL = "load_best_model_at_end with peft needs save_only_model=False"
_ELEMENTWISE = (
    *("adamw_torch", "adamw_torch_fused", "adamw_anyprecision", "sgd", "adagrad", "rmsprop"),
    *("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
)
"""Values of `optim` that are known to work on shards."""
_FULL_EVAL = "it casts the main weights; use bf16=True, or pass zero3={'mixed_precision': ...}"
_REFUSED = {
    "fsdp": "leave fsdp and fsdp_config out, and pass options as zero3={...}",
    "deepspeed": "leave it out, pass options as zero3={...} and the optimizer as optim=",
    "parallelism_config": "pass a mesh as zero3={'process_group': mesh}, or a model that is split",
    "fp16": "use bf16=True, or layerzero.GradScaler in your own training loop",
    "fp16_full_eval": _FULL_EVAL,
    "bf16_full_eval": _FULL_EVAL,
    "use_liger_kernel": "apply liger's kernels before sharding the model",
    "auto_find_batch_size": "ranks would restart alone: set per_device_train_batch_size",
}
"""Arguments that must not be set, and what to use instead (docs/reference/transformers.md)."""


class ZeRO3Trainer(Trainer):
    """A `Trainer` whose model, gradients and optimizer state are sharded by ZeRO3.

    Start it with a launcher, as for DistributedDataParallel. Every method that trains, evaluates,
    predicts or saves, including `save_model`, is collective: call it on all ranks.

    Args:
        model: a model on any device, including meta; or a ZeRO3 module around one, as returned by
            `load_pretrained` and `shard_with_plan`.
        args: `bf16=True` computes in bfloat16 with float32 main weights and gradient sums, instead
            of autocast; `torch_compile=True` compiles each unit.
        positional, named: arguments of `Trainer`, or of the trainer that a class derives from
            as well: `class Sharded(ZeRO3Trainer, DPOTrainer)`.
        zero3: options of `ZeRO3`. Units default to the model's `_no_split_modules`,
            `sync_module_states` to True, as with DDP, and `timeout` to a `ddp_timeout` in `args`;
            `optional_modules` may list names, or patterns as in plans.

    Raises:
        ValueError, NotImplementedError: an argument does not work with a sharded model; says what
            to use instead.
    """

    sharded_model: ZeRO3
    """The ZeRO3 module; `model` is the module inside it."""

    def __init__(
        self,
        model: Any = None,
        *positional: Any,
        zero3: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self._options = dict(zero3 or {})
        self._extra: Any = None
        self._in_checkpoint = False
        if isinstance(model, ZeRO3):
            make_ready(model)
            model = model.module
        if positional:
            positional = (model, *positional)
        else:  # By name: a derived trainer may have other arguments first, as LLaMA-Factory's.
            named["model"] = model
        super().__init__(*positional, **named)
        if self.optimizer is not None:
            attach.look_at(self.optimizer)  # It may have been built before, of full parameters.
            check_optimizer(self.optimizer, self.sharded_model)

    def _shard(self, model: nn.Module, args: TrainingArguments) -> nn.Module:
        before = sharded_before(model)
        if is_peft_model(model) and args.load_best_model_at_end and args.save_only_model:
            raise NotImplementedError(_NEEDS_ALL)
        inside = next(iter(sharded_inside(model)), None)
        if before is not None and self._options:
            raise ValueError(
                f"zero3={self._options}: this {type(model).__name__} is sharded already"
            )
        if before is None:
            before = self._shard_alike(model, args, args.bf16 and inside is None)
        self.sharded_model = before
        unit = get_unit(inside or self.sharded_model)
        computes = None if unit is None else unit.options.mixed_precision.param_dtype
        if args.bf16 and computes != torch.bfloat16 and dist.get_rank() == 0:
            _logger.warning(
                "bf16=True has no effect: the model was sharded before, and computes in %s",
                computes or "the dtype of its weights",
            )
        module = self.sharded_model.module
        if args.torch_compile and not any(m._compiled_call_impl for m in module.modules()):
            compiled = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
            self.sharded_model.compile(**{k: v for k, v in compiled.items() if v is not None})
        return module

    def _shard_alike(self, model: nn.Module, args: TrainingArguments, bf16: bool) -> ZeRO3:
        options = {"device": args.device, "sync_module_states": True}
        if args.ddp_timeout != TrainingArguments.ddp_timeout:
            # On CPU transformers does not hand it to the process group.
            options["timeout"] = timedelta(seconds=args.ddp_timeout)
        options |= self._options
        if bf16:
            use_bf16(model, options)
        return shard(model, **options)

    def _shard_reference(self, model: nn.Module) -> bool:
        """Shard TRL's reference model as the trained one, with whose parameters it is updated. The
        trainer has it as an attribute; not yet a teacher, whose head TRL uses by itself."""
        held = any(each is model for each in vars(self).values())
        is_reference = held and type(model) is type(self.model) and sharded_before(model) is None
        if is_reference:
            self._shard_alike(model, self.args, self.args.bf16)
        return is_reference

    def call_model_init(self, trial: Any = None) -> nn.Module:
        return self._shard(super().call_model_init(trial), self.args)

    def create_accelerator_and_postprocess(self) -> None:
        _check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        check_accelerator(self.accelerator)
        adopt(self.accelerator)
        self.accelerator.shard_reference = self._shard_reference
        if self.model is not None:
            # Not before `super().__init__`: a derived trainer, such as TRL's, loads, resizes and
            # adapts the model before it calls the `__init__` of `Trainer`, which calls this.
            states = random_states(self.args.device)  # A model on meta draws its values.
            self._shard(self.model, self.args)
            set_random_states(states, self.args.device)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: ZeRO3 has moved the model."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> ZeRO3:
        prepared: ZeRO3 = self.accelerator.prepare_model(self.sharded_model)
        return prepared

    def get_num_trainable_parameters(self) -> int:
        """Number of trainable elements in the full parameters."""
        return count(self.sharded_model.parameters(), only_trainable=True)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "hyperparameter_search: start one run of all ranks for each trial"
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model for `from_pretrained`. Collective; call it on all ranks."""
        folder = Path(output_dir or self.args.output_dir)
        own = None
        if self._in_checkpoint and not self.args.save_only_model:
            own = save(
                folder / _OURS,
                self.sharded_model,
                getattr(self.optimizer, "optimizer", self.optimizer),
                scheduler=self.lr_scheduler,
                step=self.state.global_step,
                extra={"random": random_states(self.args.device)},
            ).wait()
        save_pretrained(self.sharded_model, folder, weights_from=own)
        if self.args.should_save:
            tokenizer = self.processing_class
            if tokenizer is None:
                tokenizer = getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            (folder / "training_args.json").write_text(self.args.to_json_string())
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._in_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._in_checkpoint = False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Does nothing: they are in the checkpoint that `save_model` wrote."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Does nothing: it is in the checkpoint that `save_model` wrote."""

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Like `Trainer.train`; True resumes from the newest complete checkpoint. Collective."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_checkpoint(self.args.output_dir))
        if resume_from_checkpoint:
            _check_resumable(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Does nothing: weights are loaded with the optimizer, which does not exist yet."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._extra = load(
            Path(checkpoint, _OURS),
            self.sharded_model,
            getattr(self.optimizer, "optimizer", self.optimizer),
            scheduler=self.lr_scheduler,
        )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            set_random_states(self._extra["random"], self.args.device)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        _logger.info("loading the best model from %s (%s)", best, self.state.best_metric)
        if (best / _OURS).is_dir():
            load(best / _OURS, self.sharded_model)
        elif is_peft_model(self.model):
            raise NotImplementedError(f"{best}: contains only adapters; {_NEEDS_ALL}")
        else:
            load_weights(self.sharded_model, best)


def _check_arguments(args: Any) -> None:
    for name, instead in _REFUSED.items():
        if getattr(args, name):
            raise ValueError(f"ZeRO3Trainer: {name} was set: {instead}")
    if args.n_gpu > 1:
        raise ValueError(
            f"ZeRO3Trainer: one process has {args.n_gpu} GPUs; start one for each, by torchrun"
        )
    optim = getattr(args.optim, "value", args.optim)
    if optim not in _ELEMENTWISE:
        raise ValueError(
            f"ZeRO3Trainer: optim={optim!r}: expected one that is known to work on shards: "
            f"{', '.join(_ELEMENTWISE)}. Or pass optimizer_cls_and_kwargs: an element-wise class, "
            "or (layerzero.optim.WholeTensorOptimizer, {'optimizer_class': ..., 'lr': ...})"
        )


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> Path:
    """The complete checkpoint-N with the highest N."""
    found = {
        int(match[1]): path
        for path in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and (path / _STATE).exists()
    }
    if not found:
        raise ValueError(
            f"{output_dir}: expected checkpoint-N with {_STATE} to resume from, found none"
        )
    return found[max(found)]


def _check_resumable(folder: Path) -> None:
    model = "load_pretrained(ModelClass, folder)"
    if (folder / "adapter_config.json").exists():  # peft's
        model = "PeftModel.from_pretrained(base, folder, is_trainable=True)"
    for what, path in (("trainer state", _STATE), ("optimizer state", _OURS)):
        if not (folder / path).exists():
            raise ValueError(
                f"{folder}: has no {path}, the {what}, as after a save that was interrupted. To "
                f"continue from the weights alone, use ZeRO3Trainer({model}, ...)"
            )


_count = trainer_module.get_model_param_count


@functools.wraps(_count)
def _count_in_full(model: Any, trainable_only: bool = False) -> int:
    if is_sharded(model):
        return count(model.parameters(), trainable_only)
    return int(_count(model, trainable_only))


# `Trainer.train` logs this count before its first step; without the patch, it counts shards.
trainer_module.get_model_param_count = _count_in_full
