"""Megatron's GPTModel and its distributed checkpoints on the CPU, on the ranks of `run_ranks`."""

import multiprocessing
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from layerzero import ZeRO3

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from megatron_cpu import PLAIN_TORCH, emulation

VOCABULARY = 64
LENGTH = 8
BATCH = 4  # rows in a step, over all data-parallel ranks


def let_saves_work() -> None:
    """Of Megatron's distributed checkpoints, in a process that ends with the test."""
    # A save forks writers, which a daemon, as ranks are, may not; they answer this process.
    multiprocessing.current_process()._config["daemon"] = False
    filesystem_async._results_queue = queue.Queue()
    filesystem_async._process_memory = lambda: 0  # for a log line; without psutil a save hangs


@contextmanager
def joined(join: Callable[[], object]) -> Iterator[None]:
    """Inside, this rank is one of Megatron's, in the groups that `join` makes."""
    with emulation():
        before = set(dist.distributed_c10d._world.pg_map)
        join()
        made = set(dist.distributed_c10d._world.pg_map) - before
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            # Megatron forgets some of its groups, which would keep dozens of threads. Those of
            # others stay: torch gives their names to new groups, which then find old addresses.
            for group in made.intersection(dist.distributed_c10d._world.pg_map):
                dist.destroy_process_group(group)


@contextmanager
def megatron_on_cpu(
    tensor_parallel_size: int = 1, pipeline_size: int = 1, expert_parallel_size: int = 1
) -> Iterator[None]:
    let_saves_work()
    sizes = {"expert_model_parallel_size": expert_parallel_size}
    join = partial(
        parallel_state.initialize_model_parallel, tensor_parallel_size, pipeline_size, **sizes
    )
    with joined(join):
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield


def gpt(seed: int = 0, untied: bool = False, **overrides: Any) -> GPTModel:
    """Two layers of a small model, this rank's part; equal on data-parallel ranks.

    Args:
        **overrides: of the TransformerConfig.
    """
    options: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=24,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        **PLAIN_TORCH,
    )
    config = TransformerConfig(**{**options, **overrides})
    torch.manual_seed(seed)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not untied,
    )


def ddp(module: GPTModel, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(
        module.config,
        DistributedDataParallelConfig(gradient_reduce_div_fusion=False, **options),
        module,
    )


def zero3(module: nn.Module, **options: Any) -> ZeRO3:
    return ZeRO3(
        module,
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        **{"auto_wrap_policy": {TransformerLayer}, **options},
    )


def batch(step: int) -> Tensor:
    """[rows of this rank, LENGTH + 1] tokens; all ranks together have the same at any size."""
    tokens = torch.randint(
        VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step)
    )
    size = parallel_state.get_data_parallel_world_size()
    return tokens.chunk(size)[parallel_state.get_data_parallel_rank()]


def loss_of(model: Callable[..., Tensor], tokens: Tensor) -> Tensor:
    """Mean over this rank's tokens. A model in one pipeline stage."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(LENGTH).expand_as(inputs)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    return model(inputs, positions, mask, labels=labels).float().mean()


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Losses averaged over the data-parallel ranks, of any engine."""
    losses = []
    group = parallel_state.get_data_parallel_group()
    is_megatrons = isinstance(model, DistributedDataParallel)
    for step in steps:
        loss = loss_of(model, batch(step))
        loss.backward()
        if is_megatrons:
            model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
        if is_megatrons:
            model.zero_grad_buffer()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        losses.append(mean.item() / group.size())
    return losses
