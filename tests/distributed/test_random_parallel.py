"""Random decoders on random tensor- and context-parallel meshes train like one process that sees
all batches.

In float64, so that the order of sums does not matter: what differs is an error.
"""

import contextlib
import copy
import random
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from layerzero import OffloadPolicy, ParallelManager, ReductionPolicy, ZeRO3, checkpoint
from layerzero.optim import WholeTensorOptimizer
from tests.distributed.test_checkpoint_splits import LocalExperts
from tests.distributed.test_experts import (
    EXPERTS,
    WIDTH,
    Expert,
    Moe,
    NamedExperts,
    StackedExperts,
    expert_mesh,
    part_of,
)
from tests.harness.checks import assert_close_in_float64, named
from tests.harness.compare import assert_same_where_present
from tests.harness.decoder import VOCAB, Attention, Decoder, DecoderLayer, GatedMlp
from tests.harness.random_programs import folder_of_ranks, settings_of_passes
from tests.harness.reference import full_gradients, full_parameters
from tests.harness.whole_optimizers import Shampoo

HEAD, LENGTH, STEPS = 2, 8, 4  # A length that 2 x 2 ranks can split.
Rng = random.Random


def _norm(rng: Rng, width: int) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-6) if rng.random() < 0.6 else nn.LayerNorm(width)


def _attention(rng: Rng, width: int) -> Attention:
    heads = rng.choice([(2, 2), (4, 2), (4, 4)])
    return Attention(width, HEAD, *heads, *(rng.random() < 0.5 for _ in range(3)))


def _mlp(rng: Rng, width: int) -> GatedMlp:
    return GatedMlp(width, 2 * rng.randint(1, 5), rng.random() < 0.5)


def _layer(rng: Rng, width: int) -> DecoderLayer:
    parts = [draw(rng, width) for draw in (_norm, _attention, _norm, _mlp)]
    return DecoderLayer(*parts, recomputes=rng.random() < 0.5)


def _decoder(rng: Rng) -> Decoder:
    width = rng.choice([4, 6, 7])
    layers = [_layer(rng, width) for _ in range(rng.randint(1, 3))]
    return Decoder(width, layers, _norm(rng, width), tied=rng.random() < 0.5)


class Run:
    def __init__(self, seed: int) -> None:
        self.rng, self.log = Rng(seed), list[Any]()
        torch.manual_seed(seed)
        self._twin = self._unsharded(seed).double()
        self._generator = torch.Generator().manual_seed(seed)
        self._kind = Rng(~seed).choice(["sgd", "adamw", "whole"])
        self._build()
        self._twin_optimizer = self._optimizer(self._twin)

    def _unsharded(self, seed: int) -> nn.Module:
        return _decoder(Rng(seed))

    def _build(self) -> None:
        rng, world = self.rng, dist.get_world_size()
        tp_size, cp_size = rng.choice([(2, 1), (1, 2), (2, 2), (1, 1)][:world])
        sizes = {"tp_size": tp_size, "cp_size": cp_size}
        data, in_sequence = world // tp_size, tp_size > 1 and rng.random() < 0.5
        zero3_size = rng.choice([None, *(n for n in range(1, data + 1) if data % n == 0)])
        settings = settings_of_passes(rng, self._twin, world) | {"timeout": timedelta(seconds=25)}
        if rng.random() < 0.5:
            settings["auto_wrap_policy"] = rng.choice([None, {nn.Linear}, {GatedMlp}])
        if zero3_size not in (None, data):
            settings["outer"] = rng.choice(["zero1", "replicate", "shard"])
        self.log.append((sizes, zero3_size, in_sequence, settings))
        manager = ParallelManager(**sizes, zero3_size=zero3_size, sequence_parallel=in_sequence)
        module = copy.deepcopy(self._twin)
        module.zero_grad(set_to_none=True)
        cp = manager.mesh["cp"]
        self._part = cp.get_local_rank(), cp.size()
        for part in module.modules() if cp.size() > 1 else ():
            if isinstance(part, Attention):
                part.group = cp.get_group()
        dp = manager.mesh["dp"]
        self._place, self._num_batches = dp.get_local_rank(), dp.size()
        self._model = manager.parallelize(module, **settings)
        self._own_optimizer = self._optimizer(self._model)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self._kind == "whole":
            make = WholeTensorOptimizer if model is self._model else lambda given, kind: kind(given)
            return make(model.parameters(), Shampoo)
        if self._kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(self) -> None:
        for _ in range(STEPS):
            action = self.rng.choice(["", "_freeze", "_resume", "_states", "_summon"])
            self.log.append(action)
            getattr(self, action, lambda: None)()
            self._step()
            self._assert_same(full_parameters, "parameter")

    def _assert_same(self, read: Callable[[nn.Module], dict[str, Any]], what: str) -> None:
        assert_close_in_float64(read(self._model), read(self._twin), what)

    def _batch(self) -> list[tuple[Tensor, ...]]:
        """Of each data-parallel rank."""
        shape = (self._num_batches, 2, LENGTH + 1)
        symbols = torch.randint(VOCAB, shape, generator=self._generator)
        return [(each[:, :-1], each[:, 1:]) for each in symbols]

    def _own(self, batch: list[tuple[Tensor, ...]]) -> list[Tensor]:
        part, parts = self._part
        return [each.chunk(parts, 1)[part] for each in batch[self._place]]

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
            if self._part == (0, 1):
                own = truth[self._place]
                assert_close_in_float64(loss.detach(), own.detach(), "loss")
        if clips:
            norm = self._model.clip_grad_norm_(0.1)
            expected = nn.utils.clip_grad_norm_(self._twin.parameters(), 0.1)
            assert_close_in_float64(norm, expected, "norm")
        self._assert_same(full_gradients, "gradient")
        for optimizer in (self._own_optimizer, self._twin_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def _freeze(self) -> None:
        trained = [name for name, p in self._twin.named_parameters() if p.requires_grad]
        names = [name for name, _ in self._twin.named_parameters()][1:]
        name = self.rng.choice(names)
        chosen = self._alike(name)
        if name in trained and sum(self._alike(each) != chosen for each in trained) < 3:
            return
        for model in (self._model, self._twin):
            for own, parameter in model.named_parameters():
                info = getattr(parameter, "layerzero", None)
                if chosen == self._alike(own if info is None else info.fqn):
                    parameter.requires_grad_(not parameter.requires_grad)

    def _alike(self, name: str) -> str:
        """What `_freeze` chooses for this parameter, and for all others it returns the same of."""
        return name

    def _states(self) -> None:
        full = checkpoint.get_model_state_dict(self._model, full=True)
        self._assert_same(lambda m: full if m is self._model else m.state_dict(), "state")
        self._model.load_state_dict(self._model.state_dict() if self.rng.random() < 0.5 else full)

    def _summon(self) -> None:
        with self._model.summon_full_params(), torch.no_grad():
            for model in (self._model, self._twin):
                for parameter in model.parameters():
                    parameter.mul_(0.9)

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


class Layer(Moe):
    def __init__(self, rng: Rng, kind: type[nn.Module]) -> None:
        super().__init__(kind, top_k=rng.choice([1, 2]))
        self.shared = Expert() if rng.random() < 0.5 else None
        self.recomputes = rng.random() < 0.5

    def _run(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0.0 if self.shared is None else self.shared(x))

    def forward(self, x: Tensor) -> Tensor:
        return recompute(self._run, x, use_reentrant=False) if self.recomputes else self._run(x)


class Experts(nn.Module):
    def __init__(self, rng: Rng) -> None:
        super().__init__()
        self.kind = rng.choice([NamedExperts, StackedExperts, LocalExperts])
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(Layer(rng, self.kind) for _ in range(rng.randint(1, 3))))
        # What is exchanged needs gradients on all ranks, or on none: experts run without tokens.
        if self.kind is not NamedExperts and rng.random() < 0.5:
            frozen = [self.stem, *self.layers[: rng.randrange(len(self.layers))]]
            last = self.layers[len(frozen) - 1]
            for part in (*frozen, last.norm, *[last.router] * (rng.random() < 0.5)):
                part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.tanh(self.stem(x))).square().mean()


class RunOfExperts(Run):
    def _unsharded(self, seed: int) -> nn.Module:
        return Experts(Rng(seed))

    def _build(self) -> None:
        rng, world = self.rng, dist.get_world_size()
        sizes = [size for size in (1, 2, 4) if world % size == 0]
        ep, zero3_size = rng.choice(sizes), rng.choice([None, *sizes])
        mesh, kind = expert_mesh(ep), self._twin.kind
        settings = settings_of_passes(rng, self._twin, world) | {"timeout": timedelta(seconds=25)}
        settings["offload"] = rng.choice([None, OffloadPolicy(params=True, grads=True)])
        settings["reduction"] = rng.choice([None, ReductionPolicy(separate_groups=True)])
        same, blocks = mesh["edp"], rng.random() < 0.5
        if zero3_size not in (None, world):
            settings["outer"] = rng.choice(["zero1", "replicate", "shard"])
            if settings["outer"] == "replicate" and rng.random() < 0.5:
                same = expert_mesh(ep, 1)["outer", "edp"]
        own = {"process_group": same}
        if kind is LocalExperts:
            own["expert_numbers"] = mesh["ep"]

        def choose(module: nn.Module, fqn: str) -> Any:
            return own if isinstance(module, kind) else blocks and isinstance(module, Moe)

        self.log.append((ep, kind.__name__, same.ndim, blocks, zero3_size, settings))
        module = copy.deepcopy(self._twin)
        module.zero_grad(set_to_none=True)
        settings |= {"auto_wrap_policy": choose, "zero3_size": zero3_size}
        self._model = ZeRO3(part_of(module, ep), **settings)
        self._place, self._num_batches, self._part = dist.get_rank(), world, (0, 1)
        named = self._model.named_parameters()
        self._names = {name: parameter.layerzero.fqn for name, parameter in named}
        self._own_optimizer = self._optimizer(self._model)

    def _alike(self, name: str) -> str:
        """Of all experts, where what reaches a layer needs gradients by its experts alone: with
        one rank's trainable, only that rank would exchange gradients with the others."""
        return name if self._twin.stem.weight.requires_grad else re.sub(r"each\.\d+", "", name)

    def _batch(self) -> list[tuple[Tensor, ...]]:
        """Of so few tokens that some experts get none, and some none on any rank."""
        Moe.closed = self.rng.sample(range(EXPERTS), self.rng.randint(0, 2))
        shape = (self._num_batches, self.rng.randint(1, 5), WIDTH)
        return [(each,) for each in torch.randn(shape, generator=self._generator).double()]

    def _assert_same(self, read: Callable[[nn.Module], dict[str, Any]], what: str) -> None:
        own, everything = read(self._model), read(self._twin)
        own = {self._names.get(name, name): value for name, value in own.items()}
        assert_same_where_present(own, everything, what)


def _train(seed: int, kind: type[Run]) -> None:
    run = kind(seed)
    with named(run.log):
        run.train()


@pytest.mark.parametrize("kind", [Run, RunOfExperts])
@pytest.mark.parametrize(("world_size", "seeds"), [(2, range(3)), (4, range(256, 259))])
def test_random_models_on_random_meshes_train_like_one_process(
    world_size: int, seeds: range, kind: type[Run], on_each_seed: Any
) -> None:
    on_each_seed(world_size, _train, seeds, kind)
