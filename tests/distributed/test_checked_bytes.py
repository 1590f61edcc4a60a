"""`verify=`: single flipped bits are found, nothing else is called corruption, no rank steps; and
`model.step_signature()`: equal for equal bits, on any number of ranks and with any units."""

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import MixedPrecision, OffloadPolicy, ReductionPolicy, ZeRO3
from layerzero.errors import CorruptionError
from layerzero.verify.verifier import Verifier
from tests.distributed import test_experts as experts
from tests.distributed import test_tensor_parallel as tensor_parallel
from tests.harness.checks import named
from tests.harness.internals import Pending, RuntimeContext, ShardGroup, messages
from tests.harness.models import Block, Parts
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import KeptRanks, of_all_ranks, on_ranks
from tests.harness.recording import observed
from tests.harness.reference import seeded
from tests.harness.simulated_device import simulated_device

TIMEOUT = timedelta(seconds=20)
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SITES = ("wire", "full buffer")
REPLICA = "copy of a main shard"
"""Another site, for outer="replicate"."""
_CHECKED = ("all-gather", "outer all-gather", "reduce-scatter", "outer reduce-scatter")


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of a contiguous tensor, unseen by torch's version counters."""
    flat = tensor.detach().view(-1).data.view(torch.uint8)
    flat[bit // 8] ^= 1 << bit % 8


class Trials:
    """With one model and one optimizer, the same on all ranks. In each, one rank, the victim, flips
    one bit during one step; then every rank must raise CorruptionError, which names the operation
    and a rank, and neither weights nor optimizer state of any rank may have changed. Where nothing
    was flipped, no rank may raise."""

    found: Counter[str]
    """Flips that were found, by site."""

    def __init__(
        self,
        model: ZeRO3,
        optimizer: torch.optim.Optimizer,
        forward: Callable[[], torch.Tensor],
        rng: random.Random,
        backward_steps: bool = False,
    ) -> None:
        """
        Args:
            forward: runs the next batch; returns the loss.
            rng: in the same state on all ranks.
            backward_steps: `step_in_backward` is on.
        """
        self._model, self._optimizer, self._forward, self._rng = model, optimizer, forward, rng
        self._steps_itself = not backward_steps
        self._skip = -1
        """Checked collectives before the one whose bytes are flipped; -1: none is."""
        self._flipped: str | None = None
        """The operation whose bytes were flipped, and the rank that sent them."""
        self.found = Counter()

    def run(self, count: int, sites: Sequence[str] = SITES) -> None:
        def exchanged(
            pending: Pending, incoming: Any, _: Any, group: Any, *more: Any, **named: Any
        ) -> None:
            if pending.operation.verb in _CHECKED and self._skip >= 0:
                self._skip -= 1
                if self._skip < 0:
                    self._corrupt(pending, incoming, group)

        with observed(messages, "exchange", after=exchanged):
            for _ in range(2):
                self._step()
            for number in range(count):
                self._run_one(sites[number % len(sites)])
                if number % 7 == 0:
                    self._step()
            self._step()

    def _corrupt(
        self, pending: Pending, incoming: Sequence[torch.Tensor], group: ShardGroup
    ) -> None:
        """Flip a bit of what the collective delivers to this rank, once it has arrived."""
        verb = pending.operation.verb
        ranks = [*range(group.size)]
        if not (self._takes_own and "gather" in verb):
            ranks.remove(group.rank)
        source = self._draw.choice(ranks)
        arrives = pending.wait_for_data
        target = incoming[source]
        bit = self._draw.randrange(8 * target.nbytes) if target.nbytes else None

        def arrive() -> None:
            arrives()
            if self._flipped is None and bit is not None:
                self._flipped = f"{verb} of {pending.operation.unit}\0rank {group.ranks[source]}"
                flip(target, bit)

        pending.wait_for_data = arrive

    def _step(self) -> None:
        self._forward().backward()
        if self._steps_itself:
            self._optimizer.step()
        self._optimizer.zero_grad()

    def _memory(self) -> list[torch.Tensor]:
        states = [each for state in self._optimizer.state.values() for each in state.values()]
        return self._main_shards() + [each for each in states if isinstance(each, torch.Tensor)]

    def _main_shards(self) -> list[torch.Tensor]:
        root = self._model._root_state
        return [h.main_shard for unit in root.units for h in unit.handles]

    def _run_one(self, site: str) -> None:
        victim, seed = self._rng.randrange(dist.get_world_size()), self._rng.random()
        kept = [tensor.clone() for tensor in self._memory()]
        self._flipped, self._draw, toggle = None, random.Random(seed), None
        if dist.get_rank() == victim and site in SITES:
            # One of a step's checked collectives, of which there are about so many.
            self._skip = self._draw.randrange(3 * len(self._model._root_state.units) - 1)
            self._takes_own = site == "full buffer"  # Also what this rank copies itself.
        elif dist.get_rank() == victim:
            tensor = self._draw.choice([each for each in self._main_shards() if each.numel()])
            toggle = partial(flip, tensor, self._draw.randrange(8 * tensor.nbytes))
        error: CorruptionError | None = None
        try:
            if toggle is not None:
                toggle()
            self._step()
        except CorruptionError as raised:
            error = raised
            self._optimizer.zero_grad()
        if toggle is not None:
            toggle()
            self._flipped = f"comparison of replicas\0rank {victim}"
        self._skip = -1
        expected = of_all_ranks(self._flipped)[victim]
        if expected is None:
            assert error is None, f"nothing was flipped: {error}"
            return
        assert error is not None, f"{site}: not found: {expected!r}"
        for part in expected.split("\0"):
            assert part in str(error), f"{part!r} is not in {error}"
        for now, before in zip(self._memory(), kept, strict=True):
            same = torch.equal(now.view(-1).view(torch.uint8), before.view(-1).view(torch.uint8))
            assert same, f"{site}: the step that failed changed something"
        self.found[site] += 1


LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

Optimizer = Callable[..., torch.optim.Optimizer]
_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
_SGD = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
_NATIVE = functools.partial(layerzero.optim.AdamW, lr=1e-3)
_IN_8_BITS, _IN_BF16 = (functools.partial(_NATIVE, state=state) for state in ("8bit", "bfloat16"))
_WHOLE = functools.partial(
    layerzero.optim.WholeTensorOptimizer, optimizer_class=torch.optim.SGD, lr=1e-2
)
TWO_RANKS: dict[str, tuple[dict[str, Any], Optimizer]] = {
    "plain": ({}, _ADAMW),
    "bf16": ({"mixed_precision": BF16}, _SGD),
    "bf16 on the wire": ({"mixed_precision": LOW, "deterministic": True}, _NATIVE),
    "8-bit": ({"reduction": ReductionPolicy(in_flight="1GB")}, _IN_8_BITS),
    "offload": ({"offload": OffloadPolicy(params=True, grads=True)}, _ADAMW),
    "step in backward": ({"step_in_backward": True}, _ADAMW),
}
FOUR_RANKS: dict[str, tuple[dict[str, Any], Optimizer]] = {
    "zero1": ({"zero3_size": 2, "mixed_precision": BF16}, _ADAMW),
    "replicate": ({"zero3_size": 2, "outer": "replicate"}, _ADAMW),
    "shard": ({"zero3_size": 2, "outer": "shard", "reshard_after_forward": "compute_shard"}, _SGD),
    "zero1, in order": ({"zero3_size": 2, "deterministic": True}, _IN_BF16),
    "lanes": ({"zero3_size": 2, "reduction": ReductionPolicy(separate_groups=True)}, _WHOLE),
}


def _trials(settings: dict[str, Any], make: Optimizer, seed: int) -> Trials:
    given = dict(settings)
    backward_steps = given.pop("step_in_backward", False)
    model, optimizer, _ = _model(make, **given)
    if backward_steps:
        model.step_in_backward(optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def forward() -> torch.Tensor:
        loss: torch.Tensor = model(torch.randn(4, 5, generator=generator)).float().square().mean()
        return loss

    return Trials(model, optimizer, forward, random.Random(seed), backward_steps)


def _flip_under(names: dict[str, int], seed: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in names.items():
        settings, make = {**TWO_RANKS, **FOUR_RANKS}[name]
        trials = _trials(settings, make, seed)
        sites = (*SITES, REPLICA) if settings.get("outer") == "replicate" else SITES
        with named(f"settings {name!r}, seed {seed}"):
            trials.run(count, sites)
        found += trials.found
    return found


@on_ranks(2)
def test_single_flipped_bits_are_found_on_two_ranks() -> None:
    _micro_batches()
    _what_is_evaluated()
    _off()
    found = of_all_ranks(_flip_under(dict.fromkeys(TWO_RANKS, 6), 0))[0]
    assert all(found[site] >= 12 for site in SITES), found


@on_ranks(4)
def test_single_flipped_bits_are_found_in_layered_modes() -> None:
    found = of_all_ranks(_flip_under(dict.fromkeys(FOUR_RANKS, 3), 1))[0]
    assert all(found[site] >= 3 for site in SITES) and found[REPLICA], found


@pytest.mark.slow
def test_flipped_bits_are_found_on_three_ranks(ranks: KeptRanks) -> None:
    found = ranks(3, _flip_under, {"plain": 10, "8-bit": 5, "bf16": 5}, 2)[0]
    assert all(found[site] >= 5 for site in SITES), found


@pytest.mark.soak
def test_ten_thousand_flipped_bits(ranks: KeptRanks, request: pytest.FixtureRequest) -> None:
    """With `--seeds 200` (make soak); without, a few hundred."""
    scale = max(2, request.config.getoption("seeds") // 2)
    two = dict.fromkeys(TWO_RANKS, 15 * scale)
    four = dict.fromkeys(FOUR_RANKS, 8 * scale)
    found = ranks(2, _flip_under, two, 3, timeout=7200.0)[0]
    found += ranks(4, _flip_under, four, 4, timeout=7200.0)[0]
    print(f"found {sum(found.values())} flips: {dict(found)}")
    # The others are trials in which the step had no such collective, and nothing was flipped.
    assert sum(found.values()) >= 0.95 * (sum(two.values()) + sum(four.values()))


def _model(make: Optimizer = _ADAMW, **given: Any) -> tuple[ZeRO3, Any, Callable[[], None]]:
    given = {"verify": "always", "timeout": TIMEOUT, **given}
    torch.manual_seed(0)
    module = nn.Sequential(Block(), Block(), nn.Linear(5, 3))
    model = ZeRO3(module, auto_wrap_policy={Block}, **given)
    optimizer = make(model.parameters())

    def step() -> None:
        model(torch.ones(4, 5)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _micro_batches() -> None:
    """The bytes of a micro-batch are compared with the last one, also if a pass fails in between;
    then all of its micro-batches are dropped, as their sum is not right."""
    model, optimizer, step = _model()
    clean, clean_optimizer, clean_step = _model(verify=None)
    step()
    clean_step()
    for fails in (False, True):
        corrupted = mock.patch.object(Verifier, "_gathered", _flips_the_second())
        with corrupted, model.no_sync():
            model(torch.ones(4, 5)).square().mean().backward()
        if fails:
            with pytest.raises(ZeroDivisionError):
                loss = model(torch.ones(4, 5)).mean()
                loss.register_hook(lambda _: 1 // 0)
                loss.backward()
        with pytest.raises(CorruptionError, match="all-gather of"):
            model(torch.ones(4, 5)).square().mean().backward()
        for each, its in ((model, optimizer), (clean, clean_optimizer)):
            with each.no_sync():
                each(torch.ones(4, 5)).square().mean().backward()
            each(torch.ones(4, 5)).square().mean().backward()
            its.step()
            its.zero_grad()
        assert all(map(torch.equal, model.parameters(), clean.parameters()))


def _what_is_evaluated() -> None:
    model, _, step = _model()
    step()
    with torch.no_grad():
        model(torch.ones(4, 5))
        corrupted = mock.patch.object(Verifier, "_gathered", _flips_the_second())
        with corrupted, pytest.raises(CorruptionError, match="all-gather of"):
            model(torch.ones(4, 5))


def _off() -> None:
    model, _, step = _model(verify=None)
    assert type(model._root_state.context) is RuntimeContext
    step()
    with pytest.raises(ValueError, match="verify: expected 'sampled', 'always' or None"):
        _model(verify="often")
    names = {0: "always", 1: "sampled"}
    with pytest.raises(ValueError, match="verify"):
        _model(verify=names[dist.get_rank()])


def _flips_the_second() -> Callable[..., None]:
    """`Verifier._gathered` that flips a bit of the second gather on one rank."""
    real, number = Verifier._gathered, dist.get_rank()

    def gathered(self: Any, operation: Any, group: Any, sum_: Any, slices: Any, sent: Any) -> None:
        nonlocal number
        number += 1
        if number == 2:
            flip(slices[1 - group.rank], 9)
        real(self, operation, group, sum_, slices, sent)

    return gathered


@on_ranks(2)
def test_backends_whose_messages_carry_no_name_and_devices_are_checked_too() -> None:
    """Where the engine sees no message: what came is corrupted before its first use."""
    group = make_plain_group(TIMEOUT)
    for context in (contextlib.nullcontext(), simulated_device()):
        with context:
            _, _, step = _model(process_group=group)
            for _ in range(3):
                step()
            corrupted = mock.patch.object(Verifier, "_gathered", _flips_the_second())
            with corrupted, pytest.raises(CorruptionError, match="all-gather of"):
                step()
            step()


OPTIMIZERS: dict[str, Callable[[ZeRO3], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "native": lambda model: layerzero.optim.AdamW(model.parameters(), lr=0.1),
    "8bit": lambda model: layerzero.optim.AdamW(
        [p for p in model.parameters() if p.dtype == torch.float32], lr=0.1, state="8bit"
    ),
    "whole": lambda model: layerzero.optim.WholeTensorOptimizer(
        [p for name, p in model.named_parameters() if "blocks" in name and "weight" in name],
        torch.optim.AdamW,
        lr=0.1,
    ),
}


def _odd_model(**given: Any) -> ZeRO3:
    """With a scalar, an empty parameter, float64, a frozen one and one that is not sharded."""
    torch.manual_seed(0)
    module = Parts(
        blocks=nn.Sequential(Block(), Block()),
        scale=nn.Parameter(torch.tensor(1.5)),
        nothing=nn.Parameter(torch.empty(0, 3)),
        wide=nn.Parameter(torch.randn(7, dtype=torch.float64)),
        frozen=nn.Parameter(torch.randn(3), requires_grad=False),
        ignored=nn.Parameter(torch.randn(5)),
    )
    return ZeRO3(module, ignored_parameters=[module.ignored], **given)


def _signatures(settings: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, set[str]]:
    """By optimizer, the signatures after two steps under all of the settings."""
    found: dict[str, set[str]] = {name: set() for name in [*names, "none"]}
    for given in settings:
        found["none"].add(_odd_model(**given).step_signature())
        for name in names:
            model = _odd_model(**given)
            optimizer = OPTIMIZERS[name](model)
            for number in range(2):
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.full_like(parameter, 0.5 + number)
                optimizer.step()
            found[name].add(model.step_signature(optimizer))
    return found


SETTINGS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"auto_wrap_policy": {Block}}, {"auto_wrap_policy": {nn.Linear}}],
    3: [{}],
    4: [{"zero3_size": 2, "auto_wrap_policy": {Block}}, {"zero3_size": 2, "outer": "replicate"}],
}
"""By number of ranks."""


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((1, 2), ["AdamW", "8bit"]),
        pytest.param(SETTINGS.keys(), list(OPTIMIZERS), marks=pytest.mark.slow),
    ],
    ids=["units", "modes and optimizers"],
)
def test_signatures_do_not_depend_on_units_and_ranks(
    sizes: Sequence[int], names: list[str], ranks: KeptRanks
) -> None:
    everywhere = [
        found for size in sizes for found in ranks(size, _signatures, SETTINGS[size], names)
    ]
    for name, signatures in everywhere[0].items():
        assert len(signatures) == 1, name
        for found in everywhere:
            assert found[name] == signatures, name
    assert len(set.union(*everywhere[0].values())) == len(everywhere[0]), "all differ"


@on_ranks(2)
def test_every_change_changes_the_signature() -> None:
    model = _odd_model()
    optimizer = OPTIMIZERS["AdamW"](model)
    seen = [model.step_signature(optimizer)]
    last = dist.get_world_size() - 1
    shard = model._root_state.units[0].handles[0].main_shard
    moved = shard.clone()

    def note() -> None:
        seen.append(model.step_signature(optimizer))
        assert seen.count(seen[-1]) == 1, "the change is not seen"

    with torch.no_grad():
        if dist.get_rank() == last:
            shard[:2] = moved[:2].flip(0)
        note()
        shard.copy_(moved)
        assert model.step_signature(optimizer) == seen[0]
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    note()
    for state in optimizer.state.values():
        state["step"] += 1
    note()
    second = OPTIMIZERS["SGD"](model)
    assert model.step_signature({"a": optimizer, "b": second}) == seen[-1]


def _of_other_axes(kind: str) -> list[str]:
    if dist.get_world_size() == 1:
        build = tensor_parallel.Llama if kind == "tensor parallel" else experts.Model
        return [ZeRO3(seeded(build)).step_signature()]
    if kind == "tensor parallel":
        mesh = tensor_parallel.grid(dist.get_world_size() // 2)
        parts = [tensor_parallel.wrapped(mesh, in_sequence) for in_sequence in (True, False)]
        return [model.step_signature() for model in parts]
    return [experts.wrapped(ep).step_signature() for ep in (2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor parallel", "experts"])
def test_signatures_do_not_depend_on_tensor_parallel_ranks_and_experts(
    kind: str, ranks: KeptRanks
) -> None:
    (expected,) = ranks(1, _of_other_axes, kind)
    for found in ranks(4, _of_other_axes, kind):
        assert found == expected * 2
