"""See loss, gradient norm and time of each step of Megatron's own GPTModel and schedules.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -- examples/train_megatron_gpt.py
    ... --nproc-per-node 4 -- examples/train_megatron_gpt.py --tensor 2 --sequence-parallel
    ... --nproc-per-node 4 -- examples/train_megatron_gpt.py --pipeline 2 --micro-batches 4

Runs on GPUs if there are any, else on CPU ranks (megatron_cpu.py). `--engine ddp` trains with
Megatron's DistributedDataParallel instead: the same losses and gradient norms. Needs the extra:
pip install layerzero[megatron].
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")

import megatron_cpu  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from layerzero.integrations.megatron import setup_model_and_optimizer  # noqa: E402

HEADS = 4
ENGINE: dict[str, Any] = {}
"""Options of ZeRO3DataParallel in addition to those of the command line."""


class Step(NamedTuple):
    """Figures of a step; only the last pipeline stage has the loss."""

    loss: float | None
    grad_norm: float | None
    num_zeros: float | None
    succeeded: bool
    seconds: float


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--engine", choices=["layerzero", "ddp"], default="layerzero")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--pipeline", type=int, default=1, help="stages")
    parser.add_argument("--virtual", type=int, help="chunks of each stage: interleaved 1F1B")
    parser.add_argument("--context", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--experts", type=int, help="of each layer")
    parser.add_argument("--expert-parallel", type=int, default=1, help="ranks that split experts")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--loss-scale", type=float, help="fp16: constant instead of dynamic")
    parser.add_argument("--initial-loss-scale", type=float, default=2.0**16)
    parser.add_argument("--untie", action="store_true", help="embeddings are not the output's")
    parser.add_argument("--per-token-loss", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="of all layers, in backward")
    parser.add_argument("--deallocate", action="store_true", help="outputs that were sent on")
    parser.add_argument("--optimizer", choices=["adam", "sgd"], default="adam")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient norm; 0: no clipping")
    parser.add_argument("--schedule", action="store_true", help="learning rate and weight decay")
    parser.add_argument("--options", help="YAML file of options of the engine")
    parser.add_argument("--zero3-size", type=int, help="ranks that gather parameters together")
    parser.add_argument("--outer", choices=["zero1", "replicate", "shard"], default="zero1")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="of one micro-batch")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=256)
    return parser.parse_args(arguments)


def transformer_config(options: argparse.Namespace) -> TransformerConfig:
    """A TransformerConfig without fused kernels, so that no GPU is needed."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    return TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.width,
        ffn_hidden_size=4 * options.width,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        fp16=options.dtype == "fp16",
        bf16=options.dtype == "bf16",
        tensor_model_parallel_size=options.tensor,
        sequence_parallel=options.sequence_parallel,
        pipeline_model_parallel_size=options.pipeline,
        virtual_pipeline_model_parallel_size=options.virtual,
        # With virtual stages on two ranks, both neighbours are one rank, and batched messages would
        # take each other's place.
        overlap_p2p_comm=options.virtual is not None,
        batch_p2p_comm=options.virtual is None,
        context_parallel_size=options.context,
        deallocate_pipeline_outputs=options.deallocate,
        calculate_per_token_loss=options.per_token_loss,
        recompute_granularity="full" if options.recompute else None,
        recompute_method="uniform" if options.recompute else None,
        recompute_num_layers=1 if options.recompute else None,
        num_moe_experts=options.experts,
        expert_model_parallel_size=options.expert_parallel,
        moe_token_dispatcher_type="allgather",
        add_bias_linear=options.experts is None,
        **megatron_cpu.PLAIN_TORCH,
    )


class MakeModel:
    """Builds one chunk of the model, like Megatron's model providers."""

    def __init__(self, options: argparse.Namespace, config: TransformerConfig) -> None:
        self.options = options
        self.config = config

    def __call__(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> GPTModel:
        options = self.options
        stage = parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(stage + options.pipeline * (vp_stage or 0))
        spec = get_gpt_layer_local_spec(options.experts, moe_grouped_gemm=False)
        if options.context > 1:
            attention = spec.submodules.self_attention.submodules
            attention.core_attention = megatron_cpu.ContextParallelAttention
        return GPTModel(
            self.config,
            spec,
            options.vocab,
            options.seq,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not options.untie,
            position_embedding_type="learned_absolute",
            vp_stage=vp_stage,
        )


def optimizer_config(options: argparse.Namespace) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer=options.optimizer,
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.01,
        clip_grad=options.clip,
        bf16=options.dtype == "bf16",
        fp16=options.dtype == "fp16",
        loss_scale=options.loss_scale,
        initial_loss_scale=options.initial_loss_scale,
        loss_scale_window=2,
        hysteresis=1,
        params_dtype=transformer_config(options).params_dtype,
        log_num_zeros_in_grad=True,
    )


def scheduler_options(options: argparse.Namespace) -> dict[str, Any] | None:
    """Arguments of Megatron's OptimizerParamScheduler."""
    if not options.schedule:
        return None
    return {
        "init_lr": 0.0,
        "max_lr": 1e-2,
        "min_lr": 1e-3,
        "lr_warmup_steps": 2,
        "lr_decay_steps": 8,
        "lr_decay_style": "cosine",
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 8,
        "wd_incr_style": "constant",
    }


def with_layerzero(options: argparse.Namespace, config: TransformerConfig) -> tuple[Any, Any, Any]:
    engine = dict(ENGINE)
    if options.zero3_size is not None:
        engine |= {"zero3_size": options.zero3_size, "outer": options.outer}
    return setup_model_and_optimizer(
        MakeModel(options, config),
        config,
        optimizer_config(options),
        ddp_config=ddp_config(options),
        scheduler=scheduler_options(options),
        options=options.options,
        **engine,
    )


def ddp_config(options: argparse.Namespace) -> DistributedDataParallelConfig:
    # gloo has no fused division.
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.dtype != "fp32", gradient_reduce_div_fusion=False
    )


def with_ddp(options: argparse.Namespace, config: TransformerConfig) -> tuple[Any, Any, Any]:
    """The setup with Megatron's own DistributedDataParallel, as in its training script."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    make, chunks = MakeModel(options, config), []
    for stage in range(options.virtual or 1):
        vp_stage = stage if options.virtual else None
        place = {"ignore_virtual": False, "vp_stage": vp_stage}
        module = make(
            parallel_state.is_pipeline_first_stage(**place),
            parallel_state.is_pipeline_last_stage(**place),
            vp_stage,
        )
        for parameter in module.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        module = module if options.dtype == "fp32" else Float16Module(config, module)
        chunks.append(DistributedDataParallel(config, ddp_config(options), module))
    optimizer = get_megatron_optimizer(optimizer_config(options), chunks)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    settings = scheduler_options(options)
    scheduler = None if settings is None else OptimizerParamScheduler(optimizer, **settings)
    return chunks, optimizer, scheduler


def batches(options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Random tokens; every second one repeats the one before."""
    generator = torch.Generator().manual_seed(100 + parallel_state.get_data_parallel_rank())
    while True:
        tokens = torch.randint(
            0, options.vocab, (options.batch, options.seq + 1), generator=generator
        )
        tokens[:, 1::2] = tokens[:, :-1:2]
        yield tokens


class ForwardStep:
    """One micro-batch of one chunk, as Megatron's schedules call it."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        length = options.seq // options.context
        start = parallel_state.get_context_parallel_rank() * length
        self.part = slice(start, start + length)
        masked = torch.ones(options.seq, options.seq, dtype=torch.bool, device=device).triu(1)
        self.mask = masked[None, None, self.part]
        self.positions = torch.arange(options.seq, device=device)[None, self.part]
        self.per_token_loss = options.per_token_loss
        self.device = device

    def __call__(self, data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        tokens = next(data).to(self.device)
        seen, wanted = tokens[:, :-1][:, self.part], tokens[:, 1:][:, self.part]
        positions = self.positions.expand_as(seen)
        return model(seen, positions, self.mask, labels=wanted.contiguous()), self.loss

    def loss(self, output: torch.Tensor) -> tuple[Any, ...]:
        if not self.per_token_loss:
            mean = output.float().mean()
            return mean, {"loss": mean.detach().clone()}
        total = output.float().sum()
        count = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
        return total, count, {"loss": total.detach() / count}


def train(options: argparse.Namespace, device: torch.device) -> list[Step]:
    """Train on ranks whose parallel groups are initialised; returns the figures of each step."""
    config = transformer_config(options)
    engine = with_ddp if options.engine == "ddp" else with_layerzero
    chunks, optimizer, scheduler = engine(options, config)
    for chunk in chunks:
        chunk.train()
    # Each chunk of a stage gets the same micro-batches.
    data = [batches(options) for _ in chunks]
    forward_step = ForwardStep(options, device)
    steps = []
    for _ in range(options.steps):
        begin = time.perf_counter()
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if options.virtual else data[0],
            model=chunks if options.virtual else chunks[0],
            num_microbatches=options.micro_batches,
            seq_length=options.seq,
            micro_batch_size=options.batch,
            forward_only=False,
        )
        succeeded, grad_norm, num_zeros = optimizer.step()
        if scheduler is not None and succeeded:
            scheduler.step(1)
        loss = None
        if reports:
            loss = sum(float(report["loss"]) for report in reports) / len(reports)
        seconds = time.perf_counter() - begin  # Complete: computing the norm blocked the host.
        steps.append(Step(loss, grad_norm, num_zeros, succeeded, seconds))
    return steps


def join_groups(options: argparse.Namespace) -> None:
    parallel_state.initialize_model_parallel(
        options.tensor,
        options.pipeline,
        options.virtual,
        context_parallel_size=options.context,
        expert_model_parallel_size=options.expert_parallel,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    on_gpus = torch.cuda.is_available()
    if not on_gpus:
        # Keeps a warning of Megatron's silent. On GPUs one connection would queue the gathers of
        # the next unit behind the kernels of this one; Megatron refuses it for FSDP2, too.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device, where = torch.device("cpu"), megatron_cpu.emulation()
    context: AbstractContextManager[None] = where
    if on_gpus:
        device, context = torch.device("cuda", int(os.environ["LOCAL_RANK"])), nullcontext()
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    with context:
        join_groups(options)
        steps = train(options, device)
    if dist.get_rank() == dist.get_world_size() - 1:  # A rank of the last stage.
        for number, step in enumerate(steps):
            norm = "none" if step.grad_norm is None else f"{float(step.grad_norm):.6f}"
            figures = f"loss {step.loss:.6f} gradient norm {norm} {1000 * step.seconds:.0f} ms"
            print(f"step {number} {figures}", flush=True)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
