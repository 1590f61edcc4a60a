"""Random models under random settings train like one process that sees all batches.

In float64, so that the order of sums does not matter: what differs is an error.
"""

import contextlib
import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerzero import MixedPrecision, OffloadPolicy
from tests.harness.checks import Sum, assert_bitwise, assert_within, named
from tests.harness.plain_backend import make_plain_group
from tests.harness.random_models import Branches, random_model
from tests.harness.random_programs import ACTIONS, STEPS, Run
from tests.harness.simulated_device import simulated_device


class _Rounded(Run):
    """A program in low precision: one autocast around it, or units that compute in bfloat16.

    Each step begins with equal weights, because a rounding in a weight may become one in a cast.
    Both compute the same bits then, apart from the order in which gradients add up.
    """

    def __init__(self, seed: int, precision: MixedPrecision | None) -> None:
        self._precision, self._num_backwards = precision, 0
        # In float32 native and whole-tensor optimizers have nothing to compare with.
        given = {"memory_budget": None, "verify": None, "mixed_precision": precision}
        super().__init__(seed, torch.float32, **given)
        if self._steps_in_backward:
            self._model.step_in_backward(None)  # Each step has several backwards.
            self._steps_in_backward = False

    def _unsharded(self, seed: int) -> nn.Module:
        model = super()._unsharded(seed)
        for buffer in model.buffers() if self._precision is not None else ():
            buffer.data = buffer.data.to(torch.bfloat16)
        return model

    def train(self, actions: list[str], steps: int = STEPS) -> None:
        for _ in range(steps):
            self._zero_grad()
            action = self.rng.choice(actions)
            self.log.append(action)
            getattr(self, f"_{action}", lambda: None)()
            with self._model.summon_full_params(writeback=False), torch.no_grad():
                full = dict(self._model.named_parameters())
                for name, parameter in self._twin.named_parameters():
                    parameter.copy_(full[name])
            for parameter in self._model.parameters():
                parameter.grad = None
            self._step()
            for optimizer in self._optimizers:
                optimizer.step()

    def _step(self) -> None:
        Branches.uses_all = self.rng.random() < 0.7
        ways = [*self.rng.choices(["no_grad", "wait", "backward", "no_sync"], k=3), "backward"]
        self.log.append((ways, Branches.uses_all))
        passes = list(zip(ways, (self._batches() for _ in ways), strict=True))
        losses = self._run(self._model, [(way, each[self._rank]) for way, each in passes], 1)
        plain = self._plain()
        with self._added_up(plain) as sums:
            for rank in range(self._world):
                own = [(way, each[rank]) for way, each in passes]
                expected = self._run(plain, own, self._divisor)
                if rank == self._rank:
                    for loss, other in zip(losses, expected, strict=True):
                        assert_bitwise(loss, other * self._divisor, f"loss after {ways}")
        self._compare_gradients(sums)

    def _evaluate(self) -> None:
        """The next step compares as much."""

    def _plain(self) -> nn.Module:
        """What computes the twin's gradients: in bfloat16 a copy, with its hooks."""
        if self._precision is None:
            return self._twin
        low = copy.deepcopy(self._twin).to(self._precision.param_dtype)
        for one, other in zip(self._twin.parameters(), low.parameters(), strict=True):
            for hook in (one._backward_hooks or {}).values():
                other.requires_grad_(True).register_hook(hook)
            other.requires_grad_(one.requires_grad)
        return low

    def _run(
        self, model: nn.Module, passes: list[tuple[str, Tensor]], divisor: int
    ) -> list[Tensor]:
        """Forwards and backwards, the last of which synchronizes gradients; their losses."""
        is_sharded, waiting, losses = model is self._model, list[Tensor](), list[Tensor]()
        precision = self._precision
        casts = precision is not None and not (is_sharded and precision.cast_forward_inputs)
        # Units cast a weight at each use, as plain torch does without its cache.
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=precision is None, cache_enabled=is_sharded
        ):
            for way, batch in passes:
                batch = batch.to(torch.bfloat16) if casts else batch
                if way == "no_grad":
                    with torch.no_grad():
                        model(batch)
                    continue
                loss = model(batch).float().square().mean() / divisor
                losses.append(loss.detach())
                waiting += [loss] if loss.requires_grad else []
                if way == "wait" or not waiting:
                    continue
                with self._no_sync(way == "no_sync") if is_sharded else contextlib.nullcontext():
                    torch.stack(waiting).sum().backward()
                waiting = []
                self._num_backwards += 1
        return losses

    @contextlib.contextmanager
    def _added_up(self, model: nn.Module) -> Iterator[dict[str, Sum]]:
        """The sum in float32 of each parameter's gradients of the backwards inside."""
        sums: dict[str, Sum] = {}
        latest: dict[str, int] = {}
        self._roundings = Counter[str]()

        def add(name: str, gradient: Tensor) -> None:
            # Each reentrant recomputation is a backward of its own inside another one, and their
            # parts add up in the parameter's dtype.
            self._roundings[name] += latest.get(name) == self._num_backwards
            latest[name] = self._num_backwards
            value = gradient.detach().float()
            zero = torch.zeros_like(value)
            before = sums.get(name, Sum(zero, zero, 0))
            magnitudes = before.magnitudes + value.abs()
            sums[name] = Sum(before.value + value, magnitudes, before.count + 1)

        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        hooks = [p.register_hook(functools.partial(add, name)) for name, p in trainable]
        try:
            yield sums
        finally:
            for hook in hooks:
                hook.remove()
            model.zero_grad()

    def _compare_gradients(self, sums: dict[str, Sum]) -> None:
        low = torch.finfo(torch.float32 if self._precision is None else torch.bfloat16).eps
        sent = self._precision and (self._precision.reduce_dtype or torch.bfloat16)
        rounds = torch.finfo(sent or torch.float32).eps / torch.finfo(torch.float32).eps
        for name, parameter in self._model.named_parameters():
            gradient, sum_ = parameter.grad, sums.get(name)
            if gradient is None or sum_ is None:
                assert gradient is None or not gradient.any(), name
                assert sum_ is None or not sum_.value.any(), name
                continue
            bound = rounds * sum_.bound + self._roundings[name] * low * sum_.magnitudes
            own = slice(*parameter.layerzero.range)
            expected, bound = (each.reshape(-1)[own] for each in (sum_.value, bound))
            assert_within(gradient.reshape(-1), expected, bound, name)


def train(seed: int, make: Callable[[int], Run] = Run, actions: Sequence[str] = ACTIONS) -> Run:
    run = make(seed)
    with named(run.log):
        run.train([*actions])
    return run


BF16 = MixedPrecision(param_dtype=torch.bfloat16)
PRECISIONS = [
    None,
    BF16,
    dataclasses.replace(BF16, reduce_dtype=torch.float32),
    dataclasses.replace(BF16, reduce_dtype=torch.float32, cast_forward_inputs=False),
]
"""None: under autocast."""


def train_rounded(seed: int) -> Run:
    actions = ["nothing", "freeze", "unshard", "reshards", "gather", "write", "write"]
    precision = PRECISIONS[seed % len(PRECISIONS)]
    casts = precision is None or precision.cast_forward_inputs
    make = functools.partial(_Rounded, precision=precision)
    return train(seed, make, [*actions, *["raise"] * casts])


@pytest.mark.parametrize(("world_size", "seeds"), [(2, range(300, 308)), (4, range(500, 502))])
def test_random_models_in_low_precision_train_as_one_process(
    world_size: int, seeds: range, on_each_seed: Any
) -> None:
    on_each_seed(world_size, train_rounded, seeds, fresh=True)


@pytest.mark.parametrize(("world_size", "seeds"), [(2, range(8)), (4, range(100, 104))])
def test_random_models_train_like_one_process(
    world_size: int, seeds: range, on_each_seed: Any
) -> None:
    on_each_seed(world_size, train, seeds, fresh=True)


def _train_and_save(seed: int, root: str) -> None:
    run = Run(2 * seed)
    with named(run.log):
        run.train(MOVABLE, 3)
        run.save(f"{root}/{seed}")


def _load_and_train(seed: int, root: str) -> None:
    run = Run(2 * seed)
    with named(run.log):
        run.load(f"{root}/{seed}")
        run.train(MOVABLE, 3)


MOVABLE = [each for each in ACTIONS if each not in ("grow", "patch", "save_and_rebuild")]


@pytest.mark.parametrize(("before", "after", "seeds"), [(2, 3, range(2)), (4, 2, range(50, 51))])
def test_random_models_resume_on_another_number_of_ranks(
    before: int, after: int, seeds: range, on_each_seed: Any, tmp_path: Path
) -> None:
    on_each_seed(before, _train_and_save, seeds, str(tmp_path), fresh=True)
    on_each_seed(after, _load_and_train, seeds, str(tmp_path), fresh=True)


class _Apart(Run):
    """Each rank enters other modules, in each forward."""

    ways = ("zero3",)

    def _unsharded(self, seed: int) -> nn.Module:
        return random_model(seed, self._dtype, is_entered=True)

    def _build(self) -> None:
        """Each optional module is a unit, or has one inside."""
        parts = {n: p for n, p in self._twin.named_modules() if not isinstance(p, nn.ModuleDict)}
        names = [name for name in parts if self.rng.random() < 0.4]
        parts = {n: p for n, p in parts.items() if getattr(p, "way", "") == "entered"}
        names += [name + self.rng.choice(["", ".linear"]) for name in parts]
        self._given |= {
            "auto_wrap_policy": lambda _, fqn: fqn in names,
            "optional_modules": [*parts.values()],
            "optional_mean": "all",
            "timeout": timedelta(seconds=25),
        }
        super()._build()

    def _fail(self) -> None:
        """Passes that fail are in test_optional_modules.py."""

    def _compile(self) -> None:
        """What it draws at random, it would draw once."""

    def _freeze(self) -> None:
        super()._freeze()
        for each in (self._inner, self._twin):
            each[0].requires_grad_(True)  # Else ranks differ in whether they go backward.


def train_apart(seed: int, group: str = "named") -> Run:
    """`group`: "named"; "plain": messages carry no name; "device": that, and on a device."""
    given: dict[str, Any] = {}
    if group != "named":
        given = {"process_group": make_plain_group(timedelta(seconds=25)), "start": "given"}
    actions = [
        *("nothing", "evaluate", "freeze", "unshard", "reshards", "summon", "write"),
        *("states", "retain", "input_gradient", "phase", "not_finite", "join", "keep_graph"),
    ]
    with simulated_device() if group == "device" else contextlib.nullcontext() as device:
        run = train(seed, functools.partial(_Apart, **given), actions)
        assert device is None or device.findings == []
    return run


@pytest.mark.parametrize(
    ("world_size", "seeds", "group"),
    [
        (2, range(600, 604), "named"),
        (3, range(700, 702), "named"),
        # A unit unshard() between micro-batches, amid others; backwards inside a forward; a graph
        # that holds units; what is recomputed after its backward.
        (2, range(6060, 6061), "named"),
        *((3, range(seed, seed + 1), "named") for seed in (302, 7044, 7048, 7114)),
        (2, range(800, 801), "plain"),
        pytest.param(2, range(901, 903), "device", marks=pytest.mark.slow),
    ],
)
def test_random_models_whose_ranks_take_other_ways_train_like_one_process(
    world_size: int, seeds: range, group: str, on_each_seed: Any
) -> None:
    on_each_seed(world_size, train_apart, seeds, group)


def _train_on_a_device(seed: int) -> None:
    group = make_plain_group(timedelta(seconds=60))
    with simulated_device() as device:
        given = {
            "process_group": group,
            "offload": OffloadPolicy(params=seed % 4 < 2, grads=seed % 2 == 0),
            "memory_budget": None,
            "arena": False,
        }
        make = functools.partial(Run, start="given", **given)
        train(seed, make, ["nothing", "raise", "freeze", "join"])
        assert device.findings == []


def test_their_accesses_are_ordered_on_a_device(on_each_seed: Any) -> None:
    on_each_seed(2, _train_on_a_device, range(200, 204), fresh=True)
