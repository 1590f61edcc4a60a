"""Parses `act_ckpt` options in the forms that plans and other frameworks write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, get_args

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

ActivationMode = Literal["composable", "wrapped", "wrapped_offload"]
_RECOMPUTATION = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
_ARGUMENTS_OF_MODE: dict[str, tuple[str, ...]] = {
    "composable": _RECOMPUTATION,
    "wrapped": (*_RECOMPUTATION, "checkpoint_fn"),
    "wrapped_offload": ("pin_memory",),
}
_NOT_REENTRANT: Mapping[str, Any] = {
    "use_reentrant": False,
    "checkpoint_impl": CheckpointImpl.NO_REENTRANT,
}
"""Arguments of torch's checkpoint functions, and the only value supported for each."""
_EXPECTED = (
    f"act_ckpt: expected one of {list(get_args(ActivationMode))}, a list of it and a mapping of "
    "arguments, or a mapping with 'mode', got {!r}"
)


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """How a module's activations are kept between its forward and its backward.

    Attributes:
        mode: "composable" or "wrapped": recomputed in backward. "wrapped_offload": kept in host
            memory.
        arguments: arguments of torch's checkpoint function, or `pin_memory`
            (docs/reference/plans.md).

    Raises:
        ValueError: an unknown mode or argument.
    """

    mode: ActivationMode
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_mode(self.mode):
            raise ValueError(
                f"act_ckpt: expected one of {list(get_args(ActivationMode))}, got {self.mode!r}"
            )
        known = _ARGUMENTS_OF_MODE[self.mode]
        taken = {}
        for name, value in self.arguments.items():
            if name in _NOT_REENTRANT and self.mode != "wrapped_offload":
                if value != _NOT_REENTRANT[name]:
                    raise ValueError(
                        f"act_ckpt: {name}={value!r}: reentrant recomputation does not gather "
                        f"parameters again; leave {name} out"
                    )
            elif name not in known:
                raise ValueError(
                    f"act_ckpt: {self.mode!r} has no argument {name!r}; expected {list(known)}"
                )
            else:
                taken[name] = value
        object.__setattr__(self, "arguments", taken)


def is_mode(value: object) -> bool:
    return isinstance(value, str) and value in get_args(ActivationMode)


def read_act_ckpt(value: Any) -> ActivationCheckpointing | None:
    """Parse a mode, (mode,), (mode, arguments), or a mapping or object that has both.

    None and False mean that activations are kept as they are. Arguments may be None.

    Raises:
        ValueError, TypeError: none of these forms, or an unknown mode or argument.
    """
    if value is None or value is False:
        return None
    if isinstance(value, ActivationCheckpointing):
        return value
    mode, arguments = split_act_ckpt(value)
    return ActivationCheckpointing(mode=mode, arguments=arguments)


def split_act_ckpt(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """The mode and the arguments of any of these forms, unchecked.

    Raises:
        TypeError: none of these forms.
    """
    mode, arguments = None, None
    if isinstance(value, str):
        mode = value
    elif isinstance(value, Mapping):
        mode = value.get("mode")
        arguments = {name: each for name, each in value.items() if name != "mode"}
    elif isinstance(value, (list, tuple)) and len(value) in (1, 2):
        mode, arguments = value[0], value[1] if len(value) == 2 else None
    elif hasattr(value, "cfg"):  # ActCkptCfg of finetuning-scheduler
        mode, arguments = getattr(value, "mode", None), value.cfg
    if isinstance(mode, Enum):
        mode = mode.value
    arguments = {} if arguments is None else arguments
    if not isinstance(mode, str) or not isinstance(arguments, Mapping):
        raise TypeError(_EXPECTED.format(value))
    return mode, arguments
