"""FlatState: what a flat optimizer keeps for the parameters of one flat parameter, and its step.

    main shard    | a     | b            | c   |   a step is one call of `flat_step_` for all, with
    gradient      | a     | b            | c   |   a range for each parameter that has a gradient;
    states        | a     |    | c   |             parameters of other optimizers have no state

Where all this lies each step looks at, by passes in C over lists (`map` over a slot of Tensor):
gradients in one buffer, parameters in the main shard, state in the memory made here. What is
elsewhere, for whatever reason, is found again or copied.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn

from layerzero.flat.parameter_info import get_info
from layerzero.optim import step_ops
from layerzero.optim.huge_pages import prefer_huge_pages
from layerzero.optim.step_ops import StepTensors
from layerzero.step.handle import FlatParamHandle
from layerzero.step.unit import Unit

_ALIGNMENT = 16
"""Elements: the first state of each parameter lies at a multiple of this."""
_BLOCK = step_ops.QUANT_NUMEL
_NONE = torch.empty(0, device="cpu")
_grad_of: Callable[[nn.Parameter], torch.Tensor | None] = attrgetter("grad")
_base_of: Callable[[Any], Any] = attrgetter("_base")
_address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr

Pairs = tuple[tuple[int, int], ...]
Rows = Callable[[Pairs], torch.Tensor]
"""Returns `rows` of `flat_step_` for these (group, step number)."""
_Ranges = tuple[torch.Tensor, Pairs]
"""`table` of `flat_step_`, and the (group, steps more than the least) of each row that it uses."""


class Held(NamedTuple):
    """A parameter that an optimizer has, and where it lies."""

    parameter: nn.Parameter
    group: int
    offset: int
    """In the main shard."""
    start: int
    """Index of its first element in the whole parameter."""
    key: int
    """Number that stands for the whole parameter, the same on every rank and in every run."""


class Gradient(NamedTuple):
    """Gradients of members in one buffer."""

    numbers: list[int] | None
    """Of the members that have one; None: all have."""
    flat: torch.Tensor
    offsets: list[int]
    is_copy: bool
    """Whether they were copied into `flat`; else it is what they are views of."""


class Step(NamedTuple):
    """A step about to be taken: the gradients, and tensors of `flat_step_`."""

    gradient: Gradient
    tensors: StepTensors


def take_steps(taken: list[tuple[FlatState, Step]], grad_scale: float, seed: int) -> None:
    """Take steps, those on one device in one call, and empty the list."""
    calls: dict[torch.device, list[Step]] = {}
    for _, step in taken:
        calls.setdefault(step.tensors.main.device, []).append(step)
    for steps in calls.values():
        step_ops.run_steps([step.tensors for step in steps], grad_scale, seed)
    for flat, step in taken:
        flat.note_taken(step)
    taken.clear()


class FlatState:
    """States of parameters that lie together: in a main shard, or one in a tensor of its own."""

    held: list[Held]
    main: torch.Tensor
    """1-D, where they lie."""
    shown: dict[nn.Parameter, dict[str, Any]]
    """For each parameter with state, "step" and views of the states, as torch's optimizers keep."""

    def __init__(
        self,
        held: list[Held],
        place: tuple[FlatParamHandle, Unit] | None,
        keys: Sequence[str],
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            place: the flat parameter of all of `held`, and its unit; None: it is a single one.
            keys: names of the states.
            dtype: of the states; float64 for float64 parameters, whatever is given.
        """
        self.held = held
        # Weakly: an optimizer must not keep the buffers of a model that is gone.
        self._handle = None if place is None else weakref.ref(place[0])
        self._unit = None if place is None else weakref.ref(place[1])
        self._is_full = place is not None and len(held) == len(place[0].sharded_params)
        self.main = held[0].parameter.detach().view(-1) if place is None else place[0].main_shard
        prefer_huge_pages(self.main)
        self._all = [each.parameter for each in held]
        self._addresses = [*map(_address_of, self._all)]
        self._offsets = [each.offset if each.parameter.numel() else 0 for each in held]
        self.shown = {}
        self._keys = tuple(keys)
        self._dtype = torch.float64 if self.main.dtype == torch.float64 else dtype
        self._members: list[int] = []
        self._make([], {})

    @property
    def handle(self) -> FlatParamHandle | None:
        return None if self._handle is None else self._handle()

    @property
    def unit(self) -> Unit | None:
        return None if self._unit is None else self._unit()

    def _make(self, members: list[int], old: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Make states for these of its parameters, with the values that `old` has."""
        self._members = members
        self._params = [self._all[i] for i in members]
        inside = set(members)
        self._others = [each for i, each in enumerate(self._all) if i not in inside]
        self._places: list[int] = []
        end = 0
        for parameter in self._params:
            self._places.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self._numel = end
        self.steps = torch.zeros(len(members), dtype=torch.float32, device="cpu")
        for number, parameter in enumerate(self._params):
            given = old.get(parameter) or {}
            self.steps[number] = float(given.get("step", 1.0 if given else 0.0))
        self._read_steps()
        self._blocks = [0] * len(members)  # Where the scales of each begin, if there are any.
        self.tensors = self._zeros(self._dtype)
        self._fill(old)

    def _zeros(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """One for each key, all in one memory."""
        shape = len(self._keys), self._numel
        memory = torch.empty(shape, dtype=dtype, device=self.main.device)
        prefer_huge_pages(memory)
        return [*memory.zero_().unbind()]

    def _fill(self, old: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Show the states that were made, with the values that `old` has."""
        self._show(self.tensors, old)

    def _show(
        self, tensors: Sequence[torch.Tensor], old: dict[nn.Parameter, dict[str, Any]]
    ) -> None:
        """Make `shown` anew from parts of `tensors`, and fill them with what `old` has."""
        self.shown = {}
        for number, (parameter, place) in enumerate(zip(self._params, self._places, strict=True)):
            part = slice(place, place + parameter.numel())
            own = {
                key: flat[part].view(parameter.shape)
                for key, flat in zip(self._keys, tensors, strict=False)
            }
            given = old.get(parameter) or {}
            for key, view in own.items():
                if given.get(key) is not None:
                    view.copy_(given[key].detach().reshape(parameter.shape))
            if own:
                self.shown[parameter] = {"step": self.steps[number], **own}

    def widen(self) -> None:
        """Have `shown` show states that have no views as they are; no value changes."""

    def _read_steps(self) -> None:
        """Read the step numbers, which differ where a step left parameters out."""
        counts = [int(step) for step in self.steps.tolist()]
        self._first = min(counts, default=0)
        self._lags = [count - self._first for count in counts]
        self._steps_version = self.steps._version
        self._usual: tuple[list[int], _Ranges] | None = None

    def is_intact(self) -> bool:
        return [*map(_address_of, self._all)] == self._addresses

    def take(self, old: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Take over the state of its parameters from `old`, wherever it lies."""
        self._make([i for i, each in enumerate(self._all) if old.get(each)], old)

    def _collect(
        self, wanted: Container[nn.Parameter] | None = None
    ) -> tuple[list[int] | None, list[torch.Tensor]]:
        """The gradients of its parameters, and the numbers of the members that have one; None: all.

        Parameters that have a gradient for the first time become members.
        """
        parts: list[Any] = [*map(_grad_of, self._params)]
        if (
            wanted is None
            and all(map(is_, map(_grad_of, self._others), repeat(None)))
            and not any(map(is_, parts, repeat(None)))
        ):
            return None, parts
        have = [
            i
            for i, each in enumerate(self._all)
            if each.grad is not None and (wanted is None or each in wanted)
        ]
        if not set(have) <= set(self._members):
            self.widen()
            self._make(sorted({*have, *self._members}), self.shown)
        number_of = {i: number for number, i in enumerate(self._members)}
        numbers = [number_of[i] for i in have]
        is_all = len(numbers) == len(self._members)
        parts = [self._all[i].grad for i in have]
        return None if is_all else numbers, parts

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, in as few tensors as hold them, and nothing else but zeros."""
        numbers, parts = self._collect()
        gradient = _find_buffer(numbers, parts, self.main.dtype)
        # In a buffer with the layout of the main shard: between them are zeros.
        if (
            self._is_full
            and gradient is not None
            and gradient.offsets == self._offsets
            and gradient.flat.numel() == self.main.numel()
        ):
            return [gradient.flat]
        return [each.detach() for each in parts if each.numel()]

    def begin(
        self,
        rows_of: Rows,
        factor: torch.Tensor | None,
        wanted: Container[nn.Parameter] | None,
    ) -> Step | None:
        """Prepare a step of its parameters that have a gradient; None: there is none.

        Not collective. `factor`: a float32 scalar by which gradients are multiplied. `wanted`: the
        parameters to step; None: all.
        """
        numbers, parts = self._collect(wanted)
        if not parts:
            return None
        dtype = self.main.dtype
        gradient = _find_buffer(numbers, parts, dtype) or _copy_of(numbers, parts, dtype)
        if self.steps._version != self._steps_version:
            self._read_steps()
        table, keys = self._table_for(gradient)
        pairs = tuple((group, self._first + lag + 1) for group, lag in keys)
        factors = _NONE if factor is None else factor.to(self.main.device)
        states, scales = self._states()
        tensors = StepTensors(
            *(self.main.data, gradient.flat, states, scales, table, rows_of(pairs), factors)
        )
        return Step(gradient, tensors)

    def _states(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self.tensors, []

    def note_taken(self, step: Step) -> None:
        numbers = step.gradient.numbers
        written = self._params if numbers is None else [self._params[i] for i in numbers]
        torch.autograd.graph.increment_version(written)
        self._count(numbers)

    def _count(self, numbers: list[int] | None) -> None:
        """Add 1 to the step numbers of these members; None: of all."""
        if numbers is None:
            self.steps.add_(1)
            self._first += 1
            self._steps_version = self.steps._version
        else:
            self.steps[numbers] += 1
            self._read_steps()

    def _table_for(self, gradient: Gradient) -> _Ranges:
        numbers, offsets = gradient.numbers, gradient.offsets
        if numbers is None and self._usual is not None and self._usual[0] == offsets:
            return self._usual[1]
        row_of: dict[tuple[int, int], int] = {}
        table = []
        for number, offset in zip(
            range(len(self._members)) if numbers is None else numbers, offsets, strict=True
        ):
            held = self.held[self._members[number]]
            row = row_of.setdefault((held.group, self._lags[number]), len(row_of))
            if numel := held.parameter.numel():
                of_state = self._places[number], numel, row, held.start, held.key
                table.append([held.offset, offset, *of_state, self._blocks[number]])
        ranges = torch.tensor(table, dtype=torch.int64, device="cpu")
        ranges = ranges.view(-1, step_ops.COLUMNS)
        made = ranges.to(self.main.device), tuple(row_of)
        if numbers is None:
            self._usual = offsets, made
        return made


class QuantState(FlatState):
    """In 8 bits, with a scale for each block of 256 elements; in float32 after somebody asked for
    it or loaded it, until the next step, which rounds it to the nearest first.

    whole parameter  | block 0 | block 1 | block 2 |      blocks from index 0 on, on every rank
    shards           | rank 0       |  rank 1      |      each part of block 1 has its own scale
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._scales: list[torch.Tensor] = []
        self._wide: list[torch.Tensor] | None = None
        super().__init__(*args, **kwargs)

    def _fill(self, old: dict[nn.Parameter, dict[str, Any]]) -> None:
        num_blocks = 0
        for number, i in enumerate(self._members):
            start, numel = self.held[i].start, self.held[i].parameter.numel()
            self._blocks[number] = num_blocks
            num_blocks += (start + numel - 1) // _BLOCK - start // _BLOCK + 1 if numel else 0
        device = self.main.device
        self._scales = [torch.zeros(num_blocks, device=device) for _ in self._keys]
        has_old = any(map(old.get, self._params))
        self._wide = self._zeros(torch.float32) if has_old else None
        self._show(self._wide or (), old)

    def widen(self) -> None:
        """Have `shown` show float32 states, which the next step starts from; no value changes."""
        if self._wide is None and self._members:
            self._wide = self._zeros(torch.float32)
            for i, row, part in self._ranges():
                codes, scales = self.tensors[i][part], self._scales[i]
                self._wide[i][part] = step_ops.load_codes(i, codes, scales, row)
            self._show(self._wide, {})

    def _states(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self._wide is not None:
            # Back to what they came from, unless somebody has written or loaded them.
            for i, row, part in self._ranges():
                codes, scales = self.tensors[i][part], self._scales[i]
                step_ops.store_codes(i, self._wide[i][part], codes, scales, row)
            self._wide = None
            self._show((), {})
        return self.tensors, self._scales

    def _ranges(self) -> Iterator[tuple[int, list[int], slice]]:
        """(state, row of `flat_step_`'s table, where it is in the state) of each parameter."""
        for member, place, block in zip(self._members, self._places, self._blocks, strict=True):
            held = self.held[member]
            if numel := held.parameter.numel():
                row = [held.offset, 0, place, numel, 0, held.start, held.key, block]
                for i in range(len(self._keys)):
                    yield i, row, slice(place, place + numel)


def _find_buffer(
    numbers: list[int] | None, parts: list[torch.Tensor], dtype: torch.dtype
) -> Gradient | None:
    """The buffer that gradients are views of, if there is one."""
    # Those without elements are tensors of their own.
    bases = [*compress(map(_base_of, parts), map(torch.Tensor.numel, parts))]
    base = next(iter(bases), None)
    if not (
        base is not None
        and base.dtype == dtype
        and base.is_contiguous()
        and all(map(is_, bases, repeat(base)))
        and all(map(torch.Tensor.is_contiguous, parts))
    ):
        return None
    # By address: a view stays one of its base where somebody has assigned its `.data`.
    start, end, itemsize = base.data_ptr(), base.data_ptr() + base.nbytes, base.itemsize
    addresses = [address or start for address in map(_address_of, parts)]  # Of no elements: 0.
    if min(addresses) < start or max(addresses) > end:
        return None
    offsets = [(address - start) // itemsize for address in addresses]
    return Gradient(numbers, base.detach().view(-1), offsets, False)


def _copy_of(numbers: list[int] | None, parts: list[torch.Tensor], dtype: torch.dtype) -> Gradient:
    if any(each.layout is not torch.strided for each in parts):
        raise RuntimeError("AdamW: expected dense gradients, got a sparse one; use to_dense()")
    end = 0
    offsets = []
    for each in parts:
        offsets.append(end)
        end += each.numel()
    copied = torch.cat([each.detach().reshape(-1).to(dtype) for each in parts])
    return Gradient(numbers, copied, offsets, True)


def _key_of(name: str) -> int:
    """A number for a parameter, from its name."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def places_of(
    groups: Sequence[Sequence[nn.Parameter]], units: Iterable[Unit]
) -> Iterator[tuple[list[Held], tuple[FlatParamHandle, Unit] | None]]:
    """The parameters of an optimizer that lie together, those in `units` first, and where."""
    group_of = {id(each): number for number, group in enumerate(groups) for each in group}
    for unit, handle in [(each, handle) for each in units for handle in each.handles]:
        ranges = handle.layout.shard_ranges(handle.placement.main_shard_index)
        held = []
        for parameter, owned in zip(handle.sharded_params, ranges, strict=True):
            group = group_of.pop(id(parameter), None)
            info = get_info(parameter)
            if group is not None and info is not None:
                place = owned.offset, owned.start, _key_of(info.fqn)
                held.append(Held(parameter, group, *place))
        if held:
            handle.reset_sharded_params(unit.label)
            yield held, (handle, unit)
    for number, members in enumerate(groups):
        for index, parameter in enumerate(members):
            if id(parameter) in group_of:
                key = _key_of(f"parameter {index} of group {number}")
                yield [Held(parameter, number, 0, 0, key)], None
