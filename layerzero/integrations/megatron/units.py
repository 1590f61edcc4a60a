"""Chooses the units of a Megatron model and the dtypes of their parameters.

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

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from layerzero import MixedPrecision
from layerzero.integrations.engine import WrapPolicy, make_chooser, to_policy
from layerzero.integrations.megatron.ranks import MegatronRanks


class MegatronPolicy:
    """An auto-wrap policy: the user's or transformer layers, plus tied embeddings and experts."""

    def __init__(self, policy: WrapPolicy, module: nn.Module, ranks: MegatronRanks) -> None:
        policy = {TransformerLayer} if policy is None else to_policy(policy)
        self._choose = make_chooser(policy, module)
        self._special = {**_tied_embeddings(module), **_split_experts(module, ranks)}

    def __call__(self, module: nn.Module, fqn: str) -> Any:
        special = self._special.get(id(module))
        return self._choose(module, fqn) if special is None else special


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
                f"{name}: its weight is tied to one of another pipeline stage, and it has a bias, "
                "so the stages would split the weight differently; use a module without bias, or "
                "share_embeddings_and_output_weights=False"
            )
        is_called = not language or getattr(language[0], "pre_process", True)
        found[id(inner)] = {} if is_called else {"hook_module": language[0]}
    return found


def _split_experts(module: nn.Module, ranks: MegatronRanks) -> dict[int, Mapping[str, Any]]:
    """Unit arguments of modules whose `local_experts` differ between ranks, keyed by id(module).

    Raises:
        NotImplementedError: such experts are not in a `local_experts` ModuleList.
        ValueError: the expert process groups are missing.
    """
    found: dict[int, Mapping[str, Any]] = {}
    known: set[int] = set()
    for inner in module.modules():
        members = getattr(inner, "local_experts", None)
        own = [p for p in inner.parameters() if not getattr(p, "allreduce", True)]
        if not own or not isinstance(members, nn.ModuleList):
            continue
        if ranks.experts is None or ranks.expert_data is None:
            raise ValueError(
                "pg_collection: process groups 'ep' and 'expt_dp' are needed when ranks have "
                "different experts; set them"
            )
        found[id(inner)] = {"process_group": ranks.expert_data, "expert_numbers": ranks.experts}
        known |= {id(parameter) for parameter in inner.parameters()}
    for name, parameter in module.named_parameters():
        if not getattr(parameter, "allreduce", True) and id(parameter) not in known:
            raise NotImplementedError(
                f"{name}: one tensor holds all experts of a rank, and ranks have different "
                "experts, so checkpoints could not name single experts; set moe_grouped_gemm=False "
                "(SequentialMLP), or expert_model_parallel_size=1: every rank then has all "
                "experts, sharded like the rest"
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
    model are also used in float32.

    Args:
        given: the user's settings, which are completed; returned unchanged for a float32 model.
        ignored: parameters that are not sharded; left unchanged.

    Raises:
        ValueError: the model has several 16-bit dtypes, or `given` has another `param_dtype`.
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
        keep_parameters=lambda name: (
            _of_any_expert(name) in kept or bool(also_kept and also_kept(name))
        ),
    )


def _of_any_expert(name: str) -> str:
    """The name without the expert's number, because local and global numbers differ."""
    return re.sub(r"(?<=\blocal_experts\.)\d+", "", name)
