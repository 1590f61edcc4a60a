"""FlatState: what a flat optimizer keeps for the parameters of one flat parameter, and its step.

    main shard    | a     | b            | c   |      one step is one call of `flat_step_` with a
    gradient      | a     | b            | c   |      range for each parameter that has a gradient;
    states        | a     |    | c   |                parameters of other optimizers have no state

The host's work for a step does not grow with the number of parameters but for a few passes in C
over lists (`map` over a slot of Tensor), which look whether everything is where it was: gradients
in one buffer, parameters in the main shard, state in the memory made here. What is elsewhere, for
whatever reason, is found again or copied.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import repeat
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from layerzero.core.parameter_info import get_info
from layerzero.ops import flat_step_, step_reference, sum_squares
from layerzero.runtime.flat_param_handle import FlatParamHandle
from layerzero.runtime.unit import Unit

_grad_of: Callable[[Any], Any] = vars(torch._C.TensorBase)["grad"].__get__
_base_of: Callable[[Any], Any] = vars(torch._C.TensorBase)["_base"].__get__
_offset_of: Callable[[torch.Tensor], Any] = torch.Tensor.storage_offset
_address_of = torch.Tensor.data_ptr
_ALIGNMENT = 16
"""Elements: the first state of each parameter lies at a multiple of this."""
_BLOCK = step_reference.QUANT_NUMEL

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
    parts: list[torch.Tensor]
    flat: torch.Tensor
    offsets: list[int]
    is_copy: bool


class Home:
    """Where parameters lie: the main shard of a flat parameter, or a tensor of its own."""

    def __init__(self, held: list[Held], handle: FlatParamHandle | None, unit: Unit | None) -> None:
        self.held = held
        # Weakly: an optimizer must not keep the buffers of a model that is gone.
        self._handle = None if handle is None else weakref.ref(handle)
        self._unit = None if unit is None else weakref.ref(unit)
        if handle is None:
            self.main = held[0].parameter.detach().view(-1)
        else:
            self.main = handle.main_shard
        self._addresses = [*map(_address_of, self.parameters)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [each.parameter for each in self.held]

    @property
    def handle(self) -> FlatParamHandle | None:
        return None if self._handle is None else self._handle()

    @property
    def unit(self) -> Unit | None:
        return None if self._unit is None else self._unit()

    def is_where_it_was(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether its parameters still are views of `main`."""
        return [*map(_address_of, parameters)] == self._addresses

    def copy(self, covers_all: bool) -> torch.Tensor:
        """The compute shard's slice to write with the main shard; without elements: none.

        Args:
            covers_all: all parameters that an optimizer has here are going to be written.
        """
        handle = self.handle
        found = None if handle is None else handle.slice_beside_main
        if handle is None or found is None:
            return torch.empty(0)
        # What is not written has to be right already.
        covers_all = covers_all and len(self.held) == len(handle.sharded_params)
        return found if covers_all or handle.slice_is_current else torch.empty(0)

    def note_copied(self) -> None:
        handle = self.handle
        if handle is not None:
            handle.note_slice_written()


class FlatState:
    """States of one home's parameters in flat memory, shown parameter by parameter in `shown`."""

    shown: dict[nn.Parameter, dict[str, Any]]
    """For each parameter with state, "step" and views of the states, as torch's optimizers keep."""

    def __init__(
        self, kind: int, home: Home, keys: Sequence[str], dtype: torch.dtype, shows_step: bool
    ) -> None:
        """
        Args:
            keys: names of the states.
            dtype: of the states; float64 for float64 parameters, whatever is given.
            shows_step: whether the state of a parameter has "step".
        """
        self.home = home
        self.shown = {}
        self._kind = kind
        self._keys = tuple(keys)
        self._dtype = torch.float64 if home.main.dtype == torch.float64 else dtype
        self._shows_step = shows_step
        self._all = home.parameters
        self._members: list[int] = []
        self._known: tuple[Gradient, int, torch.Tensor] | None = None
        self._make([], {})

    # Memory ---------------------------------------------------------------------------------

    def _make(self, members: list[int], old: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Make states for these of the home's parameters, with the values that `old` has."""
        held, device = self.home.held, self.home.main.device
        self._members = members
        self._params = [held[i].parameter for i in members]
        inside = set(members)
        self._others = [each for i, each in enumerate(self._all) if i not in inside]
        self._places: list[int] = []
        end = 0
        for parameter in self._params:
            self._places.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self.tensors = [torch.zeros(end, dtype=self._dtype, device=device) for _ in self._keys]
        self.steps = torch.zeros(len(members), dtype=torch.float32)
        self.shown = {}
        for number, (parameter, place) in enumerate(zip(self._params, self._places, strict=True)):
            part = slice(place, place + parameter.numel())
            own = {key: flat[part] for key, flat in zip(self._keys, self.tensors, strict=True)}
            given = old.get(parameter) or {}
            for key, view in own.items():
                if given.get(key) is not None:
                    view.copy_(given[key].detach().reshape(-1))
            self.steps[number] = float(given.get("step", 1.0 if given else 0.0))
            if self._shows_step:
                own = {"step": self.steps[number], **own}
            if own:
                self.shown[parameter] = own
        self._dicts = [*self.shown.values()]
        self._views = [[own[key] for own in self._dicts] for key in self._keys]
        self._read_steps()

    def _read_steps(self) -> None:
        """Read the step numbers, which differ where a step left parameters out."""
        counts = [int(step) for step in self.steps.tolist()]
        self._first = min(counts, default=0)
        self._lags = [count - self._first for count in counts]
        self._steps_version = self.steps._version
        self._usual: tuple[list[int], _Ranges] | None = None

    def is_intact(self) -> bool:
        """Whether what `shown` holds is still what was made, and parameters are where they were."""
        try:
            return self.home.is_where_it_was(self._all) and all(
                all(map(is_, map(itemgetter(key), self._dicts), views))
                for key, views in zip(self._keys, self._views, strict=True)
            )
        except KeyError:
            return False

    def take(self, old: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Take over the state of the home's parameters from `old`, wherever it lies."""
        self._make([i for i, each in enumerate(self._all) if old.get(each)], old)

    # Gradients ------------------------------------------------------------------------------

    def _collect(self, wanted: Container[nn.Parameter] | None = None) -> Gradient | None:
        """The gradients of its parameters; None: there is none.

        Parameters that have a gradient for the first time become members.
        """
        parts = [*map(_grad_of, self._params)]
        if (
            wanted is None
            and all(map(is_, map(_grad_of, self._others), repeat(None)))
            and not any(map(is_, parts, repeat(None)))
        ):
            return self._flatten(None, parts) if parts else None
        have = [
            i
            for i, each in enumerate(self._all)
            if each.grad is not None and (wanted is None or each in wanted)
        ]
        if not set(have) <= set(self._members):
            self._make(sorted({*have, *self._members}), self.shown)
        number_of = {i: number for number, i in enumerate(self._members)}
        numbers = [number_of[i] for i in have]
        is_all = len(numbers) == len(self._members)
        parts = [parameter.grad for i in have if (parameter := self._all[i]).grad is not None]
        return self._flatten(None if is_all else numbers, parts) if parts else None

    def _flatten(self, numbers: list[int] | None, parts: list[torch.Tensor]) -> Gradient:
        """The buffer that gradients are views of; or, if there is none, a copy of them in one."""
        known = self._known
        if (
            known is not None
            and known[0].numbers == numbers
            and len(known[0].parts) == len(parts)
            and all(map(is_, known[0].parts, parts))
        ):
            return known[0]
        base = next((each._base for each in parts if each.numel()), None)
        if (
            base is not None
            and base.dtype == self.home.main.dtype
            and base.is_contiguous()
            and all(map(is_, map(_base_of, parts), repeat(base)))
            and all(map(torch.Tensor.is_contiguous, parts))
        ):
            start = base.storage_offset()
            offsets = [offset - start for offset in map(_offset_of, parts)]
            return Gradient(numbers, parts, base.detach().view(-1), offsets, is_copy=False)
        if any(each.layout is not torch.strided for each in parts):
            raise RuntimeError("sparse gradients are not supported; use to_dense()")
        dtype, end = self.home.main.dtype, 0
        offsets = []
        for each in parts:
            offsets.append(end)
            end += each.numel()
        copied = torch.cat([each.detach().reshape(-1).to(dtype) for each in parts])
        return Gradient(numbers, parts, copied, offsets, is_copy=True)

    def note_delivered(self) -> None:
        """Remember the gradients as they are, and the sum of their squares."""
        self._known = None
        gradient = self._collect()
        # A copy is not kept: it would take the memory of the gradients once more.
        if gradient is not None and not gradient.is_copy:
            self._known = gradient, gradient.flat._version, self._squares(gradient)

    def squares(self) -> torch.Tensor:
        """The sum of squares of the gradients, a float64 scalar."""
        gradient, known = self._collect(), self._known
        if gradient is None:
            return torch.zeros((), dtype=torch.float64, device=self.home.main.device)
        if known is not None and known[0] is gradient and known[1] == gradient.flat._version:
            return known[2]
        return self._squares(gradient)

    def _squares(self, gradient: Gradient) -> torch.Tensor:
        parts = [each for each in gradient.parts if each.numel()]
        if not parts:
            return torch.zeros((), dtype=torch.float64, device=gradient.flat.device)
        handle = self.home.handle
        if handle is not None and len(gradient.parts) == len(handle.sharded_params):
            # All that is in the buffer are these gradients and zeros between them.
            return sum_squares(gradient.flat)
        return torch.stack([*map(sum_squares, parts)]).sum()

    def forget_gradients(self) -> None:
        self._known = None

    # The step -------------------------------------------------------------------------------

    def step(
        self,
        rows_of: Rows,
        factor: torch.Tensor | None,
        grad_scale: float,
        seed: int,
        wanted: Container[nn.Parameter] | None,
    ) -> None:
        """Step its parameters that have a gradient. Not collective.

        Args:
            factor: a float32 scalar by which gradients are multiplied.
            wanted: the parameters to step; None: all.
        """
        gradient = self._collect(wanted)
        if gradient is None:
            return
        if self.steps._version != self._steps_version:
            self._read_steps()
        table, keys = self._table_for(gradient)
        pairs = tuple((group, self._first + lag + 1) for group, lag in keys)
        main = self.home.main
        copy = self.home.copy(covers_all=len(gradient.parts) == len(self._all))
        none = torch.empty(0)
        flat_step_(
            self._kind,
            main.detach(),
            gradient.flat,
            self.tensors,
            [],
            copy,
            none,
            table,
            rows_of(pairs),
            none if factor is None else factor.to(main.device),
            grad_scale,
            seed,
        )
        if copy.numel():
            self.home.note_copied()
        self._count(gradient.numbers)

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
            held = self.home.held[self._members[number]]
            row = row_of.setdefault((held.group, self._lags[number]), len(row_of))
            if held.parameter.numel():
                table += self._ranges(held, number, offset, row)
        ranges = torch.tensor(table, dtype=torch.int64).view(-1, step_reference.COLUMNS)
        made = ranges.to(self.home.main.device), tuple(row_of)
        if numbers is None:
            self._usual = offsets, made
        return made

    def _ranges(self, held: Held, number: int, offset: int, row: int) -> list[list[int]]:
        place, numel = self._places[number], held.parameter.numel()
        return [[held.offset, offset, place, numel, row, held.start, held.key, 0, -1]]


def key_of(name: str) -> int:
    """A number for a parameter, from its name."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def homes_of(groups: Sequence[Sequence[nn.Parameter]], units: Iterable[Unit]) -> Iterator[Home]:
    """The homes of all parameters of an optimizer, those in `units` first."""
    group_of = {id(each): number for number, group in enumerate(groups) for each in group}
    for unit in units:
        for handle in unit.handles:
            ranges = handle.layout.shard_ranges(handle.placement.main_shard_index)
            held = []
            for parameter, owned in zip(handle.sharded_params, ranges, strict=True):
                group = group_of.pop(id(parameter), None)
                info = get_info(parameter)
                if group is not None and info is not None:
                    held.append(Held(parameter, group, owned.offset, owned.start, key_of(info.fqn)))
            if held:
                handle.reset_sharded_params(unit.label)
                yield Home(held, handle, unit)
    for number, members in enumerate(groups):
        for index, parameter in enumerate(members):
            if id(parameter) in group_of:
                key = key_of(f"parameter {index} of group {number}")
                yield Home([Held(parameter, number, 0, 0, key)], None, None)
