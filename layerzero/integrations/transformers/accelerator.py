"""An Accelerator for sharded models: `prepare(accelerator, model, optimizer, ...)`.

accelerate selects its engines by an enum, so it cannot be extended by another one. Instead, the
class of the given accelerator is replaced by a subclass. It overrides the methods that would wrap a
sharded model in DistributedDataParallel, or would treat a shard as the full parameter.
"""

from __future__ import annotations

import logging
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.utils.data import RandomSampler

from layerzero import MixedPrecision, ZeRO3
from layerzero.checkpoint import get_model_state_dict, load, save
from layerzero.checkpoint.adapters import committed_steps
from layerzero.integrations.engine import attach, get_info, optional_by_name
from layerzero.integrations.shared import by_number, on_first_rank

_logger = logging.getLogger(__name__)
_OTHER_ENGINES = (
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any, **options: Any) -> Any:
    """Shard `model` with ZeRO3 and prepare everything else as `accelerator.prepare`. Collective.

    Afterwards these methods of the accelerator work with the sharded model: `accumulate`,
    `no_sync`, `backward`, `clip_grad_norm_`, `unwrap_model`, `get_state_dict` (full on the first
    rank, {} on others), `save_state` and `load_state` (layerzero's checkpoints: any world size,
    nothing pickled).

    Args:
        accelerator: changed in place: its class is replaced by a subclass.
        model: a module, or a ZeRO3 module, which is used as it is.
        others: optimizers, data loaders, schedulers. An optimizer of the original parameters that
            has not stepped yet gets this rank's sharded parameters instead.
        options: arguments of `ZeRO3`; models of transformers also get the defaults of
            `pretrained.shard`. `optional_modules` may list names, or patterns as in plans.

    Returns:
        The ZeRO3 module, or a tuple of it and the others in order.

    Raises:
        ValueError: another engine is configured, ranks were not started by a launcher, or an
            optimizer has other parameters or has stepped already.
        NotImplementedError: mixed precision with a scaler (fp16, fp8), or `dynamo_backend`.
    """
    check_accelerator(accelerator)
    optimizers = [each for each in others if isinstance(each, torch.optim.Optimizer)]
    for optimizer in optimizers:
        if optimizer.state and not isinstance(model, ZeRO3):
            raise ValueError(
                f"{type(optimizer).__name__} has state of whole parameters: shard the model first"
            )
        check_optimizer(optimizer, model)
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise NotImplementedError("dynamo_backend: expected none; compile() the sharded model")
    if isinstance(model, ZeRO3):
        if options:
            raise ValueError(
                f"{sorted(options)}: the model is sharded already; pass these where it is sharded"
            )
        sharded = model
    else:
        if accelerator.mixed_precision == "bf16":
            use_bf16(model, options)
        options.setdefault("device", accelerator.device)
        sharded = _shard(model, options)
        for optimizer in optimizers:
            attach.look_at(optimizer)  # It was given parameters of before, which are exchanged.
    adopt(accelerator)
    return accelerator.prepare(sharded, *others)


def use_bf16(model: nn.Module, options: dict[str, Any]) -> None:
    """Set up computing in bfloat16 with float32 main weights, before `model` is sharded.

    Casts trainable parameters of lower precision to float32, as accelerate does for FSDP.
    transformers loads a model in the dtype of its file, often bfloat16.
    """
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options.setdefault("mixed_precision", mixed)
    low = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.dtype in (torch.bfloat16, torch.float16)
        and get_info(parameter) is None
    ]
    for _, parameter in low:
        parameter.data = parameter.data.float()
    if low and dist.get_rank() == 0:
        _logger.info(
            "bf16: %d trainable parameters (%s, ...) are cast to float32, for main weights and "
            "optimizer; saved weights are float32, too",
            len(low),
            low[0][0],
        )


def _shard(model: nn.Module, options: dict[str, Any]) -> ZeRO3:
    # If the model is one of transformers, transformers has been imported.
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    if any(isinstance(part, base) for part in model.modules()):
        from layerzero.integrations.transformers.pretrained import shard

        return shard(model, **options)
    if "optional_modules" in options:
        options["optional_modules"] = optional_by_name(model, options["optional_modules"])
    return ZeRO3(model, **options)


def check_accelerator(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in _OTHER_ENGINES:
        raise ValueError(
            f"Accelerator is set up for {kind.value}; use a plain configuration (no --use_fsdp, no "
            "--use_deepspeed, no plugin) and pass options of ZeRO3 to prepare()"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise NotImplementedError(
            f"mixed_precision={accelerator.mixed_precision!r}: expected 'no' or 'bf16'. float16 "
            "needs layerzero.GradScaler, whose ranks agree on overflow, in your own training loop"
        )
    seen = accelerator.num_processes if accelerator.use_distributed else 1
    world = dist.get_world_size() if dist.is_initialized() else 0
    if seen != world:
        # Without an accelerator in the machine, accelerate is distributed only if use_cpu is set.
        raise ValueError(
            f"processes: accelerate detects {seen}, torch.distributed {world or 'none'}: all ranks "
            "would get the same batches. Start with torchrun or accelerate launch, which set RANK, "
            "LOCAL_RANK and WORLD_SIZE. Pass use_cpu=True to TrainingArguments, cpu=True to "
            "Accelerator, or --cpu to accelerate launch on a machine without an accelerator"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ValueError if the optimizer has parameters that are not the model's."""
    known = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError(
                    f"group {number} of {type(optimizer).__name__}: a parameter of shape "
                    f"{tuple(parameter.shape)} does not belong to the model that it is given with"
                )


def adopt(accelerator: Accelerator) -> None:
    """Replace an accelerator's class by a ZeRO3Accelerator; a second call changes nothing."""
    if not isinstance(accelerator, ZeRO3Accelerator):
        own = type(accelerator)
        accelerator.__class__ = type(own.__name__, (ZeRO3Accelerator, own), {})


class ZeRO3Accelerator(Accelerator):
    """Overrides for sharded models; other models are handled by the base class."""

    shard_reference: Callable[[nn.Module], bool] | None = None
    """Shards a model that is prepared for evaluation alone, if it is a trainer's reference."""

    def _sharded(self) -> list[ZeRO3]:
        return [model for model in self._models if isinstance(model, ZeRO3)]

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Register a ZeRO3 module, which needs no wrapper."""
        if not isinstance(model, ZeRO3):
            shard = self.shard_reference if kwargs.get("evaluation_mode") else None
            if shard is not None and shard(model):
                return model
            return super().prepare_model(model, *args, **kwargs)
        if not any(each is model for each in self._models):
            self._models.append(model)
        return model

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module inside; its parameters are this rank's sharded parameters."""
        return super().unwrap_model(
            model.module if isinstance(model, ZeRO3) else model, *args, **kwargs
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Full tensors of a sharded model on the first rank's CPU, {} on others. Collective."""
        for each in self._sharded():
            if model is each or model is each.module:
                return get_model_state_dict(each, full=True, cpu_offload=True, rank0_only=True)
        return super().get_state_dict(model, unwrap=unwrap)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """Save a layerzero checkpoint (docs/reference/checkpoint_format.md) in `output_dir`.

        Collective. Saves model, optimizers, schedulers, random states, the state of shuffling and
        of stateful data loaders, registered objects and the accelerator's step.

        With `automatic_checkpoint_naming` the folder is `project_dir/checkpoints/checkpoint_N`;
        when it is complete, the oldest beyond `total_limit` are removed.

        To resume inside an epoch, shuffle with `use_seedable_sampler`, and use a stateful data
        loader or call `accelerator.skip_first_batches`.

        Returns:
            The folder.

        Raises:
            NotImplementedError: several models; hooks of save_state.
            ValueError: no folder, or the next automatic name exists.
        """
        parts = self._parts()
        if parts is None:
            return super().save_state(output_dir, *args, **kwargs)
        self._refuse_hooks("save", self._save_model_state_pre_hook)
        root, number = self._automatic_root(), self.save_iteration
        if root is None and output_dir is None:
            raise ValueError(f"save_state: expected a folder, or {_AUTOMATIC}, which names folders")
        folder = Path(output_dir or "") if root is None else root / f"checkpoint_{number}"
        if root is not None and on_first_rank(folder.exists, "save_state"):
            raise ValueError(
                f"save_state: {folder}: exists already; set project_configuration.iteration"
            )
        model, optimizer, scheduler = parts
        extra = {
            "random": random_states(self.device),
            "step": self.step,
            "shuffles": [_place(loader, sampler) for loader, sampler in self._shuffling()],
            "loaders": [loader.state_dict() for loader in self._stateful()],
            "objects": [each.state_dict() for each in self._custom_objects],
        }
        saved = save(folder, model, optimizer, scheduler=scheduler, extra=extra).wait()
        if root is not None:
            self.project_configuration.iteration += 1
            if (limit := self.project_configuration.total_limit) is not None:
                oldest = slice(-max(limit, 1))
                on_first_rank(lambda: [*map(shutil.rmtree, _numbered(root)[oldest])], "save_state")
        return str(saved)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` wrote, at any world size. Collective.

        Without a folder, with `automatic_checkpoint_naming`, it loads the newest complete one.

        Raises:
            ValueError: no folder, or other objects were registered when it was saved.
            CheckpointError: there is no such checkpoint.
        """
        parts = self._parts()
        if parts is None:
            return super().load_state(input_dir, *args, **kwargs)
        self._refuse_hooks("load", self._load_model_state_pre_hook)
        model, optimizer, scheduler = parts
        root, folder = self._automatic_root(), input_dir
        if folder is None:
            # Only the first rank lists folders, in which another may have begun to write.
            complete = root and on_first_rank(
                lambda: [*filter(committed_steps, _numbered(root))], "load_state"
            )
            if not complete:
                raise ValueError(f"load_state: expected a folder, or {_AUTOMATIC} that saved one")
            folder = complete[-1]
        extra: Any = load(Path(folder).expanduser(), model, optimizer, scheduler=scheduler)
        self.step = extra["step"]
        for (loader, sampler), place in zip(self._shuffling(), extra["shuffles"], strict=True):
            _set_place(loader, sampler, place)
        with_state = [*self._stateful(), *self._custom_objects]
        states = [*extra.get("loaders", []), *extra["objects"]]
        for each, state in zip(with_state, states, strict=True):
            each.load_state_dict(state)
        set_random_states(extra["random"], self.device)

    def _automatic_root(self) -> Path | None:
        if not self.project_configuration.automatic_checkpoint_naming:
            return None
        return Path(self.project_dir, "checkpoints")

    def _parts(self) -> tuple[ZeRO3, Any, Any] | None:
        """The model, its optimizers and its schedulers; None if no model is sharded."""
        if not self._sharded():
            return None
        if len(self._models) > 1:
            raise NotImplementedError(f"save_state, load_state: one model, not {len(self._models)}")
        optimizers = [prepared.optimizer for prepared in self._optimizers]
        return self._sharded()[0], by_number(optimizers), by_number(self._schedulers)

    def _refuse_hooks(self, what: str, hooks: Mapping[Any, Any]) -> None:
        if hooks:
            raise NotImplementedError(
                f"{what}_state: hooks of register_{what}_state_pre_hook get whole weights, which "
                "no rank has; call layerzero.checkpoint.save and load, or save_pretrained, instead"
            )

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate, but not for a sharded parameter, which `LocalSGD` would average.

        Raises:
            NotImplementedError: `tensor` has the memory of a sharded parameter.
        """
        if isinstance(tensor, torch.Tensor):
            memory = tensor.untyped_storage()._cdata
            own = (parameter for model in self._sharded() for parameter in model.parameters())
            if any(parameter.untyped_storage()._cdata == memory for parameter in own):
                raise NotImplementedError(
                    "reduce: got a sharded parameter, of which other ranks have other elements; "
                    "LocalSGD needs whole weights on each rank: train without it"
                )
        return super().reduce(tensor, *args, **kwargs)

    def _stateful(self) -> Iterator[Any]:
        """Data loaders that know their place inside an epoch (of torchdata)."""
        for loader in self._dataloaders:
            if getattr(loader, "use_stateful_dataloader", False):
                yield loader

    def _shuffling(self) -> Iterator[tuple[Any, Any]]:
        """Data loaders that shuffle, each with its sampler."""
        for loader in self._dataloaders:
            batches = loader.batch_sampler
            while hasattr(batches, "batch_sampler"):  # A wrapper that splits batches over ranks.
                batches = batches.batch_sampler
            sampler = getattr(batches, "sampler", None)
            if isinstance(sampler, RandomSampler):
                yield loader, sampler


_AUTOMATIC = "a ProjectConfiguration(project_dir, automatic_checkpoint_naming=True)"


def _numbered(root: Path) -> list[Path]:
    found = [path for path in root.glob("checkpoint_*") if path.name[11:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def _place(loader: Any, sampler: Any) -> dict[str, Any]:
    generator = None if sampler.generator is None else sampler.generator.get_state()
    place = {"iteration": loader.iteration, "generator": generator}
    if isinstance(sampler, SeedableRandomSampler):
        place |= {"seed": sampler.initial_seed, "epoch": sampler.epoch}
    return place


def _set_place(loader: Any, sampler: Any, place: dict[str, Any]) -> None:
    loader.iteration = place["iteration"]
    if sampler.generator is not None and place["generator"] is not None:
        sampler.generator.set_state(place["generator"])
    if isinstance(sampler, SeedableRandomSampler) and "seed" in place:
        sampler.initial_seed, sampler.epoch = place["seed"], place["epoch"]


def random_states(device: torch.device) -> dict[str, Any]:
    """States of Python's, numpy's and torch's generators, as a checkpoint's `extra` takes them."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore what `random_states` returned; skips the state of another device type."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)
