"""`ZeRO3(arena=True)`: the same bits, addresses that stay, and hardly more memory."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import BackwardPrefetch, MixedPrecision, ZeRO3, units
from tests.harness.counted_memory import measure
from tests.harness.internals import Reduction, Unit
from tests.harness.models import WIDTH, Block, Parts
from tests.harness.planned_models import CASES
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.recording import observed

pytestmark = pytest.mark.since_torch("2.13")
STEPS = 8
BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LARGE = 1500
"""Width at which two ranks on gloo keep the own chunk of a reduction apart."""


def uneven(width: int = 48, hidden: tuple[int, ...] = (60, 200, 31, 90, 60)) -> nn.Module:
    """Blocks of 12 to 78 kB between layers that stay with the root; runs those it is told to."""

    def run(own: Any, x: Tensor, route: tuple[int, ...]) -> Tensor:
        x = own.stem(x)
        for index in route:
            x = own.blocks[index](x)
        return own.head(x)

    blocks = nn.ModuleList(Block(width, each) for each in hidden)
    return Parts(run, stem=nn.Linear(width, width), blocks=blocks, head=nn.Linear(width, 3))


ALL = (0, 1, 2, 3, 4)
ODD = (0, 3, 1, 4)


Addresses = dict[tuple[Any, ...], int]
"""Where buffers lay in a step: full ones at each use, inputs at each reduction."""


@contextmanager
def _noted() -> Iterator[Addresses]:
    found: Addresses = {}

    def shown(_: None, unit: Unit) -> None:
        for place, handle in enumerate(unit.handles):
            if not handle.is_whole:
                key = "full", unit.fqn, place, unit.context.in_backward, len(found)
                found[key] = handle.full.data_ptr()

    def sends(reduction: Reduction, *_: Any) -> None:
        gradients = reduction.handle.gradients
        found["input", reduction.unit.fqn, len(found)] = gradients.buffer.data_ptr()

    with observed(Unit, "show_unsharded", after=shown), observed(Reduction, "_start_hops", sends):
        yield found


def train(
    arguments: dict[str, Any],
    steps: int = STEPS,
    routes: tuple[tuple[int, ...], ...] = (ALL,),
    micro_batches: int = 1,
    frozen: tuple[str, ...] = (),
    lists: bool = False,
    fails: tuple[int, ...] = (),
    **model: Any,
) -> tuple[list[Tensor], list[Addresses], ZeRO3]:
    """The losses, and this rank's parameters at the end; addresses of each step; the model."""
    torch.manual_seed(0)
    module = uneven(**model)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    wrapped = ZeRO3(module, auto_wrap_policy={Block}, **arguments)
    if lists:
        blocks, of_model = module.blocks, units(wrapped)
        of_model[1].set_modules_to_forward_prefetch([blocks[2], blocks[1]])
        of_model[5].set_modules_to_backward_prefetch([blocks[3], blocks[2]])
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses, addresses = [], []
    for step in range(steps):
        if step in fails:
            with pytest.raises(IndexError):
                wrapped(torch.randn(3, module.stem.in_features), (0, 1, 7))
        with _noted() as found:
            for number in range(micro_batches):
                last = number == micro_batches - 1
                with nullcontext() if last else wrapped.no_sync():
                    x = torch.randn(3, module.stem.in_features)
                    loss = wrapped(x, routes[step % len(routes)]).square().mean()
                    loss.backward()
                    losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        addresses.append(found)
    return [*losses, *(p.detach().clone() for p in wrapped.parameters())], addresses, wrapped


SETTINGS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "default": (2, {}, {}),
    "own chunk apart": (2, {}, {"width": LARGE, "steps": 6}),
    "bfloat16": (2, {"mixed_precision": BFLOAT16}, {}),
    "accumulation": (2, {"accumulation": "unsharded"}, {"micro_batches": 3}),
    "sums in shards": (2, {"accumulation": "sharded"}, {"micro_batches": 3}),
    "layered bfloat16": (4, {"zero3_size": 2, "mixed_precision": BFLOAT16}, {}),
    "one hop": (
        4,
        {"zero3_size": 2, "outer": "shard", "reshard_after_forward": "compute_shard"},
        {},
    ),
    "frozen": (2, {}, {"frozen": ("blocks.1", "blocks.3.up", "stem")}),
    "two orders": (2, {}, {"routes": (ALL, ODD)}),
    "a later order": (2, {}, {"routes": (ALL, ALL, ALL, ODD), "steps": 16}),
    "three ahead": (2, {"forward_prefetch": 3, "limit_all_gathers": False}, {}),
    "a limit in bytes": (2, {"forward_prefetch": 3, "limit_all_gathers": "150KB"}, {}),
    "backward post": (2, {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, {}),
    "rows": (2, {"layout": "rows"}, {}),
    "failed passes": (2, {}, {"fails": (0, 4)}),
    "prefetch lists": (2, {}, {"lists": True}),
}


MORE = {"a later order": 1.2, "prefetch lists": 1.2}
"""Bytes of an arena over those taken at once, where they are more than 1.02: an order that came
after addresses had to stay adds a piece of memory, which no buffer shares with another piece. The
order of prefetch lists is known after two steps."""


def _compare(name: str) -> None:
    _, arguments, loop = SETTINGS[name]
    plain, *_ = train(arguments, **loop)
    values, addresses, model = train({**arguments, "arena": True}, **loop)
    assert all(map(torch.equal, plain, values))
    arena: Any = model.arena
    pieces = [(piece.data_ptr(), piece.nbytes) for _, piece in arena._pieces]
    for address in addresses[-1].values():
        assert any(0 <= address - start < nbytes for start, nbytes in pieces)
    most = MORE.get(name, 1.02) * arena.taken_nbytes + 4096
    assert 0 < arena.taken_nbytes <= arena.nbytes <= most, arena
    routes = loop.get("routes", (ALL,))
    for route in {*routes}:
        steps = enumerate(addresses)
        later = [each for step, each in steps if routes[step % len(routes)] == route]
        later = later[2 if "lists" in loop else 1 :]
        assert len(later) >= 2 and later[0]
        assert all(each == later[0] for each in later[1:])


@pytest.mark.parametrize("name", SETTINGS)
def test_bits_are_the_same_and_addresses_stay(ranks: KeptRanks, name: str) -> None:
    ranks(SETTINGS[name][0], _compare, name)


LONGER = {"long gpt": 1.023}
"""Logits are its peak, in a forward that holds one unit less than backward does."""


def _peaks(case: str, optimizer: str, precision: MixedPrecision | None) -> tuple[int, int]:
    of_case = CASES[case]
    peaks = []
    for arena in (False, True):
        torch.manual_seed(0)
        arguments = {"auto_wrap_policy": of_case.units, "arena": arena}
        arguments |= {} if precision is None else {"mixed_precision": precision}
        peaks.append(measure(of_case.make, of_case.batch(), optimizer, arguments, steps=6).peak)
    return peaks[0], peaks[1]


@pytest.mark.parametrize(
    ("case", "optimizer", "precision"),
    [
        ("gpt", "fused adamw", MixedPrecision(param_dtype=torch.bfloat16)),
        ("tower", "sgd", None),
        ("adapted", "sgd", None),
        *(pytest.param(case, "sgd", None, marks=pytest.mark.soak) for case in CASES),
    ],
)
def test_a_peak_is_hardly_higher(
    ranks: KeptRanks, case: str, optimizer: str, precision: MixedPrecision | None
) -> None:
    """Of steps whose optimizer makes no temporaries: the arena's memory is there between passes."""
    peaks = ranks(2, _peaks, case, optimizer, precision, timeout=200.0)
    # How late a thread frees what a reduction held differs between runs, and between ranks.
    plain, own = (max(each) for each in zip(*peaks, strict=True))
    assert own <= LONGER.get(case, 1.02) * plain, own / plain


@on_ranks(2)
def test_freezing_in_turn_adds_no_memory_for_ever() -> None:
    model = ZeRO3(uneven(), auto_wrap_policy={Block}, arena=True)
    kept = []
    for step in range(12):
        model.module.blocks[1].requires_grad_(step % 2 == 0)
        model(torch.ones(3, 48), ALL).sum().backward()
        assert model.arena is not None
        kept.append(model.arena.nbytes)
    assert kept[-1] == kept[4]


@on_ranks(2)
def test_it_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"memory_budget: .* leave out arena"):
        ZeRO3(nn.Linear(2, 2), arena=True, memory_budget="1GB")
    with pytest.raises(TypeError, match="arena: expected True or False"):
        ZeRO3(nn.Linear(2, 2), arena=1)
    inner = ZeRO3(nn.Linear(2, 2), arena=True)
    with pytest.raises(ValueError, match=r"arena, .* one was used on a ZeRO3 module inside"):
        ZeRO3(nn.Sequential(inner, nn.Linear(2, 2)))
    with (  # As of an older torch.
        mock.patch("torch.UntypedStorage", object),
        pytest.raises(NotImplementedError, match="arena: needs torch"),
    ):
        ZeRO3(nn.Linear(2, 2), arena=True)
    assert ZeRO3(nn.Linear(2, 2)).arena is None


def _losses_of_two(arena: bool) -> list[Tensor]:
    torch.manual_seed(0)
    trunk = ZeRO3(Block())
    actor, critic = (
        ZeRO3(nn.Sequential(trunk, nn.Linear(WIDTH, size)), arena=arena) for size in (3, 1)
    )
    found = []
    for _ in range(4):
        for model in (actor, critic):
            loss = model(torch.ones(2, WIDTH)).square().sum()
            loss.backward()
            found.append(loss.detach())
    found += [p.grad for model in (actor, critic) for p in model.parameters()]
    assert (actor.arena is critic.arena) and (actor.arena is not None) == arena
    return found


@on_ranks(2)
def test_models_that_share_a_unit_share_an_arena() -> None:
    assert all(map(torch.equal, *map(_losses_of_two, (False, True))))
