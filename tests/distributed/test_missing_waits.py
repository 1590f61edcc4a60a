"""Each wait that the engine needs is missed: without it the simulated device finds a race.

Defects are in tests/harness/missing_waits.py. Each must be found for its own reason: the report
names the memory, and the two streams that use it in no order. The same for what blocks the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from layerzero import ZeRO3
from tests.harness import missing_waits as without
from tests.harness.fake_ranks import run_fake_ranks
from tests.harness.missing_waits import Defect
from tests.harness.simulated_device import SimulatedDevice, simulated_device
from tests.harness.stream_uses import (
    LAYERED,
    OFFLOADED,
    SETTINGS,
    a_missing_gradient,
    accumulation,
    optimizing_after_a_forward,
    plain_steps,
    streaming,
    train,
    unused_gathers,
    whole_tensors,
    wrapped,
)


@dataclass(frozen=True)
class Race:
    """`stream` uses memory in no order with what `earlier` did with it."""

    memory: str
    stream: str
    earlier: str


@dataclass(frozen=True)
class Free:
    """Memory that `home` owns is freed, and `home` has not waited for what `earlier` did."""

    memory: str
    home: str
    earlier: str


@dataclass(frozen=True)
class Blocks:
    what: str
    where: str


Row = tuple[Defect, str, Callable[[ZeRO3], None], Race | Free | Blocks]

GATHER = "the stream of group 0"
"""Of one shard group; with an outer axis of the first group that is used."""
OUTER, INNER = "the stream of group 1", "the stream of group 2"
COMPUTE, UNSHARD, REDUCE, OFFLOAD = "compute", "unshard", "reduce", "offload"
CAST, HOST = "pre_unshard", "the host"

FULL_LATE = Race("full buffer", COMPUTE, GATHER)
WHOLE_LATE = Race("compute shard", COMPUTE, GATHER)
FULL_EARLY = Race("full buffer", GATHER, COMPUTE)
FULL_FREED = Free("full buffer", UNSHARD, COMPUTE)
BUFFER_EARLY = Race("gradient buffer", GATHER, COMPUTE)
BUFFER_FREED = Free("gradient buffer", COMPUTE, GATHER)
WEIGHTS_EARLY = Race("main shard", GATHER, COMPUTE)
CAST_EARLY = Race("main shard", CAST, COMPUTE)
CAST_IN_PLACE_EARLY = Race("main shard", UNSHARD, COMPUTE)
PIECES_EARLY = Race("packed pieces", GATHER, COMPUTE)
PIECES_LATE = Race("packed pieces", COMPUTE, GATHER)
PIECES_FREED = Free("packed pieces", COMPUTE, GATHER)

ONE_GROUP: list[Row] = [
    (without.without_waiting_for_marks, "default", plain_steps, FULL_EARLY),
    (without.without_waiting_for_marks, "default", plain_steps, BUFFER_EARLY),
    (without.without_waiting_for_gathers, "default", plain_steps, FULL_LATE),
    (without.without_the_streams_event, "default", plain_steps, FULL_LATE),
    (
        without.without_the_streams_event,
        "default",
        plain_steps,
        Free("full buffer", UNSHARD, GATHER),
    ),
    (without.without_the_event_of_weights, "default", plain_steps, WEIGHTS_EARLY),
    (without.without_the_event_of_weights, "bfloat16", plain_steps, CAST_IN_PLACE_EARLY),
    (without.without_a_new_event_of_weights, "default", plain_steps, WEIGHTS_EARLY),
    (without.without_the_unshard_stream_waiting, "default", plain_steps, WEIGHTS_EARLY),
    (without.without_the_unshard_stream_waiting, "bfloat16", plain_steps, CAST_IN_PLACE_EARLY),
    (
        without.without_compute_waiting_for_unsharded_parameters,
        "default",
        plain_steps,
        FULL_LATE,
    ),
    (
        without.without_waiting_for_unused_gathers,
        "default",
        unused_gathers,
        Race("main shard", COMPUTE, GATHER),
    ),
    (without.without_waiting_for_the_gather, "default", plain_steps, FULL_LATE),
    (without.without_waiting_before_frees, "default", plain_steps, FULL_FREED),
    (without.without_waiting_before_frees, "bfloat16", plain_steps, FULL_EARLY),
    (
        without.without_waiting_before_frees,
        "default",
        streaming,
        Free("streamed bucket", UNSHARD, COMPUTE),
    ),
    (without.waiting_at_the_next_gather_only, "default", plain_steps, FULL_FREED),
    (without.waiting_after_the_free, "default", plain_steps, FULL_FREED),
    (without.with_full_buffers_of_the_first_user, "default", plain_steps, FULL_EARLY),
    (without.with_the_current_device, "default", plain_steps, WEIGHTS_EARLY),
    (without.with_the_current_device, "default", plain_steps, FULL_FREED),
    (without.with_waits_of_the_current_device, "default", plain_steps, FULL_LATE),
    (
        without.without_the_event_of_collected_gradients,
        "default",
        plain_steps,
        BUFFER_EARLY,
    ),
    (
        without.without_memory_of_compute_for_chunks,
        "default",
        plain_steps,
        Free("sum of a hop", REDUCE, COMPUTE),
    ),
    (
        without.without_memory_of_compute_for_chunks,
        "bfloat16",
        plain_steps,
        Free("sum of a hop", REDUCE, COMPUTE),
    ),
    (without.without_waiting_for_the_first_hop, "default", plain_steps, BUFFER_FREED),
    (
        without.without_waiting_for_the_first_hop,
        "deterministic",
        plain_steps,
        Race("received parts", REDUCE, GATHER),
    ),
    (
        without.without_waiting_for_gradient_presence,
        "default",
        a_missing_gradient,
        Race("gradient presence", COMPUTE, GATHER),
    ),
    (
        without.without_compute_waiting_for_reductions,
        "default",
        plain_steps,
        Race("gradient buffer", COMPUTE, GATHER),
    ),
    (
        without.freeing_gradients_before_they_are_reduced,
        "default",
        plain_steps,
        BUFFER_FREED,
    ),
    (
        without.collecting_on_reduce_at_once,
        "default",
        plain_steps,
        Race("unsharded gradient", REDUCE, COMPUTE),
    ),
    (
        without.collecting_on_reduce_after_a_wait,
        "default",
        plain_steps,
        Free("unsharded gradient", COMPUTE, REDUCE),
    ),
    (
        without.with_one_event_for_all,
        "default",
        plain_steps,
        Race("gradient buffer", COMPUTE, GATHER),
    ),
    (without.without_the_unshard_stream_waiting, "default", whole_tensors, PIECES_EARLY),
    (without.without_waiting_for_gathers, "default", whole_tensors, PIECES_LATE),
    (without.without_waiting_for_gradients_to_owners, "default", whole_tensors, PIECES_LATE),
    (without.without_waiting_for_gradients_to_owners, "default", whole_tensors, PIECES_FREED),
    (without.without_waiting_for_values_from_owners, "default", whole_tensors, PIECES_LATE),
    (without.without_waiting_for_values_to_owners, "default", whole_tensors, PIECES_LATE),
]
LAYERS: list[Row] = [
    (without.without_waiting_for_marks, "zero1", plain_steps, CAST_EARLY),
    (
        without.without_waiting_for_gathers,
        "zero1",
        plain_steps,
        Race("full buffer", COMPUTE, INNER),
    ),
    (without.without_the_event_of_weights, "zero1", plain_steps, CAST_EARLY),
    (without.without_the_event_of_weights, "replicate, bfloat16", plain_steps, CAST_IN_PLACE_EARLY),
    (without.without_the_cast_waiting, "zero1", plain_steps, CAST_EARLY),
    (
        without.without_waiting_when_a_step_ends,
        "zero1",
        plain_steps,
        Free("compute shard", CAST, INNER),
    ),
    (
        without.without_the_streams_event,
        "zero1",
        plain_steps,
        Race("full buffer", COMPUTE, INNER),
    ),
    (
        without.without_the_event_of_the_cast,
        "zero1",
        plain_steps,
        Race("compute shard", OUTER, CAST),
    ),
    (
        without.without_the_event_of_collected_gradients,
        "zero1",
        plain_steps,
        Race("gradient buffer", INNER, COMPUTE),
    ),
    (
        without.without_waiting_for_the_first_hop,
        "zero1",
        plain_steps,
        Race("sum of a hop", OUTER, INNER),
    ),
    (
        without.without_waiting_for_the_first_hop,
        "replicate, bfloat16",
        plain_steps,
        Race("sum of a hop", OUTER, INNER),
    ),
    (
        without.without_waiting_for_the_first_hop,
        "sums in shards",
        accumulation,
        Race("sum of a hop", REDUCE, INNER),
    ),
    (
        without.without_waiting_for_the_second_hop,
        "zero1",
        plain_steps,
        Race("sum of a hop", REDUCE, OUTER),
    ),
    (
        without.without_waiting_for_the_outer_gather,
        "zero1",
        plain_steps,
        Race("compute shard", INNER, OUTER),
    ),
    (
        without.without_waiting_for_the_outer_gather,
        "replicate",
        plain_steps,
        Race("sum between hops", REDUCE, OUTER),
    ),
    (
        without.without_waiting_before_frees,
        "kept shards",
        plain_steps,
        Race("shard kept for backward", OUTER, COMPUTE),
    ),
    (
        without.without_memory_of_compute_for_chunks,
        "zero1",
        plain_steps,
        Free("sum of a hop", REDUCE, COMPUTE),
    ),
]
WHOLE: list[Row] = [
    (without.without_waiting_for_gathers, "whole parameters", plain_steps, WHOLE_LATE),
    (without.without_the_event_of_weights, "whole parameters", plain_steps, CAST_EARLY),
    (
        without.without_waiting_when_a_step_ends,
        "whole parameters",
        plain_steps,
        Free("compute shard", CAST, COMPUTE),
    ),
    (
        without.without_compute_waiting_for_whole_parameters,
        "whole parameters, replicated, bfloat16",
        plain_steps,
        Race("compute shard", COMPUTE, CAST),
    ),
]
WITH_HOST: list[Row] = [
    (
        without.without_the_host_waiting,
        "parameters",
        plain_steps,
        Race("reduced chunk", HOST, OFFLOAD),
    ),
    (without.without_the_host_waiting, "parameters", plain_steps, Race("main shard", HOST, CAST)),
    (
        without.asking_instead_of_waiting,
        "parameters",
        plain_steps,
        Race("reduced chunk", HOST, OFFLOAD),
    ),
    (
        without.without_the_event_of_uploads,
        "parameters",
        optimizing_after_a_forward,
        Race("main shard", HOST, CAST),
    ),
    (
        without.without_the_event_of_landed_gradients,
        "parameters",
        plain_steps,
        Race("reduced chunk", HOST, OFFLOAD),
    ),
    (
        without.without_the_event_of_weights,
        "parameters",
        optimizing_after_a_forward,
        Race("compute shard", CAST, GATHER),
    ),
    (
        without.without_the_event_of_offloaded_chunks,
        "parameters",
        plain_steps,
        Free("sum of a hop", REDUCE, OFFLOAD),
    ),
    (
        without.without_waiting_on_the_offload_stream,
        "parameters",
        plain_steps,
        Race("sum of a hop", OFFLOAD, GATHER),
    ),
    (
        without.without_the_event_of_offloaded_chunks,
        "sums in shards",
        accumulation,
        Race("sum of a hop", GATHER, OFFLOAD),
    ),
    (
        without.without_waiting_on_the_offload_stream,
        "sums in shards",
        accumulation,
        Race("sum of a hop", OFFLOAD, GATHER),
    ),
    (
        without.without_waiting_on_the_offload_stream,
        "sums",
        accumulation,
        Race("gradient buffer", OFFLOAD, COMPUTE),
    ),
    (
        without.staging_shards_on_compute,
        "bfloat16 parameters",
        plain_steps,
        Free("staged main shard", COMPUTE, CAST),
    ),
    (
        without.staging_sums_on_compute,
        "sums",
        accumulation,
        Free("staged sum", COMPUTE, OFFLOAD),
    ),
]


def steady_steps(model: ZeRO3) -> None:
    train(model, 2, torch.optim.SGD)


def _blocks(defect: Defect, what: str, where: str = "Backward._finish_unit") -> Row:
    return defect, "default", steady_steps, Blocks(what, where)


BLOCKING: list[Row] = [
    _blocks(without.packing_by_a_table_on_the_device, "tolist", "GradientBuffer.collect"),
    _blocks(without.reading_a_list, "tolist"),
    _blocks(without.reading_a_number, "_local_scalar_dense"),
    _blocks(without.branching_on_a_tensor, "_local_scalar_dense"),
    _blocks(without.reading_into_numpy, "numpy"),
    _blocks(without.bringing_to_the_cpu, "cpu"),
    _blocks(without.choosing_by_values, "nonzero"),
    _blocks(without.choosing_by_a_mask, "index"),
    _blocks(without.comparing_tensors, "equal"),
    _blocks(without.sending_a_list_to_the_device, "tensor"),
    _blocks(without.copying_to_pageable_memory, "copy_"),
    _blocks(without.copying_and_waiting, "copy_"),
    _blocks(without.waiting_for_an_event, "synchronize of an event on compute"),
    _blocks(without.waiting_for_the_device, "synchronize of reduce"),
]
ON_CURRENT_STREAM: list[Row] = [
    (
        without.without_waiting_for_marks,
        "default",
        plain_steps,
        Race("full buffer", UNSHARD, COMPUTE),
    ),
    (
        without.without_waiting_for_gathers,
        "default",
        plain_steps,
        Race("full buffer", COMPUTE, UNSHARD),
    ),
    (
        without.without_the_event_of_weights,
        "default",
        plain_steps,
        Race("main shard", UNSHARD, COMPUTE),
    ),
    (without.without_waiting_before_frees, "default", plain_steps, FULL_FREED),
    (
        without.without_the_event_of_collected_gradients,
        "default",
        plain_steps,
        Race("gradient buffer", REDUCE, COMPUTE),
    ),
    (
        without.without_compute_waiting_for_reductions,
        "default",
        plain_steps,
        Free("gradient buffer", COMPUTE, REDUCE),
    ),
]
"""Where collectives return no work, as NCCL's."""
GROUPS: dict[str, tuple[int, dict[str, dict[str, Any]], list[Row]]] = {
    "one shard group": (2, SETTINGS, ONE_GROUP),
    "outer axis": (4, LAYERED, LAYERS),
    "whole parameters": (2, LAYERED, WHOLE),
    "host": (2, OFFLOADED, WITH_HOST),
    "blocking": (2, SETTINGS, BLOCKING),
    "on the current stream": (2, SETTINGS, ON_CURRENT_STREAM),
}


def _found(device: SimulatedDevice) -> set[Race | Free | Blocks]:
    return {
        *(Race(r.memory, r.use.stream, r.earlier.stream) for r in device.races),
        *(Free(f.memory, f.home, f.earlier.stream) for f in device.early_frees),
        *(Blocks(w.what, w.where) for w in device.host_waits),
    }


def _not_found(
    settings: dict[str, dict[str, Any]], rows: list[Row], on_current_stream: bool
) -> list[str]:
    runs: dict[tuple[Defect, str, Callable[..., None]], list[Race | Free | Blocks]] = {}
    for defect, setting, use, reason in rows:
        runs.setdefault((defect, setting, use), []).append(reason)
    missed = []
    for (defect, setting, use), reasons in runs.items():
        with defect(), simulated_device(on_current_stream=on_current_stream) as device:
            model = wrapped(**settings[setting])
            use(model)
            del model
        found = _found(device)
        missed += [
            f"{defect.__name__}, {setting}: {reason} not in {sorted(map(str, found))}"
            for reason in reasons
            if reason not in found
        ]
    return missed


@pytest.mark.parametrize(
    "group",
    ["one shard group", *(pytest.param(each, marks=pytest.mark.slow) for each in list(GROUPS)[1:])],
)
def test_it_is_found_for_its_own_reason(group: str) -> None:
    world_size, settings, rows = GROUPS[group]
    arguments = settings, rows, group == "on the current stream"
    for missed in run_fake_ranks((0, world_size - 1), world_size, _not_found, *arguments):
        assert missed == []


def test_there_are_many() -> None:
    rows = [row for _, _, each in GROUPS.values() for row in each]
    assert len({defect for defect, _, _, _ in rows}) >= 50, "kinds"
    waits = {
        (defect, setting, use) for defect, setting, use, why in rows if type(why) is not Blocks
    }
    assert len(waits) >= 50, "waits and memory, in settings that need them"
