"""Layered ZeRO: gathered over a shard group, owned over all ranks, in every mode and split."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from layerzero import MixedPrecision, ZeRO3, units
from tests.harness.checks import assert_bitwise, named
from tests.harness.compare import Shared, assert_trains_alike, linears, sharded, zero3
from tests.harness.internals import inner_units
from tests.harness.models import CASES, Block, Mlp
from tests.harness.random_programs import WEIGHTS
from tests.harness.ranks import on_ranks
from tests.harness.recording import recorded_operations
from tests.harness.reference import (
    OPTIMIZERS,
    batches_of,
    forward_backward,
    micro_batches_of,
    plain,
    seeded,
)
from tests.harness.traffic import SentBytes

MODES = ["zero1", "replicate", "shard"]


def _layered(case: str, zero3_size: int, mode: str, **options: Any) -> ZeRO3:
    return sharded(CASES[case], zero3_size=zero3_size, outer=mode, **options)


def _is_regrouped(zero3_size: int, mode: str) -> bool:
    """Whether shard groups are summed before all, and not all in one hop in rank order."""
    return 1 < zero3_size < dist.get_world_size() and mode != "shard"


@on_ranks(6, timeout=180)
def test_toy_models_train_in_every_mode_and_split(in_full: bool) -> None:
    """Three models, each in every third split; `make soak`: all in each."""
    few = ["transformer", "odd_shapes", "unused_parts"]
    splits = [(1, "zero1"), (3, "shard"), *itertools.product((2, 3), ("zero1", "replicate"))]
    for at, name in enumerate(CASES if in_full else few):
        batches, truth = batches_of(CASES[name], 6, steps=2), Shared(plain(CASES[name]))
        for size, mode in splits if in_full else splits[at::3]:
            with named(f"{name}, zero3_size={size!r}, {mode}"):
                model, regrouped = _layered(name, size, mode), _is_regrouped(size, mode)
                assert_trains_alike(model, truth, batches, regrouped=regrouped)


@on_ranks(4)
def test_a_mesh_of_two_axes_says_outer_and_inner() -> None:
    for shape, num_main_shards in (((2, 2), (4, 2, 4)), ((1, 4), (4, 4, 4)), ((4, 1), (4, 1, 4))):
        mesh = init_device_mesh("cpu", shape)
        for mode, expected in zip(MODES, num_main_shards, strict=True):
            model = zero3(Mlp, Block, process_group=mesh, outer=mode)
            assert_trains_alike(model, seeded(Mlp), regrouped=_is_regrouped(shape[1], mode))
            assert inner_units(model)[0].handles[0].placement.num_main_shards == expected


@on_ranks(4)
def test_units_wrapped_by_hand_share_their_groups() -> None:
    """The groups are made once, and equal placements count as one."""
    model = seeded(Mlp)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = ZeRO3(block, zero3_size=2)
    model = ZeRO3(model, zero3_size=2)
    groups = {h.placement.shard_group.process_group for u in inner_units(model) for h in u.handles}
    assert len(groups) == 1
    assert_trains_alike(model, seeded(Mlp), regrouped=True)
    with recorded_operations(model) as operations:
        forward_backward(model, batches_of(CASES["mlp"], 4, steps=1)[0][dist.get_rank()])
    presence = [operation for operation in operations if operation.verb == "gradient presence"]
    assert len(presence) == 2, "one for each axis"


@pytest.mark.parametrize(("world_size", "low"), [(4, True), (6, False)])
@on_ranks(timeout=120)
def test_losses_are_bitwise_those_of_every_split(world_size: int, low: bool) -> None:
    """With micro-batches, and clipping, whose norm is summed in one order too. On four ranks in
    every mode: the shard group decides what is cast where, not what comes out."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    batches = micro_batches_of(CASES["transformer"], world_size, steps=1, count=2) * 3

    def losses(zero3_size: int, mode: str, accumulation: str) -> list[float]:
        options = {"deterministic": True, "mixed_precision": precision if low else None}
        options["accumulation"] = accumulation
        model = _layered("transformer", zero3_size, mode, **options)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        found = []
        for step in batches:
            optimizer.zero_grad()
            first, last = step[dist.get_rank()]
            with model.no_sync():
                found.append(forward_backward(model, first).item())
            found.append(forward_backward(model, last).item())
            model.clip_grad_norm_(1.0)
            optimizer.step()
        return found

    for accumulation in ("sharded", "unsharded"):
        expected = losses(world_size, "zero1", accumulation)
        assert expected[-1] < expected[0], "it does not train"
        # A rank that has whole parameters has no shards of sums.
        sizes = range(1 + (accumulation == "sharded"), world_size)
        for size in (size for size in sizes if world_size % size == 0):
            for mode in MODES if world_size == 4 else ["zero1"]:
                assert losses(size, mode, accumulation) == expected, (size, mode, accumulation)


PARAMETER_NBYTES = 3 * 96 * 96 * 4


def _sent(mode: str, steps: int) -> dict[str, int]:
    """Bytes this rank of 6 sends in a step, over the shard group of 3, the outer group of 2."""
    model = linears(3, 96, zero3_size=3, outer=mode)
    batch = torch.randn(2, 96)
    forward_backward(model, batch)
    with SentBytes() as sent:
        for _ in range(steps):
            forward_backward(model, batch)
    place = dist.get_rank()
    inner = tuple(range(place // 3 * 3, place // 3 * 3 + 3))
    outer = (place % 3, place % 3 + 3)
    presence = 3 * steps
    return {
        "inner": sent.by_group.pop(inner, 0) - 2 * presence,
        "outer": sent.by_group.pop(outer, 0) - presence,
        "all": sum(sent.by_group.values()) - 5 * presence,
    }


@on_ranks(6)
def test_bytes_on_the_wire_are_those_of_the_formula() -> None:
    """docs/reference/layered.md: the outer group carries an inner-th of what one hop carries."""
    p, n, k = PARAMETER_NBYTES, 3, 2
    # Three units: five gathers, because the last of the forward stays, and three reductions.
    moved = (5 + 3) * p // 3
    inner = moved * (n - 1) // n
    own = p * (k - 1) // (n * k)
    for mode in ("zero1", "replicate"):
        sent = _sent(mode, 1)
        assert sent == {"inner": inner, "outer": 2 * own, "all": -15}, (mode, sent)
    sent = _sent("shard", 1)
    assert sent == {"inner": -6, "outer": -3, "all": moved * (n * k - 1) // (n * k)}, sent


def _resident(mode: str, precision: MixedPrecision | None, in_step: bool = False) -> int:
    """Bytes of parameters and gradients between backward and optimizer step; `in_step`: of
    parameters after a forward."""
    model = linears(3, 96, zero3_size=2, outer=mode, mixed_precision=precision)
    if in_step:
        with torch.no_grad():
            model(torch.randn(2, 96))
    else:
        forward_backward(model, torch.randn(2, 96))
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    for unit in inner_units(model):
        for handle in unit.handles:
            for buffer in (handle.compute_shard, handle.full, handle.gradients.buffer):
                storage = buffer.untyped_storage()
                storages[storage.data_ptr()] = storage
    storages.pop(0, None)
    return sum(storage.nbytes() for storage in storages.values())


@on_ranks(4)
def test_resident_bytes_are_those_of_the_formula() -> None:
    p, n, k = PARAMETER_NBYTES, 2, 2
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compute = {"zero1": p / n, "replicate": 0, "shard": 0}
    for mode, ranks in {"zero1": n * k, "replicate": n, "shard": n * k}.items():
        for precision, size in ((None, 1), (low, 2)):
            assert _resident(mode, precision) == 2 * p / ranks, "main shard, its gradient"
            during = p / ranks + compute[mode] / size
            assert _resident(mode, precision, in_step=True) == during, "and compute shard"


def _outer_gathers(model: ZeRO3, batch: torch.Tensor) -> int:
    with recorded_operations(model) as operations:
        forward_backward(model, batch)
    return sum(operation.verb == "outer all-gather" for operation in operations)


@on_ranks(4)
def test_compute_shards_are_gathered_once_an_optimizer_step() -> None:
    model = sharded(CASES["mlp"], zero3_size=2)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    num_units = len(units(model))
    assert _outer_gathers(model, batch) == num_units
    with model.no_sync():
        assert _outer_gathers(model, batch) == num_units, "weights may have changed"
        assert _outer_gathers(model, batch) == 0, "micro-batches add up"
    assert _outer_gathers(model, batch) == 0
    assert _outer_gathers(model, batch) == num_units


@on_ranks(4)
def test_a_unit_unsharded_by_hand_stays_until_weights_change() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = sharded(CASES["mlp"], zero3_size=2, mixed_precision=precision)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    root = next(unit for unit in inner_units(model) if unit.fqn == "")
    model.unshard()
    for _ in range(3):
        with torch.no_grad():
            model.module.blocks[0](batch)
        assert root.state.name == "UNSHARDED"
        assert model.module.head.weight.dim() == 2
    with torch.no_grad():
        for handle in root.handles:
            handle.main_shard.mul_(0.5)
        model.module.blocks[0](batch)
    assert root.state.name == "SHARDED"


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@on_ranks(6)
def test_compute_shards_kept_after_forward_serve_the_backward(low: bool) -> None:
    """Forward gathers over all six ranks, backward over three; then nothing is kept."""
    precision = MixedPrecision(param_dtype=torch.bfloat16) if low else None
    model = linears(
        3,
        96,
        zero3_size=3,
        outer="shard",
        reshard_after_forward="compute_shard",
        accumulation="unsharded",
        mixed_precision=precision,
    )
    batch = torch.randn(2, 96)
    p = PARAMETER_NBYTES // (2 if low else 1)
    handles = [handle for unit in inner_units(model) for handle in unit.handles]

    def kept() -> int:
        return sum(h.post_forward_shard.nbytes for h in handles if h.post_forward_shard is not None)

    first_of_group = dist.get_rank() // 3 * 3
    everyone, inner = tuple(range(6)), tuple(range(first_of_group, first_of_group + 3))
    for sync in (False, True, True):
        model.set_requires_gradient_sync(sync)
        first = not sync or kept() == 0
        with SentBytes() as sent:
            output = model(batch)
            assert kept() >= p * 2 // 3 // 3, "all but the unit that stays full"
            output.sum().backward()
        assert kept() == (0 if sync else p // 3)
        # A micro-batch without a reduction sends nothing in backward.
        gradients = p * 5 // 6 + 5 * 3 if sync else 0
        if first:
            assert sent.by_group[everyone] == p * 5 // 6 + gradients, (sync, sent.by_group)
            assert sent.by_group[inner] == 2 * p // 3 * 2 // 3
        else:  # The first unit stayed: two gathers in forward, two in backward.
            assert sent.by_group[everyone] == gradients
            assert sent.by_group[inner] == 4 * p // 3 * 2 // 3


@on_ranks(4)
def test_what_a_forward_gathered_is_not_used_after_a_write() -> None:
    own = batches_of(CASES["mlp"], 4, steps=1)[0][dist.get_rank()]
    for (mode, size), dtype in itertools.product(
        [("zero1", 2), ("shard", 2), ("zero1", 1), ("replicate", 2)],
        (torch.float32, torch.bfloat16),
    ):
        precision = MixedPrecision(param_dtype=dtype)
        options = {"mixed_precision": precision, "reshard_after_forward": "compute_shard"}
        model, plain = _layered("mlp", size, mode, **options), seeded(Mlp)
        for name, write in WEIGHTS.items():
            model(own)
            with torch.no_grad():
                for each in (model, plain):
                    write([*each.parameters()])
                expected = copy.deepcopy(plain).to(dtype)(own.to(dtype))
                assert_bitwise(model(own), expected, f"{mode}, {size}, {dtype}, {name}")


@on_ranks(4)
def test_sizes_that_do_not_fit_are_refused_on_every_rank() -> None:
    mesh, cube = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (2, 2, 1))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"zero3_size": 3}, "zero3_size: expected a divisor of the group size 4, got 3"),
        ({"process_group": cube}, r"a mesh of 3 axes \(2, 2, 1\); expected one axis"),
        ({"process_group": mesh, "zero3_size": 4}, "zero3_size: expected 2 as in the mesh, got 4"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            zero3(Mlp, **options)
    model = zero3(Mlp, Block, process_group=mesh, zero3_size=2)
    assert_trains_alike(model, seeded(Mlp), batches_of(CASES["mlp"], 4, steps=1), regrouped=True)
