"""Each wait that the engine needs is missed: without it the simulated device finds a race.

Defects are in tests/harness/missing_waits.py. Each must be found for its own reason: the report
names the memory, and the two streams that use it in no order.
"""

import re
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import missing_waits, stream_uses
from tests.harness.fake_ranks import run_fake_ranks
from tests.harness.simulated_device import SimulatedDevice, simulated_device
from tests.harness.stream_uses import LAYERED, OFFLOADED, SETTINGS, wrapped

# A line for each defect and what it is found by, under the setting and the use that need the wait:
#   MEMORY, STREAM races EARLIER         uses memory in no order with what EARLIER did with it
#   MEMORY, HOME frees before EARLIER    HOME owns the memory, and has not waited for EARLIER
# "gather" is the stream of the group of all ranks; with an outer axis "inner" is that of the shard
# group, and "outer" that of the outer group.
ONE_SHARD_GROUP = """
[default: plain_steps]
without_waiting_for_marks: full buffer, gather races compute
without_waiting_for_marks: gradient buffer, gather races compute
without_waiting_for_gathers: full buffer, compute races gather
without_the_streams_event: full buffer, compute races gather
without_the_streams_event: full buffer, unshard frees before gather
without_the_event_of_weights: main shard, gather races compute
without_a_new_event_of_weights: main shard, gather races compute
without_the_unshard_stream_waiting: main shard, gather races compute
without_compute_waiting_for_unsharded_parameters: full buffer, compute races gather
without_waiting_for_the_gather: full buffer, compute races gather
without_waiting_before_frees: full buffer, unshard frees before compute
with_the_current_device: main shard, gather races compute
with_the_current_device: full buffer, unshard frees before compute
with_waits_of_the_current_device: full buffer, compute races gather
without_the_event_of_collected_gradients: gradient buffer, gather races compute
without_memory_of_compute_for_chunks: sum of a hop, reduce frees before compute
without_waiting_for_the_first_hop: gradient buffer, compute frees before gather
without_compute_waiting_for_reductions: gradient buffer, compute races gather
freeing_gradients_before_they_are_reduced: gradient buffer, compute frees before gather
[bfloat16: plain_steps]
without_the_event_of_weights: main shard, unshard races compute
without_the_unshard_stream_waiting: main shard, unshard races compute
without_waiting_before_frees: full buffer, gather races compute
without_memory_of_compute_for_chunks: sum of a hop, reduce frees before compute
[default: unused_gathers]
without_waiting_for_unused_gathers: main shard, compute races gather
[default: streaming]
without_waiting_before_frees: streamed bucket, unshard frees before compute
[deterministic: plain_steps]
without_waiting_for_the_first_hop: received parts, reduce races gather
[default: a_missing_gradient]
without_waiting_for_gradient_presence: gradient presence, compute races gather
[default: whole_tensors]
without_the_unshard_stream_waiting: packed pieces, gather races compute
without_waiting_for_gathers: packed pieces, compute races gather
without_waiting_for_gradients_to_owners: packed pieces, compute races gather
without_waiting_for_gradients_to_owners: packed pieces, compute frees before gather
without_waiting_for_values_from_owners: packed pieces, compute races gather
without_waiting_for_values_to_owners: packed pieces, compute races gather
"""
LAYERS = """
[zero1: plain_steps]
without_waiting_for_marks: main shard, pre_unshard races compute
without_waiting_for_gathers: full buffer, compute races inner
without_the_event_of_weights: main shard, pre_unshard races compute
without_the_cast_waiting: main shard, pre_unshard races compute
without_waiting_when_a_step_ends: compute shard, pre_unshard frees before inner
without_the_streams_event: full buffer, compute races inner
without_the_event_of_the_cast: compute shard, outer races pre_unshard
without_the_event_of_collected_gradients: gradient buffer, inner races compute
without_waiting_for_the_first_hop: sum of a hop, outer races inner
without_waiting_for_the_second_hop: sum of a hop, reduce races outer
without_waiting_for_the_outer_gather: compute shard, inner races outer
without_memory_of_compute_for_chunks: sum of a hop, reduce frees before compute
[replicate, bfloat16: plain_steps]
without_the_event_of_weights: main shard, unshard races compute
without_waiting_for_the_first_hop: sum of a hop, outer races inner
[sums in shards: accumulation]
without_waiting_for_the_first_hop: sum of a hop, reduce races inner
[replicate: plain_steps]
without_waiting_for_the_outer_gather: sum between hops, reduce races outer
[kept shards: plain_steps]
without_waiting_before_frees: shard kept for backward, inner races compute
"""
WHOLE_PARAMETERS = """
[whole parameters: plain_steps]
without_waiting_for_gathers: compute shard, compute races gather
without_the_event_of_weights: main shard, pre_unshard races compute
without_waiting_when_a_step_ends: compute shard, pre_unshard frees before compute
[whole parameters, replicated, bfloat16: plain_steps]
without_compute_waiting_for_whole_parameters: compute shard, compute races pre_unshard
"""
WITH_HOST = """
[parameters: plain_steps]
without_the_host_waiting: reduced chunk, host races offload
without_the_host_waiting: main shard, host races pre_unshard
without_the_event_of_landed_gradients: reduced chunk, host races offload
without_the_event_of_offloaded_chunks: sum of a hop, reduce frees before offload
without_waiting_on_the_offload_stream: sum of a hop, offload races gather
[parameters: optimizing_after_a_forward]
without_the_event_of_uploads: main shard, host races pre_unshard
without_the_event_of_weights: compute shard, pre_unshard races gather
[sums in shards: accumulation]
without_the_event_of_offloaded_chunks: sum of a hop, gather races offload
without_waiting_on_the_offload_stream: sum of a hop, offload races gather
[sums: accumulation]
without_waiting_on_the_offload_stream: gradient buffer, offload races compute
"""
ON_THE_CURRENT_STREAM = """
[default: plain_steps]
without_waiting_for_marks: full buffer, unshard races compute
without_waiting_for_gathers: full buffer, compute races unshard
without_the_event_of_weights: main shard, unshard races compute
without_waiting_before_frees: full buffer, unshard frees before compute
without_the_event_of_collected_gradients: gradient buffer, reduce races compute
without_compute_waiting_for_reductions: gradient buffer, compute frees before reduce
"""
"""Where collectives return no work, as NCCL's."""
GROUPS: dict[str, tuple[int, dict[str, dict[str, Any]], str]] = {
    "one shard group": (2, SETTINGS, ONE_SHARD_GROUP),
    "outer axis": (4, LAYERED, LAYERS),
    "whole parameters": (2, LAYERED, WHOLE_PARAMETERS),
    "host": (2, OFFLOADED, WITH_HOST),
    "on the current stream": (2, SETTINGS, ON_THE_CURRENT_STREAM),
}


def rows(table: str) -> list[tuple[str, str, str, str]]:
    """Defect, setting, use and reason of each line."""
    found, setting, use = [], "", ""
    for line in table.strip().splitlines():
        if heading := re.fullmatch(r"\[(.+): (\w+)\]", line):
            setting, use = heading.groups()
        else:
            defect, reason = line.split(": ", 1)
            found.append((defect, setting, use, reason))
    return found


def _found(device: SimulatedDevice) -> set[str]:
    everyone = " ".join(map(str, range(dist.get_world_size())))

    def name(stream: str) -> str:
        ranks = stream.removeprefix("the stream of ranks ")
        if ranks == stream:
            return stream.removeprefix("the ")
        return "gather" if ranks == everyone else "inner" if ranks in ("0 1", "2 3") else "outer"

    return {
        *(f"{r.memory}, {name(r.use.stream)} races {name(r.earlier.stream)}" for r in device.races),
        *(
            f"{free.memory}, {name(free.home)} frees before {name(free.earlier.stream)}"
            for free in device.early_frees
        ),
    }


def _not_found(
    settings: dict[str, dict[str, Any]], table: str, on_current_stream: bool
) -> list[str]:
    runs: dict[tuple[str, str, str], list[str]] = {}
    for *run, reason in rows(table):
        runs.setdefault((run[0], run[1], run[2]), []).append(reason)
    missed = []
    for (name, setting, use), reasons in runs.items():
        with (
            missing_waits.defect(name),
            simulated_device(on_current_stream=on_current_stream) as device,
        ):
            model = wrapped(**settings[setting])
            getattr(stream_uses, use)(model)
            del model
        found = _found(device)
        missed += [
            f"{name}, {setting}: {reason} not in {sorted(found)}"
            for reason in reasons
            if reason not in found
        ]
    return missed


@pytest.mark.parametrize(
    "group",
    ["one shard group", *(pytest.param(each, marks=pytest.mark.slow) for each in list(GROUPS)[1:])],
)
def test_it_is_found_for_its_own_reason(group: str) -> None:
    """The last rank's collectives run on the current stream, as in test_streams.py."""
    world_size, settings, table = GROUPS[group]
    is_last = group == "on the current stream"
    rank = world_size - 1 if is_last else 0
    assert run_fake_ranks((rank,), world_size, _not_found, settings, table, is_last) == [[]]
