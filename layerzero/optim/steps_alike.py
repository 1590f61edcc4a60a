"""Warns where ranks step one model differently: other learning rates, or steps that some left out.

Each rank steps its part of every parameter. So where a program decides by what one rank sees, parts
of one model are trained differently, and nothing fails:

    if p.grad.abs().max() > 10: continue              # by this rank's parts of the gradients
    ReduceLROnPlateau(optimizer).step(loss)           # by this rank's loss
    {"params": [p], "lr": 1 / p.shape[-1]}            # by the shape of a shard

At steps 1, 2, 4, 8, ... each rank puts a note into torch's store, from a thread, and the first rank
of each group compares them. Collectives are numbered alike on all ranks, so the number of the last
one tells whether as many steps were taken by then. Other steps cost a count.
"""

from __future__ import annotations

import json
import logging
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from layerzero.comm.onlooker import look_on
from layerzero.comm.run_names import own_connection
from layerzero.core.groups import ShardGroup
from layerzero.core.parameter_info import get_info
from layerzero.notices import warn_once
from layerzero.optim import attach
from layerzero.optim.in_backward import is_narrowed
from layerzero.runtime.root import RootState
from layerzero.runtime.sharded_params import Owner, owner_of_each

_PAUSE_S = 0.1
_EVERY = 1024
"""Steps between two notes, once there are more."""
_OPTIONS = ("lr", "weight_decay")

_logger = logging.getLogger(__name__)

_num_optimizers: WeakKeyDictionary[RootState, int] = WeakKeyDictionary()


class _Steps:
    """Of one optimizer on this rank."""

    difference: str | None
    """What the thread has found."""

    def __init__(self, owner: Owner, name: str) -> None:
        """`owner`: of one of its parameters."""
        root = owner.root
        _num_optimizers[root] = number = _num_optimizers.get(root, 0) + 1
        self.difference = None
        self._operations = weakref.ref(root.operations)
        self._name = name
        self._count = 0
        self._note: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._groups: list[tuple[str, ShardGroup]] = [
            (f"{place}/{number}", group)
            for group in (owner.placement.data_parallel or owner.placement).all_groups
            if group.size > 1 and (place := root.operations.place_on(group)) is not None
        ]
        self._store: dist.Store | None = None

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._count = count = self._count + 1
        if self.difference is not None:
            # Found by the first rank of a group, which warns.
            warn_once("unlike steps", self.difference, is_first=True, stacklevel=4)
            self.difference = None
        if (count & (count - 1) and count % _EVERY) or not self._groups or is_narrowed(optimizer):
            return
        operations = self._operations()
        if operations is None or operations.failure is not None:
            return
        self._names = {}
        options: dict[str, list[float | None]] = {}
        for group in optimizer.param_groups:
            values = [_plain(group.get(option)) for option in _OPTIONS]
            for parameter in group["params"]:
                info = get_info(parameter)
                if info is not None:
                    key = f"{zlib.crc32(info.fqn.encode()):x}"
                    self._names[key], options[key] = info.fqn, values
        self._note = {"steps": count, "issued": operations.count, "options": options}
        look_on(self, _look(count), _PAUSE_S, "layerzero-steps")

    def look(self, count: int) -> bool:
        """On the thread: publish the note of this step, and compare it. Whether to look again."""
        note = self._note
        if note["steps"] != count:
            return False  # A later one is on its way.
        try:
            return self._exchange(note)
        except (RuntimeError, ValueError) as error:
            # The store is gone, with the rank that serves it, or the default group was destroyed.
            _logger.debug("cannot compare steps between ranks: %s", error)
            return False

    def _exchange(self, note: Mapping[str, Any]) -> bool:
        count = note["steps"]
        if self._store is None:
            self._store = dist.PrefixStore("layerzero/steps", own_connection())
        is_open = False
        for place, group in self._groups:
            own = group.ranks[group.rank]
            self._store.set(f"{place}/{own}", json.dumps(note))
            if group.rank:
                continue
            for rank in group.ranks:
                key = f"{place}/{rank}"
                other = json.loads(self._store.get(key)) if self._store.check([key]) else None
                if other is None or other["steps"] < count:
                    is_open = True
                elif other["steps"] == count and self.difference is None:
                    self.difference = self._compare(own, note, rank, other)
        return is_open and self.difference is None

    def _compare(
        self, own: int, note: Mapping[str, Any], rank: int, other: Mapping[str, Any]
    ) -> str | None:
        steps = f"{self._name}, step {note['steps']}: "
        why = (
            " Each rank steps its part of every parameter, so all must step alike: decide by what "
            "all ranks share, such as a loss averaged over them, layerzero.global_norm(model), "
            'on_nonfinite="skip", or the shape of the whole parameter (p.layerzero.shape)'
        )
        for key, values in note["options"].items():
            theirs = other["options"].get(key, values)
            if theirs != values:
                here, there = (dict(zip(_OPTIONS, each, strict=True)) for each in (values, theirs))
                return (
                    f"{steps}{self._names.get(key, key)!r} has {here} on rank {own}, and {there} "
                    f"on rank {rank}.{why}"
                )
        if note["issued"] != other["issued"]:
            fewer = own if note["issued"] > other["issued"] else rank
            return f"{steps}rank {fewer} has left out steps that other ranks took.{why}"
        return None


def _look(count: int) -> Callable[[_Steps], bool]:
    return lambda steps: steps.look(count)


def _plain(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


@attach.on_first_step
def _count_steps(optimizer: torch.optim.Optimizer) -> None:
    known = owner_of_each()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = known.get(id(parameter))
            if owner is not None and owner.placement.num_ranks > 1:
                steps = _Steps(owner, type(optimizer).__name__)
                optimizer.register_step_post_hook(steps.after_step)
                return
