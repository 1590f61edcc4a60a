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
from itertools import pairwise, repeat
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from layerzero.core.parameter_info import get_info
from layerzero.ops import flat_step_, step_reference, sum_squares
from layerzero.optim.edges import cuts_of
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
    total: int
    """Elements of the whole parameter."""
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


class Step(NamedTuple):
    """A step about to be taken: arguments of `flat_step_`."""

    gradient: Gradient
    table: torch.Tensor
    rows: torch.Tensor
    factor: torch.Tensor
    grad_scale: float
    seed: int


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
            if handle.slice_beside_main is not None:
                handle.watch_data()
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
        self._blocks: list[int] = []
        end = num_blocks = 0
        for i in members:
            numel, start = held[i].parameter.numel(), held[i].start
            self._places.append(end)
            self._blocks.append(num_blocks)
            end += -(-numel // _ALIGNMENT) * _ALIGNMENT
            num_blocks += (start + numel - 1) // _BLOCK - start // _BLOCK + 1 if numel else 0
        self._numel = end
        self.steps = torch.zeros(len(members), dtype=torch.float32)
        for number, parameter in enumerate(self._params):
            given = old.get(parameter) or {}
            self.steps[number] = float(given.get("step", 1.0 if given else 0.0))
        self._read_steps()
        self.tensors = [torch.zeros(end, dtype=self._dtype, device=device) for _ in self._keys]
        self._scales: list[torch.Tensor] = []
        self._wide: list[torch.Tensor] | None = None
        self._edges = torch.empty(0)
        self._show({})
        if self.is_quant:
            self._scales = [torch.zeros(num_blocks, device=device) for _ in self._keys]
            self._edges = torch.zeros(2, len(self._keys), device=device)
            if any(map(old.get, self._params)):
                self._wide = [torch.zeros(end, device=device) for _ in self._keys]
                self._show(old)
        else:
            self._show(old)

    @property
    def is_quant(self) -> bool:
        return self._dtype == torch.uint8

    def _show(self, old: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Make `shown` anew, and fill its tensors with what `old` has."""
        tensors = self._wide if self.is_quant else self.tensors
        self.shown = {}
        for number, (parameter, place) in enumerate(zip(self._params, self._places, strict=True)):
            part = slice(place, place + parameter.numel())
            own = {key: flat[part] for key, flat in zip(self._keys, tensors or (), strict=False)}
            given = old.get(parameter) or {}
            for key, view in own.items():
                if given.get(key) is not None:
                    view.copy_(given[key].detach().reshape(-1))
            if self._shows_step and (own or not self._keys):
                own = {"step": self.steps[number], **own}
            if own:
                self.shown[parameter] = own
        self._dicts = [*self.shown.values()]
        self._views = [[own[key] for own in self._dicts] for key in self._keys]

    def widen(self) -> None:
        """Have `shown` show float32 states, which the next step starts from; no value changes."""
        if not self.is_quant or self._wide is not None or not self._members:
            return
        self._wide = [torch.zeros(self._numel, device=self.home.main.device) for _ in self._keys]
        for i, (wide, codes, scales) in enumerate(
            zip(self._wide, self.tensors, self._scales, strict=True)
        ):
            for member, place, block in zip(self._members, self._places, self._blocks, strict=True):
                each = self.home.held[member]
                part = slice(place, place + each.parameter.numel())
                index = torch.arange(each.start, each.start + each.parameter.numel())
                own = scales[(block + index // _BLOCK - each.start // _BLOCK).to(scales.device)]
                is_signed = step_reference.is_signed(self._kind, i)
                wide[part] = step_reference.dequantize(codes[part], own, is_signed)
        self._show({})

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

    def begin(
        self,
        rows_of: Rows,
        factor: torch.Tensor | None,
        grad_scale: float,
        seed: int,
        wanted: Container[nn.Parameter] | None,
    ) -> Step | None:
        """Prepare a step of its parameters that have a gradient; None: there is none.

        With 8-bit states, `edges` then has the largest magnitudes in this rank's parts of blocks of
        which other ranks have a part. Not collective.

        Args:
            factor: a float32 scalar by which gradients are multiplied.
            wanted: the parameters to step; None: all.
        """
        gradient = self._collect(wanted)
        if gradient is None:
            return None
        if self.steps._version != self._steps_version:
            self._read_steps()
        table, keys = self._table_for(gradient)
        pairs = tuple((group, self._first + lag + 1) for group, lag in keys)
        factors = torch.empty(0) if factor is None else factor.to(self.home.main.device)
        step = Step(gradient, table, rows_of(pairs), factors, grad_scale, seed)
        if self.is_quant:
            edges = table[table[:, step_reference.EDGE] >= 0]
            if len(edges):
                self._call(step._replace(table=edges), torch.empty(0), step_reference.MEASURE)
        return step

    @property
    def edges(self) -> torch.Tensor:
        """[2, states]: of the block that the rank before also has a part of, and of the one that
        the rank after has."""
        return self._edges

    def finish(self, step: Step) -> None:
        """Take the step. Not collective; `edges` has what is the largest on all ranks."""
        copy = self.home.copy(covers_all=len(step.gradient.parts) == len(self._all))
        if self._wide is None:
            self._call(step, copy, step_reference.WITH_ENDS)
        else:
            self._call(step, copy, step_reference.WITHOUT_ENDS)
            self._narrow(step)
        if copy.numel():
            self.home.note_copied()
        self._count(step.gradient.numbers)

    def _call(self, step: Step, copy: torch.Tensor, phase: int) -> None:
        wide = self._wide
        flat_step_(
            self._kind,
            self.home.main.detach(),
            step.gradient.flat,
            self.tensors if wide is None else wide,
            self._scales if wide is None else [],
            copy,
            self._edges,
            step.table,
            step.rows,
            step.factor,
            step.grad_scale,
            step.seed,
            phase,
        )

    def _narrow(self, step: Step) -> None:
        """Round float32 states to 8 bits after a step, as a step from 8 bits does."""
        wide, options = self._wide, step.rows.tolist()
        assert wide is not None
        for row in step.table.tolist():
            place = row[step_reference.STATE]
            part = slice(place, place + row[step_reference.NUMEL])
            own = options[row[step_reference.ROW]]
            has_all = self._kind != step_reference.ADAMW or own[step_reference.FLAG]
            values = [each[part] for each in (wide if has_all else wide[:2])]
            given = self._kind, values, self.tensors, self._scales, self._edges, row
            step_reference.store_states(*given, int(own[step_reference.STEP]), step.seed)
        self._wide = None
        stepped = step.gradient.numbers
        if stepped is None:
            self._show({})
            return
        # The others have not been rounded: what they were stays, until all have a gradient.
        self.widen()
        assert self._wide is not None
        for number in {*range(len(self._members))} - {*stepped}:
            place = self._places[number]
            part = slice(place, place + self._params[number].numel())
            for now, before in zip(self._wide, wide, strict=True):
                now[part] = before[part]

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
        """Rows of `table` for a parameter: one; with 8-bit states, blocks cut by a border of
        shards have rows of their own."""
        start, numel = held.start, held.parameter.numel()
        cuts = [start, start + numel]
        if self.is_quant:
            first, last = cuts_of(start, start + numel, held.total)
            cuts = sorted({start, *(first or ()), *(last or ()), start + numel})
        rows = []
        for begin, end in pairwise(cuts):
            edge = -1
            if self.is_quant:
                edge = 0 if first == (begin, end) else 1 if last == (begin, end) else -1
            along = begin - start
            block = self._blocks[number] + begin // _BLOCK - start // _BLOCK
            rows.append(
                [
                    *(held.offset + along, offset + along, self._places[number] + along),
                    *(end - begin, row, begin, held.key, block, edge),
                ]
            )
        return rows


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
                    total = handle.layout.numels[owned.param]
                    place = owned.offset, owned.start, total, key_of(info.fqn)
                    held.append(Held(parameter, group, *place))
            if held:
                handle.reset_sharded_params(unit.label)
                yield Home(held, handle, unit)
    for number, members in enumerate(groups):
        for index, parameter in enumerate(members):
            if id(parameter) in group_of:
                key = key_of(f"parameter {index} of group {number}")
                yield Home([Held(parameter, number, 0, 0, parameter.numel(), key)], None, None)
