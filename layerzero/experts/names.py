"""Translates local expert numbers in names to global ones, for state dicts and checkpoints.

Two ranks, four experts, in a list on each rank (both ranks have modules `experts.0` and `.1`):

    rank                                          0                  1
    named_parameters, named_modules, units        experts.0, .1      experts.0, .1
    state dicts, checkpoints, parameter.layerzero experts.0, .1      experts.2, .3

An attribute of the list maps local to global numbers, and hooks on the list rename its entries in
state dicts. So renaming works for the wrapper, the wrapped module and any module inside alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import nn

Numbers = Mapping[str, str]
"""Maps local names of a list's members to global ones."""

_MARK = "_layerzero_numbers"
_PREFIX = "_layerzero_prefix"
"""Attribute with the prefix of the list's entries in a state dict, while that is being loaded."""
_CALLED_BY_TORCH = "_fqn_modifiers"
"""Method that `torch.distributed.checkpoint.state_dict` calls on modules that change names."""


def numbers_of(module: nn.Module) -> Numbers:
    """The numbers of a module; empty if its members have the same names on all ranks."""
    numbers: Numbers = module.__dict__.get(_MARK, {})
    return numbers


def name_members(module: nn.Module, numbers: Numbers) -> None:
    """Use these names for the members wherever names are compared between ranks."""
    is_new = _MARK not in module.__dict__
    module.__dict__[_MARK] = dict(numbers)
    if is_new:
        module.__dict__[_CALLED_BY_TORCH] = _refuse_torch
        module.register_state_dict_post_hook(_show_global)
        module.register_load_state_dict_pre_hook(_take_global)
        module.register_load_state_dict_post_hook(_name_missing)


def _refuse_torch() -> NoReturn:
    raise NotImplementedError(
        "torch.distributed.checkpoint.state_dict uses module names, but the experts in this list "
        "have local names, which are the same on ranks with other experts: one rank's state would "
        "replace another's; use get_model_state_dict, get_optimizer_state_dict and so on of "
        "layerzero.checkpoint, whose results torch.distributed.checkpoint can save"
    )


def global_name(root: nn.Module, name: str) -> str:
    """The global name of what is called `name` in `root` on this rank."""
    module: nn.Module | None = root
    parts = name.split(".")
    for place, part in enumerate(parts):
        if module is None:
            break
        parts[place] = numbers_of(module).get(part, part)
        module = module._modules.get(part)
    return ".".join(parts)


def under_global_names(root: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`state_dict` with the names that state dicts of a sharded `root` have.

    Translates local names. Global names of this rank's own experts stay: local numbers begin at 0,
    and are global numbers only on the rank with the first experts, where both are the same.
    """
    return {global_name(root, name): value for name, value in state_dict.items()}


def _members(state_dict: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    """(key, name of the member, rest of the key) of each entry under `prefix`."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        member, dot, rest = key[len(prefix) :].partition(".")
        yield key, member, dot + rest


def _show_global(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    numbers = numbers_of(module)
    # Remove all before adding any: the new name of one may be the old name of another.
    entries = [
        (prefix + numbers.get(member, member) + rest, state_dict.pop(key))
        for key, member, rest in _members(state_dict, prefix)
    ]
    state_dict.update(entries)


def _take_global(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    *_, unexpected_keys, _ = others  # torch's arguments of a hook before a load.
    numbers = numbers_of(module)
    locals_by_number = {number: member for member, number in numbers.items()}
    entries = {}
    for key, member, rest in _members(state_dict, prefix):
        value = state_dict.pop(key)
        if member in locals_by_number:
            entries[prefix + locals_by_number[member] + rest] = value
        elif member in numbers:
            unexpected_keys.append(key)  # An expert of another rank.
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
