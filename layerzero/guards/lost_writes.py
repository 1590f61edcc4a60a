"""Detects changes to unsharded parameters that would be lost silently.

Unsharded parameters are copies, freed after use. Some things that plain torch allows never reach
the sharded parameters; they raise at the end of the forward, or at the beginning of the next one:

- A write in forward: `nn.Embedding(max_norm=...)`, a clamp, a codebook that follows its inputs.
  Version counters show it, except for writes through `.data`; to find those, the first training
  forward also compares sums of the bits.
- A parameter assigned over an unsharded one in forward (`self.w = nn.Parameter(...)`).
- Random numbers that ranks drew alike for their unequal parts: a warning, see Note [Equal draws].
- A gradient for a unit none of whose outputs had one: a tensor left the unit another way (a hook
  that keeps an activation), and backward did not enter the unit through any output.

Note [Equal draws]
    A parameter of a wrapped model is this rank's part. Who initialises it again after wrapping,
    with one seed on all ranks (`nn.init.normal_(p)` over `model.parameters()`,
    `model.apply(init)`), draws equal numbers for unequal parts, and nothing fails. The first
    training forward has all parts side by side in the full buffers, so nothing is sent to find it.
    Only flat parameters that have changed since they were wrapped are looked at: values built
    before may well repeat.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from layerzero.flat.flat_param import version_of
from layerzero.notices import some, warn_once
from layerzero.step.context import RuntimeContext
from layerzero.step.extension import Extension, Extensions
from layerzero.step.handle import FlatParamHandle
from layerzero.step.unit import Unit

_NUM_COMPARED = 8
"""Elements at the beginning of each part that must be equal, and not all the same number."""
_NUM_SAMPLES = 64
"""Elements of a shard by which it is recognised."""
_MOST_SHARDS = 16
"""Shards that are looked at: what all ranks do shows in a few."""
_grad_of = attrgetter("grad")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LostWrites(Extension):
    """Checks the unsharded parameters of all units of a model before and after each forward."""

    def __init__(self, context: RuntimeContext, units: Sequence[Unit], first: FirstForward) -> None:
        self._first = first
        self._unchanged: set[str] = set()
        """Parameters whose versions grow without a change of their bits: `set_` to themselves."""
        self._context = context
        self._units = units
        self._unsharded_params = [
            unsharded for unit in units for h in unit.handles for unsharded in h.unsharded_params
        ]
        self._copies = [h for unit in units for h in unit.handles if not _is_main_memory(h)]

    def before_forward(self, unit: Unit, forward_pass: object) -> None:
        """Check before a forward of the model, outside backward.

        Raises:
            RuntimeError: an unsharded parameter has a gradient that no reduction has taken.
        """
        # In C: the host's time should not grow with the number of parameters.
        if not all(map(is_, map(_grad_of, self._unsharded_params), repeat(None))):
            self._refuse_gradients()

    def _refuse_gradients(self) -> None:
        names = []
        for unit in self._units:
            for handle in unit.handles:
                for fqn, unsharded in zip(handle.fqns, handle.unsharded_params, strict=True):
                    if unsharded.grad is not None:
                        names.append(fqn)
            unit.drop_unsharded_gradients()
        raise RuntimeError(
            f"the last backward computed gradients of {some(map(repr, names))} that could not be "
            "reduced and were dropped: the loss uses a tensor that left its unit without being an "
            "output of a forward (stored by a hook, or on a module), and no output of the unit had "
            "a gradient; return that tensor from the forward, or add an output to the loss, times 0"
        )

    def after_forward(self) -> RuntimeError | None:
        if self._context.replaced:
            replaced, self._context.replaced = self._context.replaced, []
            return RuntimeError(
                f"the forward replaced {some(map(repr, replaced))}, which are sharded; the new "
                "parameters were dropped and the sharded ones restored: use buffers, exclude these "
                "parameters from sharding (ignored_parameters), or change values between steps, "
                "inside summon_full_params()"
            )
        names: list[str] = []
        for handle in self._copies:
            versions = [*map(version_of, handle.unsharded_params)]
            if versions != handle.left_versions:
                triples = zip(handle.fqns, handle.left_versions, versions, strict=True)
                names += [fqn for fqn, before, now in triples if before != now]
                handle.left_versions = versions
        if names and self._first.has_sums:
            self._unchanged.update({*names}.difference(self._first.written()))
        names = [name for name in names if name not in self._unchanged]
        return _written_into(names) if names else None


def _written_into(names: Sequence[str]) -> RuntimeError:
    return RuntimeError(
        f"the forward wrote into the full parameters {some(map(repr, names))}. These are copies, "
        "freed after use: use buffers, ignored_parameters, or write between steps, inside "
        "summon_full_params(). If your forward writes into none, please report a bug of layerzero"
    )


class FirstForward(Extension):
    """Sums the bits of unsharded parameters around each call: in the first evaluation, and until a
    training forward is clean."""

    def __init__(self, extensions: Extensions, units: Sequence[Unit]) -> None:
        self._extensions = weakref.proxy(extensions)  # Which hold this object.
        self._units = units
        self._draws = EqualDraws([handle for unit in units for handle in unit.handles])
        self._has_evaluated = False
        self._begin()

    def _begin(self) -> None:
        self._was_training = False
        self._before: dict[Unit, list[torch.Tensor]] = {}
        self._pairs: list[tuple[Unit, list[torch.Tensor], list[torch.Tensor]]] = []

    def begin_call(self, unit: Unit) -> None:
        is_training = torch.is_grad_enabled() and unit.module.training
        if is_training or not self._has_evaluated:
            self._before[unit] = _digests(unit)
        if is_training:
            self._was_training = True
            # Hidden from dispatch modes: selective checkpointing counts operations.
            with _disable_current_modes(), torch.no_grad():
                for handle in unit.handles:
                    self._draws.note(handle)

    def end_call(self, unit: Unit) -> None:
        before = self._before.pop(unit, None)
        if before is not None:
            self._pairs.append((unit, before, _digests(unit)))

    def after_forward(self) -> RuntimeError | None:
        if not self._was_training:
            # Nothing is looked at unless a version has changed: that would block the host.
            self._has_evaluated = True
            self._begin()
            return None
        names = self.written()
        self._begin()
        if names:
            return _written_into(names)
        self._extensions.remove(self)
        text = self._draws.found()
        if text is not None:
            is_first = all(h.placement.is_first for unit in self._units for h in unit.handles)
            warn_once(text, is_first=is_first)
        return None

    @property
    def has_sums(self) -> bool:
        """Whether it has sums of the forward that ends: of training, or the first evaluation."""
        return bool(self._pairs)

    def written(self) -> list[str]:
        """Names of parameters whose bits changed. Blocks the host."""
        names: dict[str, None] = {}
        for unit, before, after in self._pairs:
            handles = [handle for handle in unit.handles if not _is_main_memory(handle)]
            for handle, old, new in zip(handles, before, after, strict=True):
                for fqn, is_equal in zip(handle.fqns, (old == new).tolist(), strict=True):
                    if not is_equal:
                        names[fqn] = None
        return list(names)


def _is_main_memory(handle: FlatParamHandle) -> bool:
    """Whether unsharded parameters are the optimizer's memory: writes stay, as in plain torch."""
    return handle.is_whole and not handle.has_compute_shard


def _digests(unit: Unit) -> list[torch.Tensor]:
    """For each flat parameter, the sum of the bits of each parameter: [num_parameters], int64."""
    # Hidden from dispatch modes: selective checkpointing counts operations.
    with _disable_current_modes(), torch.no_grad():
        return [_digest(handle) for handle in unit.handles if not _is_main_memory(handle)]


def _digest(handle: FlatParamHandle) -> torch.Tensor:
    full = handle.full.data
    bits = full.view(_BITS.get(full.element_size(), torch.uint8))
    factor = bits.numel() // max(full.numel(), 1)
    starts, numels = handle.layout.starts, handle.layout.numels
    sums = [
        bits[start * factor : (start + numel) * factor].sum(dtype=torch.int64)
        for start, numel in zip(starts, numels, strict=True)
    ]
    return torch.stack(sums)


class _Head(NamedTuple):
    """How the first random part of a shard begins."""

    shard: int
    fqn: str
    values: tuple[float, ...]


class EqualDraws:
    """Looks at flat parameters in the first training forward."""

    def __init__(self, handles: Sequence[FlatParamHandle]) -> None:
        """Notes what the shards of these hold. Does not block the host."""
        self._samples = {handle: _sample(handle) for handle in handles if _num_shards(handle) > 1}
        self._seen: dict[FlatParamHandle, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(self, handle: FlatParamHandle) -> None:
        """`handle` is unsharded, in the first training forward. Does not block the host."""
        if handle in self._samples and handle not in self._seen:
            full = handle.full.data
            # Slices: indices would have to be copied to the device, which blocks the host.
            heads = [full[place : place + _NUM_COMPARED] for _, _, place in _parts(handle)]
            if heads:
                self._seen[handle] = _sample(handle), torch.stack(heads)

    def found(self) -> str | None:
        """What to warn of, the same on ranks whose shards have changed alike. Blocks the host."""
        # Each rank's first draw gives the same numbers, and each flat parameter's may: until then
        # ranks have drawn equally many, unless one had fewer random parameters in its shards.
        first_of_all: dict[int, _Head] = {}
        for handle, sample in self._samples.items():
            if handle not in self._seen or not handle.full.dtype.is_floating_point:
                continue
            now, heads = self._seen[handle]
            if torch.equal(now, sample):
                continue
            firsts: dict[int, _Head] = {}
            for (shard, index, _), head in zip(_parts(handle), heads.tolist(), strict=True):
                if len(set(head)) > 1:  # Else a constant, such as zeros.
                    firsts.setdefault(shard, _Head(shard, handle.fqns[index], tuple(head)))
            for shard, head in firsts.items():
                first_of_all.setdefault(shard, head)
            text = _equal_heads(firsts.values())
            if text is not None:
                return text
        return _equal_heads(first_of_all.values())


def _num_shards(handle: FlatParamHandle) -> int:
    return handle.layout.padded_numel // max(handle.main_shard.numel(), 1)


def _sample(handle: FlatParamHandle) -> torch.Tensor:
    shard = handle.main_shard.detach()
    return shard[:: max(shard.numel() // _NUM_SAMPLES, 1)].clone()


def _parts(handle: FlatParamHandle) -> Iterator[tuple[int, int, int]]:
    """(shard, parameter, place in the full buffer) of each part that is long enough."""
    numel = handle.main_shard.numel()
    for index, (start, length) in enumerate(
        zip(handle.layout.starts, handle.layout.numels, strict=True)
    ):
        end = -(-(start + length) // numel)
        for shard in range(start // numel, min(end, _MOST_SHARDS)):
            first, last = max(start, shard * numel), min(start + length, (shard + 1) * numel)
            if last - first >= _NUM_COMPARED:
                yield shard, index, first


def _equal_heads(heads: Iterable[_Head]) -> str | None:
    first_with: dict[tuple[float, ...], _Head] = {}
    for head in heads:
        other = first_with.setdefault(head.values, head)
        if other is not head:
            return (
                f"{other.fqn!r} in shard {other.shard} and {head.fqn!r} in shard {head.shard} were "
                "written after wrapping, and begin with the same numbers. Ranks that draw with one "
                "seed draw the same numbers for different parts of the model. If they did, "
                "initialise before wrapping, with param_init_fn, or inside summon_full_params()"
            )
    return None
