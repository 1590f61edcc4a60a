"""The engine's own objects, for tests that look inside: where one moves, only this file changes.

Tests of the integers in `flat/` import those themselves.
"""
# ruff: noqa: F401

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerzero.build import arguments, device, topology
from layerzero.build.build import build
from layerzero.build.device import check_device_type, current_accelerator
from layerzero.build.materialize import _kept_generators
from layerzero.build.wrap import plan_units
from layerzero.comm import collectives, exchanges, new_groups, ordered_sums, pending, streams
from layerzero.comm.collectives import reduce_scatter
from layerzero.comm.exchanges import broadcast
from layerzero.comm.gloo import messages, threads
from layerzero.comm.gloo.messages import Messages
from layerzero.comm.gloo.threads import FinishingStream
from layerzero.comm.new_groups import new_group
from layerzero.comm.pending import Operation, Pending
from layerzero.comm.streams import DeviceStream, InlineStream, Streams, Waitable, _OnStream
from layerzero.errors import CollectiveError
from layerzero.flat import flatten, groups, host_memory
from layerzero.flat.flat_param import FlatParam
from layerzero.flat.gradient_sums import GradientSums
from layerzero.flat.gradients import GradientBuffer
from layerzero.flat.groups import BACKEND_GRACE, describe_group, make_shard_group
from layerzero.flat.host_memory import HostMemory
from layerzero.flat.parameter_info import get_info
from layerzero.flat.placement import ShardGroup
from layerzero.module_tree import conversions
from layerzero.step import hooks, root
from layerzero.step.backward import BackwardPass
from layerzero.step.context import RuntimeContext
from layerzero.step.exec_order import MAX_AGE, MAX_KINDS, ExecOrderRecorder
from layerzero.step.extension import Extension
from layerzero.step.handle import FlatParamHandle
from layerzero.step.operations import Operations
from layerzero.step.reducer import GradientReducer
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState, root_of
from layerzero.step.scheduler import UnshardScheduler
from layerzero.step.tensors import find_tensors, move
from layerzero.step.unit import (
    GATHERING,
    ShardState,
    TrainingState,
    Unit,
    check_transition,
    get_unit,
)
from layerzero.watch import desync, diagnosis, events, watchdog
from layerzero.watch.events import EventPool, PooledEvent, stream_interface
from layerzero.watch.thread import run_periodically
from layerzero.watch.watchdog import Watchdog
from layerzero.wrapping.fsdp_arguments import to_arguments
from layerzero.wrapping.units import ordered_units
from layerzero.wrapping.zero3 import KEYWORDS


def inner_units(model: nn.Module) -> list[Unit]:
    """What `layerzero.units` shows views of, in the same order."""
    return ordered_units(model)


def root_state(model: nn.Module) -> RootState:
    """The state that all units of a model share."""
    unit = get_unit(model)
    assert unit is not None, "it is wrapped"
    return root_of(unit)


def engine_alone(module: nn.Module, **given: Any) -> RootState:
    """Shard a module without any feature: what `ZeRO3` does below layerzero/wrapping. Collective.

    Args:
        given: arguments of `ZeRO3`, those of the engine alone.
    """
    ours = to_arguments({"module": module, "process_group": None, **KEYWORDS, **given}, {})
    plan, checked = topology.plan_on_every_rank(
        module, ours, lambda: (arguments.check_arguments(ours), []), lambda *_: []
    )
    return build(plan, topology.agree_on_topology(plan, checked), checked)


def move_shards(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What `model.to(device)` does, for any function that returns a tensor in other memory."""
    for handle in (handle for unit in root_state(model).units for handle in unit.handles):
        conversions.move(handle, convert)
