"""ZeRO3DataParallel: a chunk of a Megatron model on layerzero. See docs/reference/megatron.md.

Note [Main parameters are the sharded parameters]
    In a bf16 or fp16 model, sharded parameters are float32 and unsharded parameters 16-bit. So the
    optimizer updates the sharded parameters directly, without the float32 copies that Megatron's
    own optimizer needs.

Note [Experts of a rank]
    With expert parallelism each `local_experts` list is a unit, sharded over the ranks that hold
    the same experts (docs/reference/parallelism.md, Experts), and Megatron numbers its members from
    0 on every rank. State dicts of the engine use the global number of an expert; those that
    Megatron asks for keep Megatron's local number.

Note [Tied embeddings of a pipeline]
    The first and the last stage share a weight, and Megatron sums the gradients of their ranks. The
    shards on both stages must therefore be the same elements, so the weight has a unit of its own
    on each. The last stage's model reads the weight from the module before it calls the module, so
    there the calls of the model unshard the unit (`hook_module`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from layerzero import MixedPrecision, ZeRO3
from layerzero.checkpoint import get_model_state_dict
from layerzero.checkpoint.adapters import global_name, under_global_names
from layerzero.integrations.engine import (
    RootState,
    WrapPolicy,
    broadcast_buffers,
    get_unit,
    make_chooser,
    optional_by_name,
    root_of,
    to_policy,
)
from layerzero.integrations.megatron.arguments import check_model_config
from layerzero.integrations.megatron.checkpoint import sharded_state_dict

_GROUPS = ["tp", "pp", "mp", "dp_cp", "ep", "expt_dp"]
"""Names of the groups in Megatron's collections."""


@dataclass(frozen=True)
class MegatronRanks:
    """Megatron's process groups, of this rank.

    The data- and context-parallel ranks, which own shards, and the tensor- and pipeline-parallel
    ranks together visit each element of a model once. Parameters that tensor-parallel ranks have
    copies of count only on the first of these ranks.
    """

    data: dist.ProcessGroup
    """Data-parallel ranks, context-parallel ones included."""
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    model: tuple[dist.ProcessGroup, ...]
    """Groups that together reach all tensor- and pipeline-parallel ranks: Megatron's model-parallel
    group, or, if a collection lacks it, the groups of both axes."""
    experts: dist.ProcessGroup | None = None
    """Expert-parallel ranks, each with experts of its own; None: every rank has all experts."""
    expert_data: dist.ProcessGroup | None = None
    """Data-parallel ranks with the same experts."""

    @classmethod
    def of(cls, collection: Any, context_parallel_size: int) -> MegatronRanks:
        """The groups of Megatron's `ProcessGroupCollection`; None: those of its global state."""
        if collection is None:
            collection = ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
        found: dict[str, Any] = {name: getattr(collection, name, None) for name in _GROUPS}
        if found["dp_cp"] is None and context_parallel_size == 1:
            found["dp_cp"] = getattr(collection, "dp", None)
        if missing := [name for name in ("dp_cp", "pp", "tp") if found[name] is None]:
            raise ValueError(f"pg_collection: process groups {missing} are missing; set them")
        return cls(
            found["dp_cp"],
            tensor=found["tp"],
            pipeline=found["pp"],
            model=(found["tp"], found["pp"]) if found["mp"] is None else (found["mp"],),
            experts=found["ep"],
            expert_data=found["expt_dp"],
        )

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is counted on this one of the model-parallel ranks.

        Copies on later tensor-parallel ranks, and weights that another stage counts, are not.
        """
        if getattr(parameter, "shared", False):
            return False
        is_split = bool(getattr(parameter, "tensor_model_parallel", False))
        return is_split or dist.get_rank(self.tensor) == 0


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
        self.vp_stage: int | None = getattr(inside(module), "vp_stage", None)
        optional = _optional(module, optional, self.pp_group.size())
        policy = _policy_of(auto_wrap_policy, module, self.ranks)
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
            "ZeRO3DataParallel: ignored parameters require grad; freeze or shard them"
        )
    return ignored


def _optional(module: nn.Module, listed: Any, num_stages: int) -> Iterator[nn.Module]:
    """`optional_modules` with names replaced by modules; names are those in Float16Module."""
    optional = optional_by_name(inside(module), listed)
    if num_stages > 1 and list(optional):
        raise NotImplementedError(
            f"ZeRO3DataParallel: optional_modules with {num_stages} pipeline stages: the schedule "
            "gives no order in which ranks could agree; leave them out, or use one stage"
        )
    return optional


def inside(module: nn.Module) -> nn.Module:
    """The module inside Megatron's Float16Module; another module is returned as it is."""
    inner = module._modules.get("module")
    return module if inner is None else inner


def _install_no_sync(config: Any, chunk: ZeRO3DataParallel) -> None:
    """Set `config.no_sync_func`; Megatron's schedules enter it for all virtual stages at once."""
    if not chunk.vp_stage:
        config.no_sync_func = chunk.no_sync if chunk.vp_stage is None else [chunk.no_sync]
        return
    before = config.no_sync_func if isinstance(config.no_sync_func, list) else []
    # The list is cut at this stage, so that no entry of an earlier model with this config stays.
    config.no_sync_func = [*before[: chunk.vp_stage], chunk.no_sync]


def _policy_of(given: WrapPolicy, module: nn.Module, ranks: MegatronRanks) -> WrapPolicy:
    """The user's policy or transformer layers, plus tied embeddings and experts."""
    choose = make_chooser({TransformerLayer} if given is None else to_policy(given), module)
    special = {**_tied_embeddings(module), **_split_experts(module, ranks)}
    return lambda inner, fqn: special[id(inner)] if id(inner) in special else choose(inner, fqn)


def _tied_embeddings(module: nn.Module) -> dict[int, Mapping[str, Any]]:
    """Unit arguments of modules whose weight another stage shares, keyed by id(module)."""
    language = [m for m in module.modules() if hasattr(m, "shared_embedding_or_output_weight")]
    found: dict[int, Mapping[str, Any]] = {}
    for name, inner in module.named_modules():
        own = [parameter for parameter in inner._parameters.values() if parameter is not None]
        if not any(getattr(parameter, "shared_embedding", False) for parameter in own):
            continue
        if len(own) > 1:
            raise NotImplementedError(
                f"{name}: its weight is tied to one of another pipeline stage, and it has a bias: "
                "remove that, or set share_embeddings_and_output_weights=False"
            )
        is_called = not language or getattr(language[0], "pre_process", True)
        found[id(inner)] = {} if is_called else {"hook_module": language[0]}
    return found


def _split_experts(module: nn.Module, ranks: MegatronRanks) -> dict[int, Mapping[str, Any]]:
    """Unit arguments of modules whose `local_experts` differ between ranks, keyed by id(module)."""
    found: dict[int, Mapping[str, Any]] = {}
    known: set[int] = set()
    for inner in module.modules():
        members = getattr(inner, "local_experts", None)
        own = [p for p in inner.parameters() if not getattr(p, "allreduce", True)]
        if not own or not isinstance(members, nn.ModuleList):
            continue
        if ranks.experts is None or ranks.expert_data is None:
            raise ValueError("pg_collection: 'ep' and 'expt_dp' are needed for split experts")
        found[id(inner)] = {"process_group": ranks.expert_data, "expert_numbers": ranks.experts}
        known |= {id(parameter) for parameter in inner.parameters()}
    for name, parameter in module.named_parameters():
        if not getattr(parameter, "allreduce", True) and id(parameter) not in known:
            raise NotImplementedError(
                f"{name}: one tensor holds a rank's experts, which checkpoints could not name; set "
                "moe_grouped_gemm=False (SequentialMLP), or expert_model_parallel_size=1"
            )
    return found


def widen(
    module: nn.Module,
    ddp_config: Any,
    given: MixedPrecision | None,
    ignored: Collection[nn.Parameter],
) -> MixedPrecision | None:
    """Cast 16-bit parameters to float32, and return a MixedPrecision that computes in 16 bits.

    See Note [Main parameters are the sharded parameters]. Parameters that are float32 in a 16-bit
    model are also used in float32. `given`: the user's settings, which are completed; returned
    unchanged for a float32 model. `ignored`: parameters that are not sharded; left unchanged.
    """
    left = {id(parameter) for parameter in ignored}
    named = {name: p for name, p in module.named_parameters() if id(p) not in left}
    dtypes = {name: parameter.dtype for name, parameter in named.items()}
    narrow = {dtype for dtype in dtypes.values() if dtype.is_floating_point and dtype.itemsize == 2}
    if not narrow:
        return given
    given = given or MixedPrecision()
    if len(narrow) > 1 or given.param_dtype not in (None, *narrow):
        raise ValueError(
            f"the model has parameters in {sorted(map(str, narrow))}, but mixed_precision has "
            f"param_dtype={given.param_dtype}: expected one 16-bit dtype; leave param_dtype out"
        )
    for parameter in named.values():
        if parameter.dtype in narrow:
            parameter.data = parameter.data.float()
    kept = frozenset(_of_any_expert(n) for n, dtype in dtypes.items() if dtype not in narrow)
    also_kept = given.keep_parameters
    return replace(
        given,
        param_dtype=narrow.pop(),
        reduce_dtype=given.reduce_dtype
        or (torch.float32 if ddp_config.grad_reduce_in_fp32 else None),
        # Megatron's modules cast their inputs themselves, and some expect float32 inputs.
        cast_forward_inputs=False,
        keep_parameters=lambda name, parameter: (
            _of_any_expert(name) in kept or bool(also_kept and also_kept(name, parameter))
        ),
    )


def _of_any_expert(name: str) -> str:
    """The name without the expert's number, because local and global numbers differ."""
    return re.sub(r"(?<=\blocal_experts\.)\d+", "", name)
