"""Ignored: the modules and parameters of a model that are not sharded; and a walk past these."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from layerzero.flat.names import clean_name
from layerzero.step.unit import get_unit

Modules = Iterable[tuple[str, nn.Module]]


class Ignored:
    """Ignored modules and parameters of a model, by identity and by name.

    The name counts as well, because an ignored module or parameter may be replaced.
    """

    def __init__(self, members: Iterable[nn.Module | nn.Parameter] = ()) -> None:
        self._refs = {id(each): weakref.ref(each) for each in members}
        self.names: set[str] = set()
        """Their names in the model."""

    def name_in(self, root: nn.Module) -> None:
        """Find their names in the model around them, which is about to be used."""
        self._root_ref = weakref.ref(root)
        if self.members:
            self.names.update(
                name for name, each, _ in members_of(self.walk(root)) if self.has(each)
            )

    def has(self, member: nn.Module | nn.Parameter) -> bool:
        reference = self._refs.get(id(member))
        return reference is not None and reference() is member

    @property
    def members(self) -> list[nn.Module | nn.Parameter]:
        return [each for ref in self._refs.values() if (each := ref()) is not None]

    @property
    def modules(self) -> list[nn.Module]:
        return [each for each in self.members if isinstance(each, nn.Module)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [each for each in self.members if isinstance(each, torch.Tensor)]

    def now(self) -> Ignored:
        """The ignored modules and parameters, including those that replaced others."""
        root = self._root_ref()
        members = () if root is None else members_of(self.walk(root))
        found = [each for name, each, _ in members if self._is_ignored(name, each)]
        return Ignored([*self.members, *found])

    def walk(
        self, module: nn.Module, fqn: str = "", seen: set[int] | None = None
    ) -> Iterator[tuple[str, nn.Module]]:
        """Every module that is not ignored, once, with its first name. A wrapper is replaced by the
        module inside it."""
        seen = set() if seen is None else seen
        unit = get_unit(module)
        module = module if unit is None else unit.module
        if id(module) in seen:
            return
        seen.add(id(module))
        yield fqn, module
        for name, child in module._modules.items():
            inner = clean_name(f"{fqn}.{name}" if fqn else name)
            # Scripted modules, which have no sharded parameter, lack the dicts of others.
            is_scripted = isinstance(child, torch.jit.ScriptModule)
            if child is not None and not is_scripted and not self._is_ignored(inner, child):
                yield from self.walk(child, inner, seen)

    def _is_ignored(self, name: str, member: nn.Module | nn.Parameter) -> bool:
        return self.has(member) or name in self.names


def members_of(modules: Modules) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The modules and parameters directly in these modules: the name of each in the model, itself,
    and the slots of its module's parameters, which are others if another module took them over."""
    for fqn, module in modules:
        for name, each in (*module._modules.items(), *module._parameters.items()):
            if each is not None:
                yield clean_name(f"{fqn}.{name}" if fqn else name), each, module._parameters
