"""`flat_step_` and `sum_squares_` in plain torch, which defines them to the bit; and their calls.

One call is one step of AdamW for flat parameters: unscale and clip the gradient, update the
states and the parameter. `table` has a row for each range of elements
that share a row of `rows` (a parameter group at a step number). For what the columns mean see
csrc/step_math.h; the names here are the same.

Float32 is computed as torch's fused CPU optimizers compute it on a processor with fused
multiply-add. That has two orders of operations, one for the last `numel % 8` elements of a tensor,
which float32 states follow range by range. Smaller states ignore where tensors end: all their
elements go one way (with a division less), and their random bits depend on the element's
place in its whole parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from layerzero.ops import note_written
from layerzero.ops.reference import compute_dtype
from layerzero.ops.schema import use_everywhere

COLUMNS = 8
MAIN, GRAD, STATE, NUMEL, ROW, INDEX, KEY, BLOCK = range(COLUMNS)
ROW_COLUMNS = 11
SIGN, FLAG, STEP = 8, 9, 10
QUANT_NUMEL = 256
"""Elements of a whole parameter that share a scale, if states have 8 bits."""
_LANES, _CHUNK = 16, 4096
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_Tensors = list[torch.Tensor]


class StepTensors(NamedTuple):
    """The tensors of `flat_step_` for one flat parameter, in the order of its schema."""

    main: torch.Tensor
    """Contiguous, float32, float16, bfloat16 or float64; written."""
    grad: torch.Tensor
    """Contiguous, of main's dtype."""
    states: Sequence[torch.Tensor]
    """Written; float32 (float64 for float64), bfloat16 or uint8, one dtype for all."""
    scales: Sequence[torch.Tensor]
    """A float32 tensor for each uint8 state, with an entry for each block; written."""
    table: torch.Tensor
    """Int64 [R, COLUMNS], rising in main; on main's device."""
    rows: torch.Tensor
    """Float64 [K, ROW_COLUMNS], on the CPU."""
    factor: torch.Tensor
    """One float32 on main's device; or empty, for 1."""


def join_steps(steps: Sequence[StepTensors]) -> tuple[Any, ...]:
    """The tensors of steps that share `factor`, in the lists that the schema has."""
    main, grad, states, scales, *others, factors = map(list, zip(*steps, strict=True))
    return main, grad, [*chain(*states)], [*chain(*scales)], *others, factors[0]


def split_steps(given: Sequence[Any]) -> tuple[list[StepTensors], Sequence[Any]]:
    """The steps that `join_steps` joined, and what follows them in the schema."""
    main, grad, states, scales, *others, factor = given[: len(StepTensors._fields)]
    size = len(states) // max(len(main), 1)
    parts = [slice(i * size, (i + 1) * size) for i in range(len(main))]
    lists = main, grad, [states[part] for part in parts], [scales[part] for part in parts], *others
    steps = [StepTensors._make((*each, factor)) for each in zip(*lists, strict=True)]
    return steps, given[len(StepTensors._fields) :]


def run_steps(steps: Sequence[StepTensors], grad_scale: float = 1.0, seed: int = 0) -> None:
    """One step of AdamW for ranges of flat parameters, in one pass over their memory; on a GPU, in
    one launch for up to 32 of them whose dtypes are the same.

    Each gradient is divided by `grad_scale`, multiplied by `factor`, and updates the states and
    the parameter. `flat_step_` below defines the bits. No autograd; does not block the host.

    Args:
        steps: tensors of each flat parameter, all on one device, with one `factor`.
        seed: of the random bits that round smaller states.
    """
    joined = join_steps(steps)
    torch.ops.layerzero.flat_step_.default(*joined, grad_scale, seed)
    for tensors in steps:
        note_written(tensors.main)


def flat_step_(*arguments: Any) -> None:
    """See `run_steps`; arguments as the schema has them."""
    steps, (grad_scale, seed) = split_steps(arguments)
    for tensors in steps:
        _step(tensors, grad_scale, seed)


def _step(tensors: StepTensors, grad_scale: float, seed: int) -> None:
    main, grad, factor = tensors.main, tensors.grad, tensors.factor
    states, scales = tensors.states, tensors.scales
    dtype = compute_dtype(main.dtype)
    values = tensors.rows.tolist()
    for row in tensors.table.tolist():
        numel = row[NUMEL]
        if not numel:
            continue
        part = slice(row[MAIN], row[MAIN] + numel)
        given = grad[row[GRAD] : row[GRAD] + numel].to(dtype)
        if grad_scale != 1.0:
            given = given / grad_scale
        if factor.numel():
            given = given * factor.to(given.device, dtype)
        options = values[row[ROW]]
        now = [  # A row without amsgrad, where another has it, leaves the third state alone.
            _widen(i, states[i][_state_part(row)], scales[i] if scales else None, row)
            for i in range(3 if options[FLAG] else 2)
        ]
        last = None
        if states[0].dtype.itemsize >= 4:
            last = torch.arange(numel, device=main.device) >= numel // 8 * 8
        p, now = _adamw(options, given, main[part].to(dtype), now, last)
        main[part] = p.to(main.dtype)
        store_states(now, states, scales, row, int(options[STEP]), seed)


def store_states(
    values: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    row: list[int],
    step: int,
    seed: int,
) -> None:
    """Write the new states of a range, rounded to their dtype."""
    for i, value in enumerate(values):
        # The largest square is rounded as the square it comes from.
        random = _random(seed, row, step, min(i, 1), value.device)
        target = states[i][_state_part(row)]
        if target.dtype == torch.uint8:
            store_codes(i, value, target, scales[i], row, random)
        elif target.dtype == torch.bfloat16 and value.dtype == torch.float32:
            target.copy_(_bfloat_at_random(value, random))
        else:
            target.copy_(value)


def store_codes(
    state: int,
    value: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row: list[int],
    random: torch.Tensor | None = None,
) -> None:
    """Write one state of a range (a row of the table) as 8-bit codes, the first, the average of
    gradients, with a sign; see `quantize`."""
    blocks = _Blocks.of(row, value.device)
    scale = blocks.largest(value)
    scales[blocks.first : blocks.first + blocks.count] = scale
    codes.copy_(quantize(value, scale[blocks.index], state == 0, random))


def load_codes(
    state: int, codes: torch.Tensor, scales: torch.Tensor, row: list[int]
) -> torch.Tensor:
    """The float32 values of one state of a range that `store_codes` wrote."""
    blocks = _Blocks.of(row, codes.device)
    own = scales[blocks.first : blocks.first + blocks.count][blocks.index]
    return dequantize(codes, own, signed=state == 0)


def _state_part(row: list[int]) -> slice:
    return slice(row[STATE], row[STATE] + row[NUMEL])


@dataclass(frozen=True)
class _Blocks:
    """The blocks of `QUANT_NUMEL` elements that a range covers."""

    first: int
    count: int
    index: torch.Tensor
    """[numel]: for each element the number of its block, from 0."""

    @classmethod
    def of(cls, row: list[int], device: torch.device) -> _Blocks:
        places = torch.arange(row[INDEX], row[INDEX] + row[NUMEL], device=device) // QUANT_NUMEL
        index = places - row[INDEX] // QUANT_NUMEL
        return cls(row[BLOCK], int(index[-1]) + 1, index)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """[count] largest magnitudes; NaN where a block has one."""
        bits = values.abs().view(torch.int32)
        zeros = torch.zeros(self.count, dtype=torch.int32, device=values.device)
        return zeros.scatter_reduce(0, self.index, bits, "amax").view(torch.float32)


def fused(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded once to float32; float64 rounds twice."""
    if c.dtype == torch.float64:
        return a * b + c
    product = a.double() * b  # Exact: 24 bits times 24 bits.
    wide = c.double()
    total = product + wide
    # What the sum lost; then round to odd, so that the second rounding cannot be a tie.
    back = total - product
    lost = (product - (total - back)) + (wide - back)
    bits = total.view(torch.int64)
    even = (bits & 1) == 0
    up = torch.where((lost > 0) == (total > 0), bits + 1, bits - 1)
    moved = even & (lost != 0) & lost.isfinite() & total.isfinite()
    return torch.where(moved, up, bits).view(torch.float64).float()


def _rounded(values: list[float], like: torch.Tensor) -> list[float]:
    """The scalars in the dtype of the computation."""
    return torch.tensor(values, dtype=torch.float64, device="cpu").to(like.dtype).tolist()


_Last = torch.Tensor | None
"""Which elements are the last `numel % 8` of a tensor; None: states are smaller than float32."""


def _adamw(
    options: list[float], grad: torch.Tensor, p: torch.Tensor, s: _Tensors, last: _Last
) -> tuple[torch.Tensor, _Tensors]:
    decay, weight, beta2, rest2, step_size, correction, eps, inverse = _rounded(options[:8], p)
    g = grad * options[SIGN]
    m, v = s[0], s[1]
    weight_of = torch.full_like(m, weight)
    m = fused(g - m, weight_of, m) if abs(weight) < 0.5 else fused(g - m, weight_of - 1, g)
    part = g * rest2
    beta2_of = torch.full_like(v, beta2)
    body = fused(part, g, v * beta2)
    v = body if last is None else torch.where(last, fused(v, beta2_of, part * g), body)
    states = [m, v]
    if options[FLAG]:
        states.append(torch.where((s[2] > v) | s[2].isnan(), s[2], v))
    root = _root(states[-1])
    if last is None:
        divisor = fused(root, torch.full_like(root, inverse), torch.full_like(root, eps))
    else:
        divisor = root / correction + eps
    return p * decay + (m * step_size) / divisor, states


def _root(x: torch.Tensor) -> torch.Tensor:
    """The square root, rounded to nearest; torch's on the CPU may be off by the last bit."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def _mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _random(seed: int, row: list[int], step: int, state: int, device: torch.device) -> torch.Tensor:
    """[numel] int64 in [0, 2**32), from the place of each element alone."""
    places = torch.arange(row[INDEX], row[INDEX] + row[NUMEL], device=device)
    result = torch.empty_like(places)
    for upper in range(row[INDEX] >> 32, (row[INDEX] + row[NUMEL] - 1 >> 32) + 1):
        x = _mix64(seed & _MASK64)
        for value in (row[KEY], step, upper):
            x = _mix64(x ^ (value & _MASK64))
        # Products wrap around, which leaves their lower 32 bits right.
        mixed = ((places & _MASK32) ^ (x & _MASK32)) * 0x9E3779B1 & _MASK32
        mixed = ((mixed ^ (mixed >> 15)) + (x >> 32) & _MASK32) * 0x85EBCA6B & _MASK32
        result = torch.where(places >> 32 == upper, mixed ^ (mixed >> 16), result)
    return result if state == 0 else (result >> 16) | (result << 16 & _MASK32)


def _bfloat_at_random(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    bits = values.view(torch.int32).long() & _MASK32
    chosen = (bits + torch.where(values.isfinite(), random & 0xFFFF, 0)) >> 16
    return chosen.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def _widen(
    number: int, state: torch.Tensor, scale: torch.Tensor | None, row: list[int]
) -> torch.Tensor:
    if state.dtype != torch.uint8:
        return state.to(torch.float64 if state.dtype == torch.float64 else torch.float32, copy=True)
    assert scale is not None
    return load_codes(number, state, scale, row)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> torch.Tensor:
    """Float32 values of 8-bit codes; `scale` has one entry for each of them."""
    largest = 127 if signed else 255
    magnitude = codes.to(torch.int32) & largest
    unit = (magnitude + (0x3F8 - largest) << 20).view(torch.float32)
    value = torch.where(magnitude == 0, 0.0, unit * scale)
    return torch.where(codes >= 128, -value, value) if signed else value


def quantize(
    values: torch.Tensor, scale: torch.Tensor, signed: bool, random: torch.Tensor | None = None
) -> torch.Tensor:
    """8-bit codes of float32 values, rounded at random or (None) to the nearest."""
    largest = 127 if signed else 255
    # Below the normal numbers a scale may have no inverse; such values become 0.
    inverse = torch.where(scale < 2.0**-126, 0.0, 1.0 / scale)
    unit = (values.abs() * inverse).view(torch.int32).long() & _MASK32
    between = 0x80000 if random is None else random & 0xFFFFF
    code = (((unit + between) >> 20) - (0x3F8 - largest)).clamp(0, largest)
    if signed:
        code |= torch.where(values.signbit(), 0x80, 0)
    return code.to(torch.uint8)


def sum_squares(x: torch.Tensor) -> torch.Tensor:
    """The sum of squares of all elements, a float64 scalar, added in float64.

    Args:
        x: float32, float16, bfloat16 or float64, on the CPU.
    """
    out = torch.empty(1, dtype=torch.float64, device="cpu")
    torch.ops.layerzero.sum_squares_.default(out, x.detach().contiguous())
    return out[0]


def sum_squares_(out: torch.Tensor, x: torch.Tensor) -> None:
    """See `sum_squares`; in a fixed order."""
    square = x.detach().reshape(-1).to(torch.float64).square()
    padded = nn.functional.pad(square, (0, -square.numel() % _CHUNK))
    # Each sum in order: of a chunk's rows, of its lanes, of the chunks.
    lanes = functools.reduce(torch.add, padded.view(-1, _CHUNK // _LANES, _LANES).unbind(1))
    chunks = functools.reduce(torch.add, lanes.unbind(1))
    out.fill_(functools.reduce(torch.add, chunks.unbind(), out.new_zeros(())))


use_everywhere(flat_step_)
use_everywhere(sum_squares_)
