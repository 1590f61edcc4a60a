"""Looks at the bits of unsharded parameters around the first forwards of a model.

- A write in forward through `.data` changes no version (`EachForward`): sums of the bits show it,
  and the place where `p.data = other` puts a parameter.
- Random numbers that ranks drew alike for their unequal parts: a warning, see Note [Equal draws].

Note [Equal draws]
    A parameter of a wrapped model is this rank's part. Who initialises it again after wrapping,
    with one seed on all ranks (`nn.init.normal_(p)` over `model.parameters()`,
    `model.apply(init)`), draws equal numbers for unequal parts, and nothing fails. The first
    training forward has all parts side by side in the full buffers, so nothing is sent to find it.
    Each rank's first numbers are those of its first part that is drawn, so the beginnings of all
    parts are compared: their order, because scales differ with shapes. Normal and uniform numbers
    of one stream are ordered otherwise; both are what the generator gives first after its seed.
    Only flat parameters that have changed since they were wrapped, but not by a load, are looked
    at: other values may well repeat.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import islice, repeat

import torch
from torch.utils._python_dispatch import _disable_current_modes

from layerzero.flat.flat_param import address_of, version_of
from layerzero.flat.tensor_parallel import local_of
from layerzero.notices import some, warn_once
from layerzero.ops.reference import bits_of
from layerzero.step.extension import Extension, Extensions
from layerzero.step.handle import FlatParamHandle
from layerzero.step.unit import Unit

_WINDOW = 16
"""Elements whose order is compared: a block of torch's normal numbers on the CPU."""
_MOST_WINDOWS = 8
"""Windows that are compared of each part: `trunc_normal_` draws some elements again."""
_NUM_SAMPLES = 64
"""Elements of a shard by which it is recognised."""
_MOST_SHARDS = 16
"""Shards that are looked at: what all ranks do shows in a few."""


class FirstForward(Extension):
    """Sums the bits of unsharded parameters around calls: in the first evaluation, until a training
    forward is clean, and where versions grow without a change (a clamp, which may act later)."""

    def __init__(self, extensions: Extensions, units: Sequence[Unit]) -> None:
        self._extensions = weakref.proxy(extensions)  # Which hold this object.
        self._units = units
        self._draws = EqualDraws(units)
        self._lasting: set[Unit] = set()
        self._has_evaluated = self._is_clean = False
        self._begin()

    def _begin(self) -> None:
        self._was_training = False
        self._before: dict[Unit, list[torch.Tensor]] = {}
        self._pairs: list[tuple[Unit, FlatParamHandle, torch.Tensor, torch.Tensor]] = []

    def begin_call(self, unit: Unit) -> None:
        is_training = torch.is_grad_enabled() and unit.module.training
        is_early = not self._is_clean and (is_training or not self._has_evaluated)
        if is_early or unit in self._lasting:
            self._before[unit] = _digests(unit)
        if is_training and not self._is_clean:
            self._was_training = True
            # Hidden from dispatch modes: selective checkpointing counts operations.
            with _disable_current_modes(), torch.no_grad():
                for handle in () if unit.was_loaded else unit.handles:
                    self._draws.note(handle)

    def end_call(self, unit: Unit) -> None:
        if unit in self._before:
            before, after = self._before.pop(unit), _digests(unit)
            self._pairs += zip(repeat(unit), unit.handles, before, after)

    def after_forward(self) -> RuntimeError | None:
        if self._is_clean or not self._was_training:
            # Nothing is looked at unless a version has changed: that would block the host.
            self._has_evaluated = True
            self._begin()
            return None
        names = self.written()
        self._begin()
        if names:
            return written_into(names)
        if not self._lasting:
            self._extensions.remove(self)
        self._is_clean = True
        if text := self._draws.found():
            is_first = all(h.placement.is_first for unit in self._units for h in unit.handles)
            warn_once(text, is_first=is_first)
        return None

    def changed(self, names: Sequence[str]) -> list[str]:
        """Of parameters whose versions grew: without those whose bits are known to be the same."""
        same = {fqn for _, handle, _, _ in self._pairs for fqn in handle.fqns}
        same = same.intersection(names).difference(self.written())
        self._lasting |= {pair[0] for pair in self._pairs if not same.isdisjoint(pair[1].fqns)}
        return [name for name in names if name not in same]

    def written(self) -> list[str]:
        """Names of parameters whose bits changed. Blocks the host."""
        names: dict[str, None] = {}
        for _, handle, before, after in self._pairs:
            for fqn, is_equal in zip(handle.fqns, (before == after).tolist(), strict=True):
                if not is_equal:
                    names[fqn] = None
                    rejoin(handle)
        return list(names)


def written_into(names: Sequence[str]) -> RuntimeError:
    return RuntimeError(
        f"the forward wrote into the full parameters {some(map(repr, names))}. These are copies, "
        "freed after use: use buffers, ignored_parameters, or write between steps, inside "
        "summon_full_params(). If your forward writes into none, please report a bug of layerzero"
    )


def rejoin(handle: FlatParamHandle) -> None:
    """Have parameters that `set_` or `.data = other` took away lie in the full buffer again."""
    is_free = not handle.buffer.storage.nbytes()
    if is_free:
        handle.allocate_full()
    handle.move_full(handle.full.data)
    if is_free:
        handle.free_full()


def _digests(unit: Unit) -> list[torch.Tensor]:
    """For each flat parameter: the sum of the bits of each parameter, and how far it was moved."""
    # Hidden from dispatch modes: selective checkpointing counts operations.
    with _disable_current_modes(), torch.no_grad():
        return [torch.stack([*_sums(handle)]) for handle in unit.handles]


def _sums(handle: FlatParamHandle) -> Iterator[torch.Tensor]:
    full, size = handle.full.data, handle.full.element_size()
    for index, parameter in enumerate(handle.unsharded_params):
        own, moved = local_of(parameter).detach().reshape(-1), 0
        if own.numel() and version_of(parameter) == handle.left_versions[index]:
            moved = address_of(own) - address_of(full) - handle.layout.starts[index] * size
        bits = bits_of(own[: 0 if handle.is_main_memory else None])
        yield bits.sum(dtype=torch.int64) + moved


class EqualDraws:
    """Looks at flat parameters in the first training forward."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Notes what the shards of these hold. Does not block the host."""
        self._samples = {
            handle: None if unit.awaits_values else _sample(handle)  # None: no values yet.
            for unit in units
            for handle in unit.handles
            if handle.placement.num_main_shards > 1
            and handle.main_shard.numel()
            and handle.main_shard.is_floating_point()
            and handle.main_shard.itemsize > 1  # torch draws nothing in 8 bits.
        }
        self._windows: dict[FlatParamHandle, torch.Tensor] = {}

    def note(self, handle: FlatParamHandle) -> None:
        """`handle` is unsharded, in the first training forward. Does not block the host."""
        if handle in self._samples and handle not in self._windows:
            full, heads = handle.full.data, _heads(handle)
            # Slices: indices would have to be copied to the device, which blocks the host.
            if found := [full[at : at + numel].view(-1, _WINDOW) for _, _, at, numel in heads]:
                self._windows[handle] = torch.cat(found)

    def found(self) -> str | None:
        """What to warn of, the same on ranks whose shards have changed alike and that have one
        seed. Blocks the host."""
        holders: dict[tuple[object, ...], list[tuple[int, str]]] = {}
        for handle, windows in self._windows.items():
            sample = self._samples[handle]
            if sample is not None and torch.equal(_sample(handle), sample):
                continue
            firsts = {order: order[:1] for order in _first_orders(handle.main_shard)}
            orders = iter(_orders(windows))
            for shard, index, _, numel in _heads(handle):
                for order in enumerate(islice(orders, numel // _WINDOW)):
                    if order[1]:
                        held = holders.setdefault(firsts.get(order, order), [])
                        held.append((shard, handle.fqns[index]))
        for held in holders.values():
            # Twice in one shard are copies; one generator does not repeat its numbers.
            if 1 < len(dict(held)) == len(held):
                (shard, fqn), (other, other_fqn) = held[:2]
                return (
                    f"{fqn!r} in shard {shard} and {other_fqn!r} in shard {other} were written "
                    "after wrapping, and begin with the same numbers, or both with what the "
                    "generator gives first. Ranks that draw with one seed draw the same numbers "
                    "for different parts of the model. If they did, initialise before wrapping, "
                    "with param_init_fn, or inside summon_full_params()"
                )
        return None


def _sample(handle: FlatParamHandle) -> torch.Tensor:
    shard = handle.main_shard.detach()
    return shard[:: max(shard.numel() // _NUM_SAMPLES, 1)].clone()


def _heads(handle: FlatParamHandle) -> Iterator[tuple[int, int, int, int]]:
    """(shard, parameter, place in the full buffer, elements) of the windows with which the first
    two rows of each part begin: rows may be copies."""
    size = handle.main_shard.numel()
    for index, start in enumerate(handle.layout.starts):
        end, row = start + handle.layout.numels[index], handle.shapes[index][1:].numel()
        for shard in range(start // size, min(-(-end // size), _MOST_SHARDS)):
            first, last = max(start, shard * size), min(end, (shard + 1) * size)
            for at in (first, first + row):
                numel = min(last - at, _MOST_WINDOWS * _WINDOW) // _WINDOW * _WINDOW
                if numel > 0:
                    yield shard, index, at, numel


def _orders(windows: torch.Tensor) -> list[tuple[int, ...]]:
    """How the numbers of each window are ordered, whatever their scale; () where some are equal, or
    all rise or fall, as random ones do not."""
    values, orders = windows.float().sort(dim=1)
    rises = orders[:, 1:] > orders[:, :-1]
    is_random = (values[:, 1:] > values[:, :-1]).all(1) & rises.any(1) & ~rises.all(1)
    pairs = zip(orders.tolist(), is_random.tolist(), strict=True)
    return [tuple(order) if each else () for order, each in pairs]


def _first_orders(like: torch.Tensor) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The number and the order of each window of what `normal_` and `uniform_` give first."""
    for draw in (torch.Tensor.normal_, torch.Tensor.uniform_):
        generator = torch.Generator(like.device).manual_seed(torch.initial_seed())
        first = draw(like.new_empty(_MOST_WINDOWS, _WINDOW), generator=generator)
        yield from enumerate(_orders(first))
