"""Random decoders on random tensor- and context-parallel meshes train like one process that sees
all batches.

In float64, so that the order of sums does not matter: what differs is an error.
"""

import contextlib
import copy
import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.utils.checkpoint import checkpoint as recompute

from layerzero import ParallelManager, checkpoint
from tests.harness.checks import assert_close_in_float64, named
from tests.harness.random_programs import folder_of_ranks, settings_of_passes
from tests.harness.reference import full_gradients, full_parameters

VOCAB, HEAD, LENGTH, STEPS = 13, 2, 8, 4  # A length that 2 x 2 ranks can split.
Rng = random.Random


def _norm(rng: Rng, width: int) -> nn.Module:
    return nn.RMSNorm(width) if rng.random() < 0.6 else nn.LayerNorm(width)


class Attention(nn.Module):
    """Causal; heads share keys and values. With a `group` of context-parallel ranks: queries of a
    part of the sequence, keys and values of all of it."""

    group: dist.ProcessGroup | None = None

    def __init__(self, rng: Rng, width: int) -> None:
        super().__init__()
        self.head_dim = HEAD
        heads, kv_heads = rng.choice([(2, 2), (4, 2), (4, 4)])
        bias, out_bias, norms = (rng.random() < 0.5 for _ in range(3))
        self.q_proj = nn.Linear(width, heads * HEAD, bias)
        self.k_proj = nn.Linear(width, kv_heads * HEAD, bias)
        self.v_proj = nn.Linear(width, kv_heads * HEAD, bias)
        self.o_proj = nn.Linear(heads * HEAD, width, out_bias)
        if norms:
            self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, HEAD)) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        length, start = x.shape[1], 0
        if self.group is not None:
            start = length * self.group.rank()
            k, v = (all_gather_tensor_autograd(e.contiguous(), 1, self.group) for e in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        visible = torch.arange(k.shape[2]) <= torch.arange(length)[:, None] + start
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, rng: Rng, width: int) -> None:
        super().__init__()
        hidden, bias = 2 * rng.randint(1, 5), rng.random() < 0.5
        self.gate_proj = nn.Linear(width, hidden, bias)
        self.up_proj = nn.Linear(width, hidden, bias)
        self.down_proj = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, rng: Rng, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = _norm(rng, width), Attention(rng, width)
        self.post_attention_layernorm, self.mlp = _norm(rng, width), Mlp(rng, width)
        self.recomputes = rng.random() < 0.5

    def _run(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor) -> Tensor:
        return recompute(self._run, x, use_reentrant=False) if self.recomputes else self._run(x)


class Decoder(nn.Module):
    """With the names of Llama's plan; takes symbols and those that come next, returns the loss."""

    def __init__(self, rng: Rng) -> None:
        super().__init__()
        width = rng.choice([4, 6, 7])
        self.embed_tokens = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(rng, width) for _ in range(rng.randint(1, 3)))
        self.norm = _norm(rng, width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        if rng.random() < 0.5:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, symbols: Tensor, following: Tensor) -> Tensor:
        x = self.embed_tokens(symbols)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


class Run:
    def __init__(self, seed: int) -> None:
        self.rng, self.log = Rng(seed), list[Any]()
        torch.manual_seed(seed)
        self._twin = Decoder(Rng(seed)).double()
        self._generator = torch.Generator().manual_seed(seed)
        self._is_sgd = self.rng.random() < 0.5
        self._build()
        self._twin_optimizer = self._optimizer(self._twin)

    def _build(self) -> None:
        rng, world = self.rng, dist.get_world_size()
        tp_size, cp_size = rng.choice([(2, 1), (1, 2), (2, 2), (1, 1)][:world])
        sizes = {"tp_size": tp_size, "cp_size": cp_size}
        data, in_sequence = world // tp_size, tp_size > 1 and rng.random() < 0.5
        zero3_size = rng.choice([None, *(n for n in range(1, data + 1) if data % n == 0)])
        settings = settings_of_passes(rng, self._twin, world) | {"timeout": timedelta(seconds=25)}
        if rng.random() < 0.5:
            settings["auto_wrap_policy"] = rng.choice([None, {nn.Linear}, {Mlp}])
        if zero3_size not in (None, data):
            settings["outer"] = rng.choice(["zero1", "replicate", "shard"])
        self.log.append((sizes, zero3_size, in_sequence, settings))
        manager = ParallelManager(**sizes, zero3_size=zero3_size, sequence_parallel=in_sequence)
        module = copy.deepcopy(self._twin)
        module.zero_grad(set_to_none=True)
        self._cp = manager.mesh["cp"]
        for part in module.modules() if self._cp.size() > 1 else ():
            if isinstance(part, Attention):
                part.group = self._cp.get_group()
        self._dp = manager.mesh["dp"]
        self._model = manager.parallelize(module, **settings)
        self._own_optimizer = self._optimizer(self._model)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self._is_sgd:
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(self) -> None:
        for _ in range(STEPS):
            action = self.rng.choice(["", "_freeze", "_resume", "_states"])
            self.log.append(action)
            getattr(self, action, lambda: None)()
            self._step()
            expected = full_parameters(self._twin)
            assert_close_in_float64(full_parameters(self._model), expected, "parameter")

    def _batch(self) -> list[tuple[Tensor, Tensor]]:
        """Of each data-parallel rank."""
        shape = (self._dp.size(), 2, LENGTH + 1)
        symbols = torch.randint(VOCAB, shape, generator=self._generator)
        return [(each[:, :-1], each[:, 1:]) for each in symbols]

    def _own(self, batch: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        place, parts = self._cp.get_local_rank(), self._cp.size()
        return [each.chunk(parts, 1)[place] for each in batch[self._dp.get_local_rank()]]

    def _step(self) -> None:
        count, clips = self.rng.choice([1, 1, 2, 3]), self.rng.random() < 0.3
        self.log.append((count, clips))
        for number in range(count):
            batch, waits = self._batch(), number + 1 < count
            with self._model.no_sync() if waits else contextlib.nullcontext():
                loss = self._model(*self._own(batch))
                loss.backward()
            truth = [self._twin(*each) for each in batch]
            (torch.stack(truth).sum() / len(truth)).backward()
            if self._cp.size() == 1:
                own = truth[self._dp.get_local_rank()]
                assert_close_in_float64(loss.detach(), own.detach(), "loss")
        if clips:
            norm = self._model.clip_grad_norm_(0.1)
            expected = nn.utils.clip_grad_norm_(self._twin.parameters(), 0.1)
            assert_close_in_float64(norm, expected, "norm")
        assert_close_in_float64(full_gradients(self._model), full_gradients(self._twin), "gradient")
        for optimizer in (self._own_optimizer, self._twin_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def _freeze(self) -> None:
        names = [name for name, _ in self._twin.named_parameters()][1:]
        name = self.rng.choice(names)
        for model in (self._model, self._twin):
            parameter = dict(model.named_parameters())[name]
            parameter.requires_grad_(not parameter.requires_grad)

    def _states(self) -> None:
        full = checkpoint.get_model_state_dict(self._model, full=True)
        assert_close_in_float64(full, self._twin.state_dict(), "state")
        self._model.load_state_dict(self._model.state_dict() if self.rng.random() < 0.5 else full)

    def _resume(self) -> None:
        """From a checkpoint, on another mesh."""
        with folder_of_ranks() as folder:
            checkpoint.save(folder, self._model, self._own_optimizer, step=1)
            values = full_parameters(self._twin)
            for parameter in self._twin.parameters():
                parameter.data.add_(1.0)
            self._build()
            checkpoint.load(folder, self._model, self._own_optimizer)
            self._twin.load_state_dict(values, strict=False)


def _train(seeds: range) -> None:
    for seed in seeds:
        with named("seed", seed):
            run = Run(seed)
            with named(run.log):
                run.train()


@pytest.mark.parametrize(("world_size", "seeds"), [(2, range(2)), (4, range(100, 101))])
def test_random_decoders_on_random_meshes_train_like_one_process(
    world_size: int, seeds: range, pytestconfig: pytest.Config, ranks: Any
) -> None:
    """As many seeds as `--seeds` says, from the same first one."""
    stop = seeds.start + (pytestconfig.getoption("--seeds") or len(seeds))
    for first in range(seeds.start, stop, 10):
        ranks(world_size, _train, range(first, min(first + 10, stop)), timeout=240)
