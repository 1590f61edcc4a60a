"""Names of experts by their number among all, where modules number those of this rank alone.

Two ranks, four experts, in a list on each rank (`experts.0` and `experts.1` are modules of both):

    rank                                          0                  1
    named_parameters, named_modules, units        experts.0, .1      experts.0, .1
    state dicts, checkpoints, parameter.layerzero experts.0, .1      experts.2, .3

The list has a mark that maps one number to the other, and hooks that rename entries of state dicts
where the list's own part of the name is at hand, so that it holds for the wrapper, the wrapped
module and any module inside alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import nn

Numbers = Mapping[str, str]
"""From names of a list's members to their names among all ranks' members."""

_MARK = "_layerzero_numbers"
_PREFIX = "_layerzero_prefix"
"""Of the list's entries in a state dict, while that is loaded."""
_ASKED_BY_TORCH = "_fqn_modifiers"
"""What `torch.distributed.checkpoint.state_dict` calls on modules that change names."""


def numbers_of(module: nn.Module) -> Numbers:
    """Empty for modules whose members have one name everywhere."""
    numbers: Numbers = module.__dict__.get(_MARK, {})
    return numbers


def name_members(module: nn.Module, numbers: Numbers) -> None:
    """From now on the members have these names wherever names are compared between ranks."""
    is_new = _MARK not in module.__dict__
    module.__dict__[_MARK] = dict(numbers)
    if is_new:
        module.__dict__[_ASKED_BY_TORCH] = _refuse_torch
        module.register_state_dict_post_hook(_show_global)
        module.register_load_state_dict_pre_hook(_take_global)
        module.register_load_state_dict_post_hook(_name_missing)


def _refuse_torch() -> NoReturn:
    raise NotImplementedError(
        "torch.distributed.checkpoint.state_dict: experts have other numbers among all ranks than "
        "the modules of this rank, whose names torch would give their optimizer state, so that one "
        "rank's would take the place of another's; use get_model_state_dict, "
        "get_optimizer_state_dict and so on of layerzero.checkpoint: what they return goes into "
        "torch.distributed.checkpoint"
    )


def global_name(root: nn.Module, name: str) -> str:
    """The name among all ranks of what is called `name` in `root`."""
    module: nn.Module | None = root
    parts = name.split(".")
    for place, part in enumerate(parts):
        if module is None:
            break
        parts[place] = numbers_of(module).get(part, part)
        module = module._modules.get(part)
    return ".".join(parts)


def under_global_names(root: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Entries by the names that state dicts of a sharded `root` have. Names among all may come,
    too: those of a rank's first experts, from 0 on, no other rank's experts have."""
    return {global_name(root, name): value for name, value in state_dict.items()}


def _members(state_dict: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    """Keys of what is inside, with the member's name and the rest of the key."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        member, dot, rest = key[len(prefix) :].partition(".")
        yield key, member, dot + rest


def _show_global(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    numbers = numbers_of(module)
    # All are taken out before any is put back: one's new name may be another's old one.
    entries = [
        (prefix + numbers.get(member, member) + rest, state_dict.pop(key))
        for key, member, rest in _members(state_dict, prefix)
    ]
    state_dict.update(entries)


def _take_global(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    numbers = numbers_of(module)
    locals_by_number = {number: member for member, number in numbers.items()}
    entries = {}
    for key, member, rest in _members(state_dict, prefix):
        value = state_dict.pop(key)
        if member in locals_by_number:
            entries[prefix + locals_by_number[member] + rest] = value
        elif member in numbers:
            unexpected_keys.append(key)  # of a member that another rank has
        else:
            entries[key] = value
    state_dict.update(entries)
    module.__dict__[_PREFIX] = prefix


def _name_missing(module: nn.Module, incompatible: Any) -> None:
    prefix, numbers = module.__dict__.pop(_PREFIX), numbers_of(module)
    for place, key in enumerate(incompatible.missing_keys):
        if key.startswith(prefix):
            member, dot, rest = key[len(prefix) :].partition(".")
            incompatible.missing_keys[place] = prefix + numbers.get(member, member) + dot + rest
