"""Prefetching and reduction as one policy each: the same as the arguments that say the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from layerzero import BackwardPrefetch, PrefetchPolicy, ReductionPolicy, ZeRO3
from tests.harness.checks import assert_bitwise
from tests.harness.models import CASES, Block, Mlp
from tests.harness.ranks import on_ranks
from tests.harness.recording import logged, recorded_operations
from tests.harness.reference import batches_of, forward_backward, seeded

POST = BackwardPrefetch.BACKWARD_POST
PAIRS = {
    "prefetch, ahead": (
        {"prefetch": PrefetchPolicy(forward=2, backward=POST, limit=3)},
        {"forward_prefetch": 2, "backward_prefetch": POST, "limit_all_gathers": 3},
    ),
    "prefetch, none": (
        {"prefetch": PrefetchPolicy(forward=False, backward=None, limit=False)},
        {"forward_prefetch": False, "backward_prefetch": None, "limit_all_gathers": False},
    ),
    "reduction": (
        {"reduction": ReductionPolicy(reduce="sum", accumulation="sharded", deterministic=True)},
        {"gradient_reduction": "sum", "accumulation": "sharded", "deterministic": True},
    ),
    "nothing": ({"prefetch": PrefetchPolicy(), "reduction": ReductionPolicy()}, {}),
}


def trained(options: dict[str, Any]) -> tuple[ZeRO3, list[object]]:
    """A model after a step of two micro-batches; what it logs of itself, and all that it sent
    and waited for."""
    with logged("layerzero.log") as texts:
        model = ZeRO3(seeded(lambda: Mlp(3)), auto_wrap_policy={Block}, zero3_size=2, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2)
    told: list[object] = [each.splitlines()[-1] for each in texts]  # What is gathered ahead.
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        with recorded_operations(model) as operations:
            with model.no_sync():
                forward_backward(model, first[dist.get_rank()])
            forward_backward(model, second[dist.get_rank()])
            told += [str(each) for each in operations]
        optimizer.step()
        optimizer.zero_grad()
    return model, told


@on_ranks(4)
def test_a_policy_is_its_arguments() -> None:
    told = set()
    for name, (policies, flat) in PAIRS.items():
        model, own = trained(policies)
        other, expected = trained(flat)
        assert own == expected, name
        for one, another in zip(model.parameters(), other.parameters(), strict=True):
            assert_bitwise(one, another, name)
        told.add((*own, *next(iter(model.parameters())).tolist()))
    # They change what is logged and sent, or the sum: else nothing was compared.
    assert dist.get_rank() or len(told) == len(PAIRS)


@on_ranks(1)
def test_what_is_said_twice_is_refused() -> None:
    def refuses(kind: type[Exception], pattern: str, **options: object) -> None:
        with pytest.raises(kind, match=pattern):
            ZeRO3(Mlp(), **options)  # type: ignore[arg-type]

    prefetch, reduction = PrefetchPolicy(forward=2), ReductionPolicy()
    flat: tuple[tuple[str, object, dict[str, object]], ...] = (
        ("forward_prefetch", 3, {"prefetch": prefetch}),
        ("backward_prefetch", None, {"prefetch": prefetch}),
        ("limit_all_gathers", "2GB", {"prefetch": prefetch}),
        ("gradient_reduction", "sum", {"reduction": reduction}),
        ("accumulation", "sharded", {"reduction": reduction}),
        ("deterministic", True, {"reduction": reduction}),
    )
    for name, value, policy in flat:
        pattern = f"{name}={value!r} are both given; pass only one"
        refuses(ValueError, pattern, **policy, **{name: value})
    refuses(TypeError, "prefetch: expected a PrefetchPolicy or None, got 2", prefetch=2)
    refuses(TypeError, "reduction: expected a ReductionPolicy or None, got 'sum'", reduction="sum")


BAD: list[tuple[type[Exception], str, type, dict[str, object]]] = [
    (ValueError, "forward: expected a bool or a depth", PrefetchPolicy, {"forward": -1}),
    (TypeError, "backward: expected a BackwardPrefetch", PrefetchPolicy, {"backward": "pre"}),
    (ValueError, "limit: expected at least 1 unit", PrefetchPolicy, {"limit": 0}),
    (TypeError, "limit: expected bool, int", PrefetchPolicy, {"limit": 1.5}),
    (ValueError, "limit: expected a size such as", PrefetchPolicy, {"limit": "much"}),
    (ValueError, "reduce: expected 'mean' or 'sum'", ReductionPolicy, {"reduce": "max"}),
    (ValueError, "accumulation: expected 'sharded'", ReductionPolicy, {"accumulation": True}),
    (TypeError, "deterministic: expected True or", ReductionPolicy, {"deterministic": 1}),
    (TypeError, "separate_groups: expected True or", ReductionPolicy, {"separate_groups": 1}),
    (TypeError, "in_flight: expected a size such as", ReductionPolicy, {"in_flight": 2}),
    (ValueError, "in_flight: expected a size such as", ReductionPolicy, {"in_flight": "much"}),
]


def test_a_bad_policy_is_refused_when_it_is_made() -> None:
    for kind, pattern, policy, options in BAD:
        with pytest.raises(kind, match=f"{policy.__name__}.{pattern}"):
            policy(**options)
