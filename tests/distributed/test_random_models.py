"""Random models under random settings train like one process that sees all batches.

In float64, so that the order of sums does not matter: what differs is an error.
"""

import contextlib
import copy
import functools
import random
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
)
from torch.utils.checkpoint import checkpoint as recompute

from layerzero import BackwardPrefetch, OffloadPolicy, ZeRO3, rewrap, units
from tests.harness.checks import assert_close_in_float64, assert_within, named
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import KeptRanks, run_ranks
from tests.harness.reference import Terms
from tests.harness.simulated_device import simulated_device
from tests.harness.twin_machine import run_machines

WIDTH = 6
STEPS = 6


class Branches(nn.Module):
    """Uses what is inside it in one of several ways, or not at all."""

    uses_all = True  # set for all of them, by `_Run`

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.way = rng.choice(
            ["plain", "residual", "sometimes", "twice", "recomputed", "keyword", "passes", "writes"]
        )
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
        if self.way == "passes" and not Branches.uses_all:
            return x  # What another unit returned, or the batch.
        if self.way == "writes":  # Into a view of what a unit returned.
            y = self._once(x)[None].squeeze(0)
            y += x
            return y
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


def _model(seed: int, dtype: torch.dtype) -> nn.Module:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(*(_make(rng, rng.randint(1, 2)) for _ in range(rng.randint(1, 3))))
    model.to(dtype)
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
            [
                None,
                {Branches, Tied},
                {nn.Linear},
                lambda module, fqn: fqn in names,
                ModuleWrapPolicy({Branches, nn.Sequential}),
                functools.partial(size_based_auto_wrap_policy, min_num_params=rng.choice([30, 90])),
                always_wrap_policy,
            ]
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
        "verify": rng.choice([None, "sampled", "always"]),
    }


STARTS = ["given", "given", "written", "emptied", "emptied inside", "later", "first rank"]
"""Where a model's values come from."""


def _sharded(twin: nn.Module, start: str, settings: dict[str, Any]) -> ZeRO3:
    """A copy of `twin` in a `ZeRO3`; its values reach that in one of the ways of `STARTS`."""
    module = copy.deepcopy(twin)
    if start == "given":
        return ZeRO3(module, **settings)
    if start == "first rank":
        for parameter in module.parameters():
            parameter.data.add_(dist.get_rank())
        return ZeRO3(module, sync_module_states=True, **settings)
    module = _on_meta(module)
    if start == "later":
        model = ZeRO3(module, param_init_fn="later", **settings)
        with pytest.raises(RuntimeError, match="has no value yet"):
            model(torch.zeros(1, WIDTH, dtype=next(twin.parameters()).dtype))
        model.load_state_dict(twin.state_dict())
        return model
    twins = dict(zip(module.modules(), twin.modules(), strict=True))

    def initialise(part: nn.Module) -> None:
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if start != "written":
            if not any(each.is_meta for each in own):
                return
            part.to_empty(device="cpu", recurse=start == "emptied inside")
        with torch.no_grad():
            for name, value in twins[part].named_parameters(recurse=False):
                part.get_parameter(name).copy_(value)
            for name, value in twins[part].named_buffers(recurse=False):
                part.get_buffer(name).copy_(value)

    return ZeRO3(module, param_init_fn=initialise, **settings)


def _on_meta(module: nn.Module) -> nn.Module:
    module = module.to("meta")
    for part in module.modules():
        if isinstance(part, Tied):
            part.last.weight = part.first.weight
    return module


class _Boom(Exception):
    pass


class _Run:
    """One model, sharded, and its twin that is not."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype = torch.float64,
        start: str | None = None,
        **settings: Any,
    ) -> None:
        self._rng = random.Random(seed)
        self._dtype = dtype
        self._twin = _model(seed, dtype)
        settings = _settings(self._rng, self._twin, dist.get_world_size()) | settings
        self._divisor = dist.get_world_size() if settings["gradient_reduction"] == "mean" else 1
        start = self._rng.choice(STARTS) if start is None else start
        self._model = _sharded(self._twin, start, settings)
        self._set_lists()
        self._make_optimizer: Callable[..., torch.optim.Optimizer] = self._rng.choice(
            [torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)]
        )
        self._optimizers = [
            self._make_optimizer(each.parameters(), lr=1e-2) for each in (self._model, self._twin)
        ]
        self._clips = self._rng.random() < 0.3
        self._to_none = self._rng.random() < 0.7
        self._generator = torch.Generator().manual_seed(seed)
        self._hooked: set[str] = set()
        self._ran: set[str] = set()
        if seed % 2:  # the others may grow, and shards that are laid out anew lose their hooks
            self._put_hooks(random.Random(~seed))

    def _put_hooks(self, rng: random.Random) -> None:
        """Hooks that scale gradients on both: the model's see the sum, the twin's each summand."""
        twins = dict(self._twin.named_parameters())
        for name, sharded_param in self._model.named_parameters():
            if sharded_param.requires_grad and rng.random() < 0.15:
                self._hooked.add(name)
                for parameter in (sharded_param, twins[name]):
                    parameter.register_hook(lambda gradient: gradient * 0.5)
                sharded_param.register_post_accumulate_grad_hook(
                    lambda _, name=name: self._ran.add(name)
                )

    def _set_lists(self) -> None:
        """Of modules to gather ahead, which may name what is not needed, or in a wrong order."""
        every = units(self._model)
        for unit in every:
            if self._rng.random() < 0.1:
                chosen = self._rng.sample(every, self._rng.randint(0, min(3, len(every))))
                modules = [each.module for each in chosen if each is not unit]
                if self._rng.random() < 0.5:
                    unit.set_modules_to_forward_prefetch(modules)
                else:
                    unit.set_modules_to_backward_prefetch(modules)

    def train(self, others: list[str]) -> None:
        for _ in range(STEPS):
            self._zero_grad()
            getattr(self, f"_{self._rng.choice(others)}", lambda: None)()
            self._step()
        sharded_params = dict(self._model.named_parameters())
        for name, parameter in self._twin.named_parameters():
            own = parameter.detach().view(-1)[slice(*sharded_params[name].layerzero.range)]
            assert_close_in_float64(sharded_params[name].detach(), own, name)

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=self._to_none)

    def _batches(self) -> list[torch.Tensor]:
        """Every rank's."""
        shape = (dist.get_world_size(), 2, WIDTH)
        return list(torch.randn(shape, generator=self._generator, dtype=self._dtype))

    def _step(self) -> None:
        Branches.uses_all = self._rng.random() < 0.7
        num_micro_batches = self._rng.choice([1, 1, 2, 3])
        waits = self._rng.random() < 0.7
        for number in range(num_micro_batches):
            batches = self._batches()
            is_last = number + 1 == num_micro_batches
            flipped = self._some_names() if self._rng.random() < 0.2 else set()
            if self._rng.random() < 0.2:
                self._write_inside_next_forward(self._some_names())
            with self._model.no_sync() if waits and not is_last else contextlib.nullcontext():
                _backward(self._forward(self._model, batches[dist.get_rank()], flipped))
            for batch in batches:
                _backward(self._forward(self._twin, batch, flipped), self._divisor)
            if not is_last and self._rng.random() < 0.3:
                self._act_on_gradients()
        if self._clips and any(each.grad is not None for each in self._twin.parameters()):
            norm = self._model.clip_grad_norm_(0.5)
            twin_norm = nn.utils.clip_grad_norm_(self._twin.parameters(), 0.5)
            assert_close_in_float64(norm, twin_norm, "norm")
        self._fill_in_unused()
        for optimizer in self._optimizers:
            optimizer.step()

    def _some_names(self) -> set[str]:
        return {name for name, _ in self._twin.named_parameters() if self._rng.random() < 0.5}

    @staticmethod
    def _forward(model: nn.Module, batch: torch.Tensor, flipped: set[str]) -> torch.Tensor:
        """A forward; before its backward another one may run, with other parameters frozen."""
        output: torch.Tensor = model(batch)
        if flipped:
            chosen = [p for name, p in model.named_parameters() if name in flipped]
            for parameter in chosen:
                parameter.requires_grad_(not parameter.requires_grad)
            with torch.no_grad():
                model(batch)
            for parameter in chosen:
                parameter.requires_grad_(not parameter.requires_grad)
        return output

    def _write_inside_next_forward(self, names: set[str]) -> None:
        """As momentum encoders do: when the model's next forward has begun, scale weights of units
        whose own has not. The twin's, which runs after it, change with them."""
        twins = dict(self._twin.named_parameters())

        @torch.no_grad()
        def scale(*_: object) -> None:
            handle.remove()
            for name, parameter in self._model.named_parameters():
                if name in names and hasattr(parameter, "layerzero"):
                    for each in (parameter, twins[name]):
                        each.mul_(0.9)

        handle = self._model.module.register_forward_pre_hook(scale)

    def _act_on_gradients(self) -> None:
        """Between micro-batches: scale what has been accumulated, or clear all or some of it."""
        way, names = self._rng.choice(["scale", "zero", "some", "all"]), self._some_names()
        for model in (self._model, self._twin):
            for name, parameter in model.named_parameters():
                if way == "some" and name in names:
                    parameter.grad = None
                elif way in ("scale", "zero") and parameter.grad is not None:
                    parameter.grad.mul_(0.5 if way == "scale" else 0.0)
        if way == "all":
            self._zero_grad()

    def train_under_autocast(self, others: list[str]) -> None:
        """From equal weights in each step, because a rounding in a weight may become one in a cast.

        Both compute the same bits then, apart from the order of sums in float32.
        """
        for _ in range(STEPS):
            self._zero_grad()
            getattr(self, f"_{self._rng.choice(others)}", lambda: None)()
            with self._model.summon_full_params(writeback=False), torch.no_grad():
                full = dict(self._model.named_parameters())
                for name, parameter in self._twin.named_parameters():
                    parameter.copy_(full[name])
            for parameter in (*self._model.parameters(), *self._twin.parameters()):
                parameter.grad = None
            self._step_under_autocast()
            self._ran.clear()
            self._optimizers[0].step()

    def _step_under_autocast(self) -> None:
        Branches.uses_all = self._rng.random() < 0.7
        passes = self._rng.choices(["no_grad", "wait", "backward", "no_sync"], k=3)
        batches = [self._batches() for _ in range(len(passes) + 1)]
        rank = dist.get_rank()
        _run_under_autocast(self._model, passes, [each[rank] for each in batches], 1)
        terms = Terms()
        with terms.collected(list(self._twin.parameters()), 1.0):
            for index in range(dist.get_world_size()):
                parts = [each[index] for each in batches]
                _run_under_autocast(self._twin, passes, parts, self._divisor)
        bounds = terms.bounds(self._twin)
        sharded_params = dict(self._model.named_parameters())
        for name, parameter in self._twin.named_parameters():
            gradient = sharded_params[name].grad
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if gradient is None:
                assert not expected.any(), f"{name} has no gradient after {passes}"
                continue
            own = slice(*sharded_params[name].layerzero.range)
            bound = torch.as_tensor(bounds[name]).expand_as(expected).reshape(-1)[own]
            expected = expected.view(-1)[own]
            assert_within(gradient, expected, bound, f"{name} after {passes}")

    def _fill_in_unused(self) -> None:
        """Where our gradient is zeros and the twin's is None, let its optimizer step as well."""
        sharded_params = dict(self._model.named_parameters())
        if self._to_none:
            trainable = {name for name in self._hooked if sharded_params[name].requires_grad}
            assert self._ran == {
                name for name in trainable if sharded_params[name].grad is not None
            }
        self._ran.clear()
        for name, parameter in self._twin.named_parameters():
            gradient = sharded_params[name].grad
            if parameter.grad is None and gradient is not None:
                assert not gradient.any(), name
                parameter.grad = torch.zeros_like(parameter)

    def _evaluate(self) -> None:
        batch = self._batches()[0]
        self._model.eval()
        with torch.no_grad():
            assert_close_in_float64(self._model(batch), self._twin(batch), "output")
        self._model.train()

    def _raise(self) -> None:
        modules = dict(self._model.named_modules())
        name = self._rng.choice([name for name, _ in self._twin.named_modules() if name])

        def boom(*_: object) -> None:
            raise _Boom

        with contextlib.suppress(_Boom), modules[name].register_forward_pre_hook(boom):
            _backward(self._model(self._batches()[0]))
        self._optimizers[0].zero_grad(set_to_none=self._to_none)

    def _keep_graph(self) -> None:
        """A graph from before a step goes backward after it: an error where torch's is one."""
        batch, raised = self._batches()[0], []
        outputs = [each(batch) for each in (self._model, self._twin)]
        self._step()
        self._zero_grad()
        for output in outputs:
            try:
                _backward(output)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
                raised.append(output)
        assert len(raised) in (0, 2)
        self._ran.clear()
        self._zero_grad()

    def _freeze(self) -> None:
        sharded_params, twins = (
            dict(self._model.named_parameters()),
            dict(self._twin.named_parameters()),
        )
        name = self._rng.choice(sorted(sharded_params))
        is_alone = sum(twin.requires_grad for twin in twins.values()) == 1
        requires_grad = not twins[name].requires_grad or is_alone
        sharded_params[name].requires_grad_(requires_grad)
        twins[name].requires_grad_(requires_grad)

    def _spoil(self) -> None:
        """What changes a parameter is refused; undone, it has done no harm."""
        owners = [
            m for m in self._model.modules() if any(True for _ in m.parameters(recurse=False))
        ]
        owner = self._rng.choice(owners)
        name, sharded_param = next(iter(owner.named_parameters(recurse=False)))
        with pytest.raises(RuntimeError, match="the model changed after wrapping: replaced"):
            setattr(owner, name, nn.Parameter(torch.zeros(1, dtype=torch.float64)))
            self._model(self._batches()[0])
        setattr(owner, name, sharded_param)
        owner.late = nn.Linear(2, 2)
        with pytest.raises(
            RuntimeError, match=r"the model changed after wrapping: added .*late\.weight"
        ):
            self._model.state_dict()
        del owner.late

    def _patch(self) -> None:
        for each in (self._model, self._twin):
            each.forward = functools.partial(lambda before, x: 0.9 * before(x), each.forward)

    def _grow(self) -> None:
        """A layer more: new optimizers, since the root's own parameters are laid out anew."""
        if self._hooked:
            return
        torch.manual_seed(self._rng.randrange(1000))
        layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for each in (self._model, self._twin):
            each.append(copy.deepcopy(layer))
        rewrap(self._model)
        self._optimizers = [
            self._make_optimizer(each.parameters(), lr=1e-2) for each in (self._model, self._twin)
        ]

    def _summon(self) -> None:
        with self._model.summon_full_params():
            full = dict(self._model.named_parameters())
            for name, parameter in self._twin.named_parameters():
                assert_close_in_float64(full[name].detach(), parameter.detach(), name)

    def _reload(self) -> None:
        """Both through torch's own state dicts, into weights of zero and fresh optimizers."""
        options = theirs.StateDictOptions(
            full_state_dict=self._rng.random() < 0.5,
            strict=False,  # a parameter that had no gradient yet has no state
        )
        by_name = self._rng.random() < 0.7
        for number, model in enumerate((self._model, self._twin)):
            optimizer = self._optimizers[number]
            optimizer.zero_grad()  # torch's functions make state only where there is no gradient
            weights, state = theirs.get_state_dict(model, optimizer, options=options)
            weights, state = copy.deepcopy((weights, state))
            own = copy.deepcopy(optimizer.state_dict())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            fresh = self._make_optimizer(model.parameters(), lr=1.0)
            if by_name:
                theirs.set_optimizer_state_dict(model, fresh, state, options=options)
            else:
                fresh.load_state_dict(own)
            theirs.set_model_state_dict(model, weights, options=options)
            self._optimizers[number] = fresh


def _backward(output: torch.Tensor, divisor: int = 1) -> None:
    loss = output.square().mean() / divisor
    if loss.requires_grad:
        loss.backward()


def _run_under_autocast(
    model: nn.Module, passes: list[str], batches: list[torch.Tensor], divisor: int
) -> None:
    """Forwards and backwards inside one autocast, the last of which synchronizes gradients.

    Units cast a weight at each use, as plain torch does without its cache.
    """
    waiting: list[torch.Tensor] = []
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=isinstance(model, ZeRO3)):
        for way, batch in zip([*passes, "backward"], batches, strict=True):
            if way == "no_grad":
                with torch.no_grad():
                    model(batch)
                continue
            loss = model(batch).float().square().mean() / divisor
            waiting += [loss] if loss.requires_grad else []
            if way == "wait" or not waiting:
                continue
            adds_up = way == "no_sync" and isinstance(model, ZeRO3)
            with model.no_sync() if adds_up else contextlib.nullcontext():
                torch.stack(waiting).sum().backward()
            waiting = []


def _run_on(
    config: pytest.Config, world_size: int, train: Callable[[range], None], seeds: range
) -> None:
    """As many seeds as `--seeds` says, from the same first one; a few to a group of ranks."""
    stop = seeds.start + (config.getoption("--seeds") or len(seeds))
    for first in range(seeds.start, stop, 16):
        run_ranks(world_size, train, range(first, min(first + 16, stop)), timeout=120)


def _train_under_autocast(seeds: range) -> None:
    for seed in seeds:
        with named(seed):
            run = _Run(seed, torch.float32)
            run.train_under_autocast(["nothing", "raise", "freeze"])


def test_random_models_under_autocast_train_as_one_process(
    pytestconfig: pytest.Config,
) -> None:
    _run_on(pytestconfig, 2, _train_under_autocast, range(300, 305))


def _train(seeds: range) -> None:
    for seed in seeds:
        with named(seed):
            _Run(seed).train(
                [
                    "nothing",
                    "evaluate",
                    "raise",
                    "freeze",
                    "summon",
                    "reload",
                    "spoil",
                    "patch",
                    "grow",
                    "keep_graph",
                ]
            )


@pytest.mark.parametrize(("world_size", "seeds"), [(2, range(5)), (4, range(100, 102))])
def test_random_models_train_like_one_process(
    world_size: int, seeds: range, pytestconfig: pytest.Config
) -> None:
    _run_on(pytestconfig, world_size, _train, seeds)


def _train_on_a_device(seeds: range) -> None:
    group = make_plain_group(timedelta(seconds=60))
    for seed in seeds:
        with named(seed), simulated_device() as device:
            offload = OffloadPolicy(params=seed % 4 < 2, grads=seed % 2 == 0)
            _Run(seed, start="given", process_group=group, offload=offload).train(
                ["nothing", "raise", "freeze"]
            )
            assert device.findings == []


def test_their_accesses_are_ordered_on_a_device(pytestconfig: pytest.Config) -> None:
    _run_on(pytestconfig, 2, _train_on_a_device, range(200, 204))


# Random sequences of what users do, failures included, leave the state of an unsharded model ------


_A_GROUP = 16


def test_random_actions_leave_the_state_of_an_unsharded_model(
    ranks: KeptRanks, pytestconfig: pytest.Config
) -> None:
    num_runs = pytestconfig.getoption("--seeds")
    if not num_runs:
        ranks(2, run_machines, range(2), 12)
        return
    for first in range(0, num_runs, _A_GROUP):
        seeds = range(first, min(first + _A_GROUP, num_runs))
        ranks(2, run_machines, seeds, 30, timeout=600)
