"""Random models under random settings train like one process that sees all batches.

In float64, so that the order of sums does not matter: what differs is an error.
"""

from __future__ import annotations

import contextlib
import copy
import random
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from layerzero import BackwardPrefetch, OffloadPolicy, ZeRO3
from layerzero.core.parameter_info import get_info
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import run_ranks
from tests.harness.simulated_device import simulated_device

WIDTH = 6
STEPS = 6
CLOSE = {"rtol": 1e-8, "atol": 1e-8}


class Branches(nn.Module):
    """Uses what is inside it in one of several ways, or not at all."""

    uses_all = True  # set for all of them, by `_Run`

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.way = rng.choice(["plain", "residual", "sometimes", "twice", "recomputed", "keyword"])
        self.linear = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7)
        self.norm = nn.LayerNorm(WIDTH) if rng.random() < 0.5 else nn.Identity()
        self.inner = _make(rng, depth - 1)
        self.scale = nn.Parameter(torch.tensor(1.1)) if rng.random() < 0.3 else None
        self.unused = nn.Linear(3, 2) if rng.random() < 0.2 else None
        self.register_buffer("shift", torch.full((WIDTH,), 0.5) if rng.random() < 0.3 else None)

    def _once(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(torch.tanh(self.linear(x)))
        if self.scale is not None:
            y = y * self.scale
        return self.inner(y if self.shift is None else y + self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "plain":
            return self._once(x)
        if self.way == "sometimes" and not Branches.uses_all:
            return x * 2
        if self.way == "twice":
            return self._once(self._once(x) * 0.5)
        if self.way == "recomputed":
            return x + recompute(self._once, x, use_reentrant=False)
        return x + self._once(x=x)


class Tied(nn.Module):
    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.inner = _make(rng, depth - 1)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)))


def _make(rng: random.Random, depth: int) -> nn.Module:
    if depth <= 0:
        return nn.Linear(WIDTH, WIDTH)
    kind = rng.random()
    if kind < 0.6:
        return Branches(rng, depth)
    if kind < 0.75:
        return Tied(rng, depth)
    return nn.Sequential(*(_make(rng, depth - 1) for _ in range(rng.randint(1, 3))))


def _model(seed: int) -> nn.Module:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(*(_make(rng, rng.randint(1, 2)) for _ in range(rng.randint(1, 3))))
    model.to(torch.float64)
    parameters = list(model.parameters())
    if rng.random() < 0.3:
        for parameter in rng.sample(parameters[1:], len(parameters) // 4):
            parameter.requires_grad_(False)
    return model


def _settings(rng: random.Random, model: nn.Module, world_size: int) -> dict[str, Any]:
    names = {name for name, _ in model.named_modules() if name and rng.random() < 0.4}
    odd = rng.randrange(2)
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    zero3_size = rng.choice([None, *divisors])
    is_layered = zero3_size not in (None, world_size)
    outer = rng.choice(["zero1", "replicate", "shard"]) if is_layered else "zero1"
    return {
        "auto_wrap_policy": rng.choice(
            [None, {Branches, Tied}, {nn.Linear}, lambda module, fqn: fqn in names]
        ),
        "zero3_size": zero3_size,
        "outer": outer,
        "forward_prefetch": rng.choice([False, True, 2, 3]),
        "backward_prefetch": rng.choice([None, *BackwardPrefetch]),
        "limit_all_gathers": rng.choice([False, True, 1, 2, "1KB"]),
        "reshard_after_forward": rng.choice(
            [True, False, lambda module, fqn: zlib.crc32(fqn.encode()) % 2 == odd]
            + (["compute_shard"] if outer == "shard" else [])
        ),
        "accumulation": rng.choice(["auto", "sharded", "unsharded"]),
        "deterministic": rng.random() < 0.3,
        "gradient_reduction": rng.choice(["mean", "sum"]),
    }


class _Boom(Exception):
    pass


class _Run:
    """One model, sharded, and its twin that is not."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self._rng = random.Random(seed)
        self._twin = _model(seed)
        settings = _settings(self._rng, self._twin, dist.get_world_size()) | settings
        self._divisor = dist.get_world_size() if settings["gradient_reduction"] == "mean" else 1
        self._model = ZeRO3(copy.deepcopy(self._twin), **settings)
        optimizer = self._rng.choice([torch.optim.AdamW, torch.optim.SGD])
        self._optimizers = [
            optimizer(each.parameters(), lr=1e-2) for each in (self._model, self._twin)
        ]
        self._clips = self._rng.random() < 0.3
        self._to_none = self._rng.random() < 0.7
        self._generator = torch.Generator().manual_seed(seed)

    def train(self, others: list[str]) -> None:
        for _ in range(STEPS):
            self._zero_grad()
            getattr(self, f"_{self._rng.choice(others)}", lambda: None)()
            self._step()
        pieces = dict(self._model.named_parameters())
        for name, parameter in self._twin.named_parameters():
            info = get_info(pieces[name])
            assert info is not None
            torch.testing.assert_close(
                pieces[name].detach(), parameter.detach().view(-1)[slice(*info.range)], **CLOSE
            )

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=self._to_none)

    def _batches(self) -> list[torch.Tensor]:
        """Every rank's."""
        shape = (dist.get_world_size(), 2, WIDTH)
        return list(torch.randn(shape, generator=self._generator, dtype=torch.float64))

    def _step(self) -> None:
        Branches.uses_all = self._rng.random() < 0.7
        num_micro_batches = self._rng.choice([1, 1, 2, 3])
        waits = self._rng.random() < 0.7
        for number in range(num_micro_batches):
            batches = self._batches()
            is_last = number + 1 == num_micro_batches
            with self._model.no_sync() if waits and not is_last else contextlib.nullcontext():
                _backward(self._model(batches[dist.get_rank()]))
            for batch in batches:
                _backward(self._twin(batch), self._divisor)
        if self._clips:
            norm = self._model.clip_grad_norm_(0.5)
            twin_norm = nn.utils.clip_grad_norm_(self._twin.parameters(), 0.5)
            torch.testing.assert_close(float(norm), float(twin_norm), **CLOSE)
        self._fill_in_unused()
        for optimizer in self._optimizers:
            optimizer.step()

    def _fill_in_unused(self) -> None:
        """Where our gradient is zeros and the twin's is None, let its optimizer step as well."""
        pieces = dict(self._model.named_parameters())
        for name, parameter in self._twin.named_parameters():
            gradient = pieces[name].grad
            if parameter.grad is None and gradient is not None:
                assert not gradient.any(), name
                parameter.grad = torch.zeros_like(parameter)

    # What may happen between steps ----------------------------------------------------------

    def _evaluate(self) -> None:
        batch = self._batches()[0]
        self._model.eval()
        with torch.no_grad():
            torch.testing.assert_close(self._model(batch), self._twin(batch), **CLOSE)
        self._model.train()

    def _raise(self) -> None:
        modules = dict(self._model.named_modules())
        name = self._rng.choice([name for name, _ in self._twin.named_modules() if name])

        def boom(*_: object) -> None:
            raise _Boom

        with contextlib.suppress(_Boom), modules[name].register_forward_pre_hook(boom):
            _backward(self._model(self._batches()[0]))
        self._optimizers[0].zero_grad(set_to_none=self._to_none)

    def _freeze(self) -> None:
        pieces, twins = dict(self._model.named_parameters()), dict(self._twin.named_parameters())
        name = self._rng.choice(sorted(pieces))
        is_alone = sum(twin.requires_grad for twin in twins.values()) == 1
        requires_grad = not twins[name].requires_grad or is_alone
        pieces[name].requires_grad_(requires_grad)
        twins[name].requires_grad_(requires_grad)

    def _summon(self) -> None:
        with self._model.summon_full_params():
            full = dict(self._model.named_parameters())
            for name, parameter in self._twin.named_parameters():
                torch.testing.assert_close(full[name], parameter, **CLOSE, msg=name)


def _backward(output: torch.Tensor, divisor: int = 1) -> None:
    loss = output.square().mean() / divisor
    if loss.requires_grad:
        loss.backward()


def _train(seeds: range) -> None:
    for seed in seeds:
        with _named(seed):
            _Run(seed).train(["nothing", "evaluate", "raise", "freeze", "summon"])


@contextlib.contextmanager
def _named(seed: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.parametrize(("world_size", "seeds"), [(2, range(14)), (4, range(100, 104))])
def test_random_models_train_like_one_process(world_size: int, seeds: range) -> None:
    run_ranks(world_size, _train, seeds, timeout=120)


def _train_on_a_device(seeds: range) -> None:
    group = make_plain_group(timedelta(seconds=60))
    for seed in seeds:
        with _named(seed), simulated_device() as device:
            offload = OffloadPolicy(params=seed % 4 < 2, grads=seed % 2 == 0)
            _Run(seed, process_group=group, offload=offload).train(["nothing", "raise", "freeze"])
            assert sorted(set(device.races)) == []


def test_their_accesses_are_ordered_on_a_device() -> None:
    run_ranks(2, _train_on_a_device, range(200, 206), timeout=120)
