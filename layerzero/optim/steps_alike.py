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
from collections.abc import Callable
from typing import Any, NamedTuple
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

_WHY = (
    " Each rank steps its part of every parameter, so all must step alike: decide by what all "
    "ranks share, such as a loss averaged over them, layerzero.global_norm(model), "
    'on_nonfinite="skip", or the shape of the whole parameter (p.layerzero.shape)'
)
_Options = dict[str, list[float | None]]
"""Checksum of a parameter's name -> its values."""

_logger = logging.getLogger(__name__)

_num_optimizers: WeakKeyDictionary[RootState, int] = WeakKeyDictionary()


class _Note(NamedTuple):
    """What a rank had done at some step."""

    steps: int
    issued: int
    """Number of its last collective."""
    options: int
    """Checksum of all options."""


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
        self._note = _Note(0, 0, 0)
        self._options: _Options = {}
        self._published = 0
        """Steps of the note that was put into the store last."""
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
        options: _Options = {}
        for group in optimizer.param_groups:
            values = [_plain(group.get(option)) for option in _OPTIONS]
            for parameter in group["params"]:
                info = get_info(parameter)
                if info is not None:
                    key = f"{zlib.crc32(info.fqn.encode()):x}"
                    self._names[key], options[key] = info.fqn, values
        text = json.dumps(options, sort_keys=True)
        self._note = _Note(count, operations.count, zlib.crc32(text.encode()))
        self._options = options
        look_on(self, _look(count), _PAUSE_S, "layerzero-steps")

    def look(self, count: int) -> bool:
        """On the thread: publish the note of this step, and compare it. Whether to look again."""
        note, options = self._note, self._options
        if note.steps != count:
            return False  # A later one is on its way.
        try:
            return self._exchange(note, options)
        except (RuntimeError, ValueError) as error:
            # The store is gone, with the rank that serves it, or the default group was destroyed.
            _logger.debug("cannot compare steps between ranks: %s", error)
            return False

    def _exchange(self, note: _Note, options: _Options) -> bool:
        if self._store is None:
            self._store = dist.PrefixStore("layerzero/steps", own_connection())
        store, is_open = self._store, False
        for place, group in self._groups:
            own = group.ranks[group.rank]
            if self._published != note.steps:
                # The options are read only where notes differ.
                store.set(f"{place}/{own}/options", json.dumps(options))
                store.set(f"{place}/{own}", json.dumps(note))
            if group.rank:
                continue
            keys = [f"{place}/{rank}" for rank in group.ranks]
            if not store.check(keys):
                is_open = True
                continue
            for rank, text in zip(group.ranks, _read(store, keys), strict=True):
                other = _Note(*json.loads(text))
                if other.steps < note.steps:
                    is_open = True
                elif other.steps == note.steps and other != note and self.difference is None:
                    what = None
                    if other.options != note.options:
                        theirs = json.loads(store.get(f"{place}/{rank}/options"))
                        what = self._other_option(own, options, rank, theirs)
                    if what is None and other.issued != note.issued:
                        fewer = own if note.issued > other.issued else rank
                        what = f"rank {fewer} has left out steps that other ranks took"
                    if what is not None:
                        self.difference = f"{self._name}, step {note.steps}: {what}.{_WHY}"
        self._published = note.steps
        return is_open and self.difference is None

    def _other_option(self, own: int, options: _Options, rank: int, theirs: _Options) -> str | None:
        for name, values in options.items():
            if theirs.get(name, values) != values:
                here, there = (
                    dict(zip(_OPTIONS, each, strict=True)) for each in (values, theirs[name])
                )
                fqn = self._names.get(name, name)
                return f"{fqn!r} has {here} on rank {own}, and {there} on rank {rank}"
        return None


def _read(store: dist.Store, keys: list[str]) -> list[bytes]:
    # One question for all ranks, where the store can answer it; a file cannot.
    can_answer = store.has_extended_api()  # type: ignore[attr-defined]
    return store.multi_get(keys) if can_answer else [*map(store.get, keys)]


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
