"""Structure: the module tree of a model as it was wrapped, and the check that it still is the same.

A module or parameter added later is in no unit: it is never gathered, and its gradients stay on the
rank that computed them. So every forward of the model, and whatever reads or saves its weights,
checks the tree first. The check is a few passes over dicts in C, by identity. Only if they differ
does it walk the tree, and compare names to find parameters added, removed or replaced. Changes that
concern no sharded parameter are allowed: modules without parameters, a module around another one
that keeps its name (`checkpoint_wrapper`, `torch.compile`), and ignored ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from layerzero.flat.names import clean_name
from layerzero.notices import some
from layerzero.step.unit import Unit, get_unit

_children_of = itemgetter("_modules")
_parameters_of = itemgetter("_parameters")
_Modules = Iterable[tuple[str, nn.Module]]


class Ignored:
    """Ignored modules and parameters of a model, by identity and by name.

    The name counts as well, because an ignored module or parameter may be replaced.
    """

    def __init__(self, members: Iterable[nn.Module | nn.Parameter] = ()) -> None:
        self._refs = {id(each): weakref.ref(each) for each in members}
        self.names: set[str] = set()
        """Their names in the model; `Structure` fills them in."""

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


class Structure:
    """The module tree of one model. References the root module weakly, and those below strongly."""

    was_dropped = False
    """Whether it was changed where values are not written back."""
    first_values: Any = None
    """Whole parameters shown after `to_empty` (state_dict/first_values.py), until the next check;
    or None."""

    def __init__(self, units: Sequence[Unit], ignored: Ignored) -> None:
        """`units` is the root's list, outermost first."""
        self.ignored = ignored
        self._units = units
        self._root_ref = weakref.ref(units[0].module)
        modules = [*self._modules(units[0].module)]
        if ignored.members:
            ignored.names.update(name for name, each, _ in _members(modules) if ignored.has(each))
        self._named = dict(self._named_parameters(modules))
        self._take_snapshot(modules)

    @property
    def _root(self) -> nn.Module:
        root = self._root_ref()
        assert root is not None, "its methods are called on a living model"
        return root

    def check(self, what: str) -> None:
        """Check that the parameters are those that were wrapped. Not collective.

        Args:
            what: the operation that follows, for the message.

        Raises:
            RuntimeError: parameters were added, removed or replaced; names them.
        """
        if self.first_values is not None:
            self.end_first_values()
        if not self._is_same():
            changes = self.changes()
            if changes:
                raise RuntimeError(
                    f"{what}: the model changed after wrapping: {changes}. New parameters are in "
                    "no unit, so they would not be sharded, reduced or saved. Change modules "
                    "before wrapping and values inside summon_full_params(); or call "
                    "layerzero.rewrap(model) on every rank, and pass new parameters to the "
                    "optimizer. (torch.func.functional_call takes a copy of the module made before "
                    "wrapping, or this one inside summon_full_params() and torch.no_grad())"
                )
            self._take_snapshot([*self._modules(self._root)])

    def end_first_values(self) -> None:
        """The model is about to be used."""
        values, self.first_values = self.first_values, None
        if values is not None:
            values.end()

    def _take_snapshot(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        dicts = [module.__dict__ for _, module in modules]
        self._dicts = dicts[1:]  # Not the root's, which would keep it alive.
        self._children = [dict(_children_of(each)) for each in dicts]
        self._parameter_dicts = [_parameters_of(each) for each in dicts]
        self._parameters = self._parameters_now()

    def _is_same(self) -> bool:
        dicts = [self._root.__dict__, *self._dicts]
        # Dicts are equal when the values are the same objects: modules compare by identity.
        return (
            list(map(_children_of, dicts)) == self._children
            and all(map(is_, map(_parameters_of, dicts), self._parameter_dicts))
            and len(now := self._parameters_now()) == len(self._parameters)
            and all(map(is_, now, self._parameters))
        )

    def _parameters_now(self) -> list[nn.Parameter | None]:
        shown = [*chain.from_iterable(map(dict.values, self._parameter_dicts))]
        own = self._shown_full()
        return [own.get(id(each), each) for each in shown] if own else shown

    def _shown_full(self) -> dict[int, nn.Parameter]:
        """Sharded parameters of units that show unsharded ones (explicit unshard), keyed by the id
        of these."""
        return {
            id(full): sharded
            for unit in self._units
            if unit.shows_unsharded
            for handle in unit.handles
            for full, sharded in zip(handle.unsharded_params, handle.sharded_params, strict=True)
        }

    def changes(self) -> str:
        """The differences, as part of a sentence; empty if there are none."""
        own = self._shown_full()
        shown_now = self._named_parameters(self._modules(self._root))
        now = {name: (own.get(id(shown), shown), slots) for name, (shown, slots) in shown_now}
        before = self._named
        came = [name for name in now if name not in before]
        gone = [name for name in before if name not in now]
        replaced = [n for n in now if n in before and not all(map(is_, now[n], before[n]))]
        parts = {"added": came, "removed": gone, "replaced": replaced}
        return "; ".join(f"{what} {some(names)}" for what, names in parts.items() if names)

    def _modules(
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
                yield from self._modules(child, inner, seen)

    def _is_ignored(self, name: str, member: nn.Module | nn.Parameter) -> bool:
        return self.ignored.has(member) or name in self.ignored.names

    def _named_parameters(self, modules: _Modules) -> Iterator[tuple[str, tuple[Any, Any]]]:
        for name, each, slots in _members(modules):
            if isinstance(each, torch.Tensor) and name not in self.ignored.names:
                yield name, (each, slots)

    def ignored_now(self) -> Ignored:
        """The ignored modules and parameters, including those that replaced others."""
        root = self._root_ref()
        members = () if root is None else _members(self._modules(root))
        found = [each for name, each, _ in members if self._is_ignored(name, each)]
        return Ignored([*self.ignored.members, *found])


def _members(modules: _Modules) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The modules and parameters directly in these modules: the name of each in the model, itself,
    and the slots of its module's parameters, which are others if another module took them over."""
    for fqn, module in modules:
        for name, each in (*module._modules.items(), *module._parameters.items()):
            if each is not None:
                yield clean_name(f"{fqn}.{name}" if fqn else name), each, module._parameters
