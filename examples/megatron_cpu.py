"""Runs megatron-core on CPU ranks: inside `emulation()`, its CUDA calls use the CPU.

For experiments and tests. It is not part of the package, and torch and Megatron are unchanged
outside the context.
"""

import copy
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import torch_norm
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

# Several modules of Megatron import this class under other names, so `__new__` is patched.
_NORM = torch_norm.WrappedTorchNorm

PLAIN_TORCH: dict[str, Any] = dict(
    hidden_dropout=0.0,
    attention_dropout=0.0,
    bias_dropout_fusion=False,
    bias_activation_fusion=False,
    masked_softmax_fusion=False,
    gradient_accumulation_fusion=False,
    persist_layer_norm=False,
    apply_rope_fusion=False,
    transformer_impl="local",
)
"""Options of a TransformerConfig without apex, Transformer Engine or dropout."""


class _CpuForCuda(TorchFunctionMode):
    """Makes tensors requested on CUDA on the CPU; CPU tensors report CUDA types."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's own optimizers accept only types such as 'torch.cuda.FloatTensor'.
            result = result.replace("torch.", "torch.cuda.", 1)
        return result


class _Stream:
    """A stream or event; does nothing, because the CPU runs operations in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


_CUDA = {
    "current_device": lambda: torch.device("cpu"),
    "synchronize": lambda *args: None,
    "empty_cache": lambda: None,
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda *args: torch.get_rng_state(),
    "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    "Stream": _Stream,
    "Event": _Stream,
    "current_stream": lambda *args: _Stream(),
    "stream": lambda stream: nullcontext(),
}


def _norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """Like `WrappedTorchNorm`, which does not support sequence-parallel models."""
    made = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm = made(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


@contextmanager
def emulation() -> Iterator[None]:
    """A context in which Megatron's models, schedules and optimizers run on the CPU."""
    with ExitStack() as stack:
        # Megatron decorates small functions with torch.compile.
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        stack.enter_context(mock.patch.multiple(torch.cuda, **_CUDA))
        states = {
            "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
            "_set_cuda_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        }
        stack.enter_context(mock.patch.multiple(megatron_random, **states))
        stack.enter_context(mock.patch.object(_NORM, "__new__", _norm))
        # This function of Transformer Engine is undefined if that is not installed.
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(_CpuForCuda())
        yield


class ContextParallelAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's attention in plain torch, with keys and values gathered from all ranks.

    Each context-parallel rank has a contiguous part of the sequence. The mask is that of its
    queries, [1, 1, local, whole]. (Megatron's own context parallelism needs Transformer Engine.)
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        parallel_state = importlib.import_module("megatron.core.parallel_state")
        group = parallel_state.get_context_parallel_group()
        whole = [
            gather_from_sequence_parallel_region(each.contiguous(), group=group)
            for each in (key, value)
        ]
        return super().forward(query, *whole, *args, **kwargs)
