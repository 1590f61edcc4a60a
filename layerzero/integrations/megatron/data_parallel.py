"""ZeRO3DataParallel: a chunk of a Megatron model on layerzero. See docs/reference/megatron.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import nn

from layerzero import ZeRO3
from layerzero.checkpoint import get_model_state_dict
from layerzero.checkpoint.adapters import global_name, under_global_names
from layerzero.integrations.engine import (
    RootState,
    WrapPolicy,
    broadcast_buffers,
    get_unit,
    optional_by_name,
    root_of,
)
from layerzero.integrations.megatron.arguments import check_model_config
from layerzero.integrations.megatron.checkpoint import sharded_state_dict
from layerzero.integrations.megatron.options import inside
from layerzero.integrations.megatron.ranks import MegatronRanks
from layerzero.integrations.megatron.units import MegatronPolicy, widen


class ZeRO3DataParallel(_BaseDataParallel):
    """Shards one chunk of a model over its data- and context-parallel ranks.

    Replaces Megatron's `DistributedDataParallel`. Construction is collective over these ranks.

    Args:
        config: the chunk's TransformerConfig. Its `no_sync_func` is set to this wrapper's, or to
            the list of those of all virtual stages.
        ddp_config: `grad_reduce_in_fp32`, `check_for_nan_in_grad` and
            `reduce_scatter_with_fp32_accumulation` (sums in float32 and rank order) apply; bucket
            settings have no meaning here.
        module: a GPTModel or another module, with or without Megatron's `Float16Module` around it;
            changed in place.
        disable_bucketing: no effect; Megatron passes it.
        pg_collection: Megatron's process groups; None: those of its global state.
        auto_wrap_policy: as for `ZeRO3`; None: every TransformerLayer is a unit.
        reshard_between_micro_batches: reshard units after each forward and backward on pipeline
            stages as well. By default units stay unsharded from the first forward to the last
            backward of a step: one all-gather for each unit, and memory for the stage's full
            parameters.
        **zero3_options: arguments of `ZeRO3` (`zero3_size`, `outer`, `forward_prefetch`, `offload`,
            ...). `sync_module_states` defaults to True; `optional_modules` may list names, or
            patterns as in plans, without Float16Module's "module.".

    Attributes:
        module: the module that was given; its parameters are this rank's sharded parameters.
        engine: the `ZeRO3` around it.

    Raises:
        ValueError, TypeError, NotImplementedError: a setting or combination is not supported; says
            what to use instead.
    """

    force_all_reduce: bool
    """Megatron's training loop sets it; gradients are always reduced."""

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        *,
        auto_wrap_policy: WrapPolicy = None,
        reshard_between_micro_batches: bool = False,
        **zero3_options: Any,
    ) -> None:
        super().__init__(config=config, module=module)
        check_model_config(config, ddp_config)
        for name in zero3_options.keys() & {"ignored_modules", "ignored_parameters"}:
            zero3_options[name] = tuple(zero3_options[name])  # May be an iterator; read twice.
        ignored = _ignored(zero3_options)
        optional = zero3_options.pop("optional_modules", ())
        self.ddp_config = ddp_config
        self.force_all_reduce = False
        self.ranks = MegatronRanks.of(pg_collection, getattr(config, "context_parallel_size", 1))
        self.dp_cp_group, self.tp_group = self.ranks.data, self.ranks.tensor
        self.pp_group = self.ranks.pipeline
        self.vp_stage: int | None = _attribute_inside(module, "vp_stage")
        optional = _optional(module, optional, self.pp_group.size())
        policy = MegatronPolicy(auto_wrap_policy, module, self.ranks)
        precision = widen(module, ddp_config, zero3_options.pop("mixed_precision", None), ignored)
        options: dict[str, Any] = {
            "sync_module_states": True,
            "deterministic": getattr(ddp_config, "reduce_scatter_with_fp32_accumulation", False),
            "on_nonfinite": "raise" if ddp_config.check_for_nan_in_grad else None,
            **zero3_options,
        }
        # Not registered as a child: `module` is one already, and has the same parameters.
        self.__dict__["engine"] = ZeRO3(
            module,
            self.ranks.data,
            auto_wrap_policy=policy,
            mixed_precision=precision,
            gradient_reduction="sum" if config.calculate_per_token_loss else "mean",
            optional_modules=optional,
            **options,
        )
        if self.vp_stage is not None:
            # Virtual stages are separate models on one process group, so the names of their
            # collectives must differ.
            self.root.operations.prefix = f"virtual stage {self.vp_stage}: "
        self._keeps_units = self.pp_group.size() > 1 and not reshard_between_micro_batches
        _install_no_sync(config, self)

    @property
    def engine(self) -> ZeRO3:
        return self.__dict__["engine"]

    @property
    def root(self) -> RootState:
        """State that the engine's units share."""
        unit = get_unit(self.engine)
        assert unit is not None, "it is wrapped"
        return root_of(unit)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes accumulate gradients; see `ZeRO3.no_sync`."""
        root = self.root
        root.before_call("micro_batches")
        root.scheduler.hold_micro_batches(self._keeps_units)
        try:
            with self.engine.no_sync():
                yield
        finally:
            root.scheduler.hold_micro_batches(False)
            if self._keeps_units and not torch.is_grad_enabled():
                root.scheduler.free_all()  # An evaluation has no backward that would end them.

    def start_grad_sync(self, *unused: Any) -> None:
        """Reduce gradients accumulated in `no_sync`, if there are any. Collective."""
        self.engine.reduce_gradients()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Complete all gradients. Collective.

        Args:
            force_all_reduce: no effect: gradients are always reduce-scattered.
        """
        self.engine.reduce_gradients()

    def start_param_sync(
        self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Does nothing: units are unsharded on use and prefetched."""

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all gradients by a number or a one-element tensor. Not collective."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if gradients and isinstance(scaling_factor, torch.Tensor):
            scaling_factor = scaling_factor.detach().reshape(()).to(gradients[0].device)
        if gradients:
            torch._foreach_mul_(gradients, scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Drop all gradients, including unreduced sums of an interrupted step."""
        if self.root.reducer.kept.adds_up:
            self.root.abort()
        self.engine.zero_grad()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Broadcast the buffers of the first rank. Collective.

        Parameters are equal wherever several ranks have them: with `sync_module_states`, shards are
        cut from the first rank's parameters.
        """
        broadcast_buffers(self.root, self.module.buffers())

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Full tensors of this stage under Megatron's names, as `DistributedDataParallel` returns.

        They are on the CPU, in the dtype of the main shards. Unlike `DistributedDataParallel`'s,
        this is collective over the data-parallel ranks. Megatron's `torch` format calls it on one
        of them only; `torch_dist` does not need it. `state_dict` returns shards.

        Args:
            keep_vars: no effect.
        """
        full = get_model_state_dict(self.module, full=True, cpu_offload=True)
        tensors = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        own = {global_name(self.module, name): name for name, _ in tensors}
        return {prefix + own.get(name, name): value for name, value in full.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load full tensors or shards by the module's names. Not collective.

        Experts may be named by Megatron's local numbers or by global ones.
        """
        self.module.load_state_dict(under_global_names(self.module, state_dict), strict=strict)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """State dict for Megatron's distributed checkpoints, by module names. Not collective."""
        own = {**(metadata or {}), "dp_cp_group": self.dp_cp_group}
        return sharded_state_dict(self.engine, prefix, sharded_offsets, own, self.tp_group)


def _ignored(options: Mapping[str, Any]) -> list[nn.Parameter]:
    ignored = [p for module in options.get("ignored_modules", ()) for p in module.parameters()]
    ignored += options.get("ignored_parameters", ())
    if any(parameter.requires_grad for parameter in ignored):
        raise NotImplementedError(
            "ZeRO3DataParallel: ignored_modules or ignored_parameters have parameters that require "
            "grad, whose gradients would not be reduced; freeze or shard them"
        )
    return ignored


def _optional(module: nn.Module, listed: Any, num_stages: int) -> Iterator[nn.Module]:
    """`optional_modules` with names replaced by modules; names are those in Float16Module."""
    optional = optional_by_name(inside(module), listed)
    if num_stages > 1 and list(optional):
        raise NotImplementedError(
            f"ZeRO3DataParallel: optional_modules with {num_stages} pipeline stages: the ranks of "
            "a stage would have to agree in an order that the schedule does not give; leave "
            "optional_modules out, or use one stage"
        )
    return optional


def _attribute_inside(module: Any, name: str) -> Any:
    while not hasattr(module, name) and hasattr(module, "module"):
        module = module.module
    return getattr(module, name, None)


def _install_no_sync(config: Any, chunk: ZeRO3DataParallel) -> None:
    """Set `config.no_sync_func`; Megatron's schedules enter it for all virtual stages at once."""
    if not chunk.vp_stage:
        config.no_sync_func = chunk.no_sync if chunk.vp_stage is None else [chunk.no_sync]
        return
    before = config.no_sync_func if isinstance(config.no_sync_func, list) else []
    # The list is cut at this stage, so that no entry of an earlier model with this config stays.
    config.no_sync_func = [*before[: chunk.vp_stage], chunk.no_sync]
