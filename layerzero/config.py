"""Settings that a user can choose: frozen, keyword-only dataclasses, checked at construction."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import torch
from torch import nn

ModuleClasses = tuple[type[nn.Module], ...]
Accumulation = Literal["sharded", "unsharded", "auto"]
"""Where gradients of micro-batches without gradient synchronization add up."""

GradientReduction = Literal["mean", "sum"]
"""How gradients are reduced over the ranks that share the model."""

OnNonFinite = Literal["raise", "skip"]
"""Treatment of a step with a gradient that is infinite or NaN."""

OptionalMean = Literal["all", "participants"]
"""Ranks over which a gradient of an optional module is averaged: all that share the model, or those
that had one."""

Verify = Literal["sampled", "always"]
"""How often bytes are checked: in one step of eight, or in each."""

ReshardAfterForward = bool | Literal["compute_shard"]
"""How much of a unit stays resident between forward and backward: all of it (False), only the
shards (True), or enough in each shard group to gather it again there ("compute_shard")."""


class BackwardPrefetch(enum.Enum):
    """When the backward pass gathers the next unit.

    BACKWARD_PRE: before the current unit's gradients are computed, so that the all-gather overlaps
    with that; one more unsharded unit is resident. BACKWARD_POST: after they are computed and the
    unit is resharded, but before their reduction starts, so that the next unit does not wait for
    the reduction; needs less memory. None: when the next unit runs, after the reduction before it.
    """

    BACKWARD_PRE = "backward_pre"
    BACKWARD_POST = "backward_post"


Check = Callable[[str, Any], Any]
"""Takes an argument's name and value; returns the value, perhaps converted, or raises."""


def one_of(expected: str, *allowed: object) -> Check:
    """A check that the value has one of these classes, or is one of these values.

    It raises TypeError or ValueError, respectively, and says what was `expected`.
    """
    classes = tuple(each for each in allowed if isinstance(each, type))

    def check(name: str, value: Any) -> Any:
        # A bool is an int.
        is_class = isinstance(value, classes) and isinstance(value, bool) == (bool in classes)
        if (value is None and None in allowed) or (is_class if classes else value in allowed):
            return value
        error = TypeError if classes else ValueError
        raise error(f"{name}: expected {expected}, got {value!r}")

    return check


FLAG = one_of("True or False", bool)


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Dtypes of the parts of a step. None leaves a dtype as it is.

    Attributes:
        param_dtype: dtype of unsharded parameters in forward and backward; the main shards, which
            the optimizer updates, keep the original dtype.
        reduce_dtype: dtype in which gradients are reduced; None: the dtype they were computed in;
            "main": that of the main shards. Where the engine adds, it is in float32 at least; gloo
            then sends 16 bits as they are.
        buffer_dtype: dtype to which floating-point buffers are cast at construction.
        output_dtype: dtype to which floating-point outputs of the wrapped module are cast.
        cast_forward_inputs: cast floating-point inputs of each unit to `param_dtype`.
        keep_float32: module classes whose own parameters and buffers stay float32; their inputs
            are cast to float32, and their outputs back to the dtype of the inputs.
        keep_parameters: function of a parameter's name and of it as it was built; True: it keeps
            its dtype in forward.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | Literal["main"] | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    keep_float32: ModuleClasses = ()
    keep_parameters: Callable[[str, nn.Parameter], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if (name, dtype) != ("reduce_dtype", "main") and not (
                dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
            ):
                raise ValueError(
                    f"MixedPrecision.{name}: expected a floating-point torch.dtype or None, "
                    f"got {dtype!r}"
                )
        object.__setattr__(self, "keep_float32", tuple(self.keep_float32))
        for cls in self.keep_float32:
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                raise TypeError(
                    f"MixedPrecision.keep_float32: expected nn.Module classes, got {cls!r}"
                )
        if self.keep_parameters is not None and not callable(self.keep_parameters):
            raise TypeError(
                "MixedPrecision.keep_parameters: expected a function of a name and a parameter, "
                f"or None, got {self.keep_parameters!r}"
            )

    def keeps_float32(self, module: nn.Module) -> bool:
        """Whether the module's own parameters and buffers stay float32."""
        return self.param_dtype is not None and isinstance(module, self.keep_float32)

    def input_dtype(self, unit_module: nn.Module) -> torch.dtype | None:
        """Dtype to which floating-point inputs of a unit are cast; None: they are not cast."""
        casts = self.cast_forward_inputs and not self.keeps_float32(unit_module)
        return self.param_dtype if casts else None


@dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
    """Parts of the model in host memory; no effect on the CPU. See docs/reference/layered.md.

    Attributes:
        params: keep main shards, their gradients and the optimizer's state there.
        grads: keep gradients there that add up over micro-batches.
        pin_memory: page-lock the memory, so that copies are asynchronous. Without it each copy
            blocks the host until the device has reached it.
    """

    params: bool = False
    grads: bool = False
    pin_memory: bool = True


@dataclass(frozen=True, kw_only=True)
class ReductionPolicy:
    """How reductions share the connection and memory with the rest of a step.

    Attributes:
        separate_groups: reduce over process groups of their own, so that a gather does not queue
            behind a reduction in the backend. Collective: the same on every rank.
        in_flight: bound, such as "512MB", on the gradients that reductions under way may hold
            together; a unit larger than that is reduced alone. None: one unit's at a time.
    """

    separate_groups: bool = False
    in_flight: str | None = None

    def __post_init__(self) -> None:
        FLAG("ReductionPolicy.separate_groups", self.separate_groups)
        one_of("a size such as '512MB' or None", str, None)(
            "ReductionPolicy.in_flight", self.in_flight
        )
        if self.in_flight is not None:
            parse_nbytes(self.in_flight, "ReductionPolicy.in_flight")


@dataclass(frozen=True, kw_only=True)
class GatherBudget:
    """Number, or bytes, of unsharded units that prefetching may keep resident. None: no bound."""

    max_units: int | None = None
    max_nbytes: int | None = None
    is_default: bool = field(default=False, repr=False, compare=False)
    """Whether the user chose none."""

    @classmethod
    def parse(cls, value: bool | int | str, *, default_units: int) -> GatherBudget:
        """Parse the `limit_all_gathers` argument: False, True, units (int) or bytes ("512MB").

        Raises:
            ValueError, TypeError: it is none of these.
        """
        if value is False:
            return cls()
        if value is True:
            return cls(max_units=default_units, is_default=True)
        if isinstance(value, int):
            if value < 1:
                raise ValueError(f"limit_all_gathers: expected at least 1 unit, got {value}")
            return cls(max_units=value)
        if isinstance(value, str):
            return cls(max_nbytes=parse_nbytes(value, "limit_all_gathers"))
        raise TypeError(
            "limit_all_gathers: expected bool, int (units) or str such as '2GB' (bytes), got "
            f"{value!r}"
        )


_NBYTES_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B\s*", re.I)


def parse_nbytes(value: float | str, name: str, least: int = 1) -> int:
    """Parse a number of bytes, or a string such as "512MB" or "1.5 GiB".

    Args:
        name: of the argument, for the message.
        least: smallest number of bytes that is accepted.

    Raises:
        ValueError: it is neither, or less than `least`.
    """
    number = value
    if isinstance(value, str) and (match := _NBYTES_PATTERN.fullmatch(value)):
        base, letter = 1024 if match[3] else 1000, match[2]
        number = float(match[1]) * base ** ("KMGT".index(letter.upper()) + 1 if letter else 0)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not isfinite(number):
        raise ValueError(f"{name}: expected a size such as '512MB' or '2GiB', got {value!r}")
    if number < least:
        raise ValueError(f"{name}: expected at least {least} B, got {value!r}")
    return int(number)


def size_text(nbytes: int) -> str:
    """`nbytes` in the unit in which `parse_nbytes` and docs count: powers of ten."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"


def prefetch_depth(name: str, value: bool | int) -> int:
    """Parse a prefetch depth: False is 0, True is 1, an int is itself. Raises ValueError."""
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: expected a bool or a depth >= 0, got {value!r}")
    return int(value)
