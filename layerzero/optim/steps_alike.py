"""Warns where ranks step one model differently: with other learning rates, with gradients or
weights that each has multiplied by a number of its own, or not at all.

Each rank steps its part of every parameter. So where a program decides by what one rank sees, parts
of one model are trained differently, and nothing fails:

    if p.grad.abs().max() > 10: continue              # by this rank's parts of the gradients
    ReduceLROnPlateau(optimizer).step(loss)           # by this rank's loss
    {"params": [p], "lr": 1 / p.shape[-1]}            # by the shape of a shard
    p.grad.div_(p.grad.std())                         # by the spread of a shard's gradient
    p.data.div_(p.data.square().mean().sqrt())        # by the size of a shard's weights

At steps 1, 2, 4, 8, ... each rank puts a note into torch's store, from a thread, and the first rank
of each group compares them. Collectives are numbered alike on all ranks, so the number of the last
one tells whether as many steps were taken by then. Other steps cost a count. What was done to
gradients and weights (edits_by_hand.py) is known of all but the first step.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from layerzero.comm.onlooker import look_on, prepare_thread
from layerzero.comm.run_names import own_connection
from layerzero.comm.streams import Event
from layerzero.core.groups import ShardGroup
from layerzero.core.parameter_info import get_info
from layerzero.notices import warn_once
from layerzero.optim import attach
from layerzero.optim.edits_by_hand import (
    Edit,
    Edits,
    GradientEdits,
    WeightEdits,
    difference,
    is_edited,
)
from layerzero.optim.in_backward import is_narrowed
from layerzero.runtime.root import RootState
from layerzero.runtime.sharded_params import Owner, owner_of_each

_PAUSE_S, _FIRST_PAUSE_S = 0.1, 0.005
"""Between looks of the thread. Short ones come first, for programs of a few quick steps."""
_EVERY = 1024
"""Steps between two notes, once there are more."""
_OPTIONS = ("lr", "weight_decay")
_EDITS = (
    ("between backward and step", "all gradients", "the gradient of"),
    ("since the step before", "all weights", "the weight of"),
)
"""Of gradients and of weights: when they were edited, and what all of them and one are called."""

_WHY = (
    " Each rank steps its part of every parameter, so all must step alike: decide by what all "
    "ranks share, such as a loss averaged over them, layerzero.global_norm(model), "
    'on_nonfinite="skip", or the shape of the whole parameter (p.layerzero.shape)'
)
_Options = dict[str, list[float | None]]
"""Checksum of a parameter's name -> its values."""

_logger = logging.getLogger(__name__)

_num_optimizers: WeakKeyDictionary[RootState, int] = WeakKeyDictionary()
_slots: dict[str, set[int]] = {}
"""Group -> those in use. Notes of one slot replace each other, so that optimizers that come and go
leave no more keys in the store than there were at a time."""


class _Note(NamedTuple):
    """What a rank had done at some step."""

    steps: int
    issued: int
    """Number of its last collective."""
    options: int
    """Checksum of all options."""
    has_edits: bool
    """Whether gradients have changed between backward and this step, or weights since the last."""


class _Seat(NamedTuple):
    """Where an optimizer's notes are."""

    slot: str
    """The beginning of their keys."""
    optimizer: str
    """The same on all ranks of the group, which may have given a slot to others meanwhile."""
    group: ShardGroup


@dataclass
class _Step:
    """One that is compared."""

    count: int
    issued: int
    options: _Options
    names: dict[str, str]
    """Checksum of a parameter's name -> the name."""
    read_edits: tuple[Callable[[], Edits] | None, ...]
    """Of each of `_EDITS`."""
    ended: Event
    """Edits can be read once the device has come here; None: there is no device to wait for."""
    edits: list[dict[str, Edit]] = field(default_factory=list)
    """Of each of `_EDITS`, by the checksum of the parameter's name; see `note`."""

    def note(self) -> _Note:
        """Read the edits, and return the note."""
        found = [{} if read is None else read() for read in self.read_edits]
        self.read_edits = ()  # They hold what was copied of each gradient and weight.
        self.edits = [{_key(name): edit for name, edit in each.items()} for each in found]
        text = json.dumps(self.options, sort_keys=True)
        has_edits = any(is_edited(edit) for each in self.edits for edit in each.values())
        return _Note(self.count, self.issued, zlib.crc32(text.encode()), has_edits)


class _Steps:
    """Of one optimizer on this rank."""

    def __init__(self, owner: Owner, optimizer: torch.optim.Optimizer) -> None:
        """`owner`: of one of its parameters."""
        root = owner.root
        _num_optimizers[root] = number = _num_optimizers.get(root, 0) + 1
        self._found: list[str] = []
        """What the thread has found, until it is told: after a step, or at the end."""
        weakref.finalize(self, _tell, self._found)
        self._context = weakref.ref(root.context)
        self._name = type(optimizer).__name__
        self._edits = GradientEdits(optimizer), WeightEdits(optimizer)
        self._num_writebacks = 0
        """When these began to look."""
        self._count = 0
        self._step: _Step | None = None
        """The last one that is compared."""
        self._note: _Note | None = None
        """The last one that was put into the store."""
        self._seats: list[_Seat] = [
            _Seat(self._take_slot(group), f"{place}/{number}", group)
            for group in (owner.placement.data_parallel or owner.placement).all_groups
            if group.size > 1 and (place := root.operations.place_on(group)) is not None
        ]
        self._store: dist.Store | None = None

    def _take_slot(self, group: ShardGroup) -> str:
        name = _key(",".join(map(str, group.ranks)))
        taken = _slots.setdefault(name, set())
        slot = next(each for each in itertools.count() if each not in taken)
        taken.add(slot)
        weakref.finalize(self, taken.discard, slot)
        return f"{name}/{slot}"

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        _, weights = self._edits
        weights.before_step()

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._count = count = self._count + 1
        _tell(self._found)
        if _is_compared(count):
            self._compare(optimizer)
        if _is_compared(count + 1):
            self._watch(optimizer)

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        context = self._context()
        if self._seats and context is not None and not is_narrowed(optimizer):
            self._num_writebacks = context.num_writebacks
            for edits in self._edits:
                edits.watch()

    def _compare(self, optimizer: torch.optim.Optimizer) -> None:
        gradients, weights = self._edits
        read_edits, context = (gradients.after_step(), weights.after_step()), self._context()
        if not self._seats or is_narrowed(optimizer):
            return
        if context is None or context.operations.failure is not None:
            return
        if context.num_writebacks != self._num_writebacks:
            # Rightly, each row may have got a factor of its own, and a rank may hold one row alone.
            read_edits = None, None
        names: dict[str, str] = {}
        options: _Options = {}
        for group in optimizer.param_groups:
            values = [_plain(group.get(option)) for option in _OPTIONS]
            for parameter in group["params"]:
                info = get_info(parameter)
                if info is not None:
                    key = _key(info.fqn)
                    names[key], options[key] = info.fqn, values
        count, issued = self._count, context.operations.count
        ended = context.streams.record_compute_event() if any(read_edits) else None
        self._step = _Step(count, issued, options, names, read_edits, ended)
        prepare = functools.partial(prepare_thread, context.device)
        look_on(self, _look(count), _PAUSE_S, "layerzero-steps", prepare, _FIRST_PAUSE_S)

    def look(self, count: int) -> bool:
        """On the thread: publish the note of this step, and compare it. Whether to look again."""
        step = self._step
        if step is None or step.count != count:
            return False  # A later one is on its way.
        if step.ended is not None and not step.ended.query():
            return True
        try:
            return self._exchange(step)
        except (RuntimeError, ValueError) as error:
            # The store is gone, with the rank that serves it, or the default group was destroyed.
            _logger.debug("cannot compare steps between ranks: %s", error)
            return False

    def _exchange(self, step: _Step) -> bool:
        if self._store is None:
            self._store = dist.PrefixStore("layerzero/steps", own_connection())
        store, is_open = self._store, False
        note = self._note
        is_new = note is None or note.steps != step.count
        if note is None or is_new:
            note = step.note()
        for slot, optimizer, group in self._seats:
            own = group.ranks[group.rank]
            if is_new:
                # The details are read only where they may differ.
                details = [optimizer, note, step.options, step.edits]
                store.set(f"{slot}/{own}/details", json.dumps(details))
                store.set(f"{slot}/{own}", json.dumps([optimizer, note]))
            if group.rank:
                continue
            keys = [f"{slot}/{rank}" for rank in group.ranks]
            if not store.check(keys):
                is_open = True
                continue
            for rank, text in zip(group.ranks, _read(store, keys), strict=True):
                of, values = json.loads(text)
                other = _Note(*values)
                if of != optimizer or other.steps < note.steps:
                    is_open = True
                elif other.steps == note.steps and rank != own and not self._found:
                    what = None
                    if other.options != note.options or other.has_edits or note.has_edits:
                        *of, options, edits = json.loads(store.get(f"{slot}/{rank}/details"))
                        if of == [optimizer, values]:
                            what = _other_option(step, own, options, rank)
                            what = what or _other_edit(step, own, edits, rank)
                    if what is None and other.issued != note.issued:
                        fewer = own if note.issued > other.issued else rank
                        what = f"rank {fewer} has left out steps that other ranks took"
                    if what is not None:
                        self._found.append(f"{self._name}, step {note.steps}: {what}.{_WHY}")
        self._note = note
        return is_open and not self._found


def _tell(found: list[str]) -> None:
    """Warn, on the first rank of a group: only it finds differences."""
    while found:
        warn_once("unlike steps", found.pop(), is_first=True, stacklevel=5)


def _other_option(step: _Step, own: int, theirs: _Options, rank: int) -> str | None:
    for key, values in step.options.items():
        if theirs.get(key, values) != values:
            here, there = (dict(zip(_OPTIONS, each, strict=True)) for each in (values, theirs[key]))
            return f"{step.names[key]!r} has {here} on rank {own}, and {there} on rank {rank}"
    return None


def _other_edit(step: _Step, own: int, theirs: list[dict[str, Any]], rank: int) -> str | None:
    for (when, of_all, of_one), ours, edits in zip(_EDITS, step.edits, theirs, strict=True):
        found = difference(ours, {key: Edit(*values) for key, values in edits.items()})
        if found is not None:
            key, here, there = found
            which = of_all if key is None else f"{of_one} {step.names[key]!r}"
            return (
                f"{when} {which} became {here} on rank {own}, and {there} on rank {rank}, as by a "
                "norm or mean of each rank's own parts"
            )
    return None


def _read(store: dist.Store, keys: list[str]) -> list[bytes]:
    # One question for all ranks, where the store can answer it; a file cannot.
    can_answer = store.has_extended_api()  # type: ignore[attr-defined]
    return store.multi_get(keys) if can_answer else [*map(store.get, keys)]


def _look(count: int) -> Callable[[_Steps], bool]:
    return lambda steps: steps.look(count)


def _is_compared(count: int) -> bool:
    return not count & (count - 1) or not count % _EVERY


def _key(name: str) -> str:
    return f"{zlib.crc32(name.encode()):x}"


def _plain(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


@attach.on_first_step
def _count_steps(optimizer: torch.optim.Optimizer) -> None:
    known = owner_of_each()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = known.get(id(parameter))
            if owner is not None and owner.placement.num_ranks > 1:
                steps = _Steps(owner, optimizer)
                optimizer.register_step_pre_hook(steps.before_step)
                optimizer.register_step_post_hook(steps.after_step)
                return
