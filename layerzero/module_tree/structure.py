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
from collections.abc import Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from layerzero.module_tree.conversions import note_shape, refuse_export, refuse_transform
from layerzero.notices import some
from layerzero.step.extension import Extension
from layerzero.step.ignored import Modules, members_of
from layerzero.step.root import RootState
from layerzero.step.unit import Unit

_children_of = itemgetter("_modules")
_parameters_of = itemgetter("_parameters")


class Structure(Extension):
    """The module tree of one model. References the root module weakly, and those below strongly."""

    was_dropped = False
    """Whether it was changed where values are not written back."""
    first_values: Any = None
    """Whole parameters shown after `to_empty` (first_values.py), until the next check;
    or None."""

    def __init__(self, root: RootState) -> None:
        self._ignored = root.ignored
        self._units = root.units
        self._root_ref = weakref.ref(root.units[0].module)
        modules = [*self._ignored.walk(self._root)]
        self._named = dict(self._named_parameters(modules))
        self._take_snapshot(modules)

    @property
    def _root(self) -> nn.Module:
        root = self._root_ref()
        assert root is not None, "its methods are called on a living model"
        return root

    def before_forward(self, unit: Unit, forward_pass: object) -> None:
        if torch._C._is_tracing() or torch.compiler.is_exporting():
            refuse_export(unit.label)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            refuse_transform(unit.label)
        if self.first_values is not None or not self._is_same():
            self.check("forward")

    def between_passes(self, what: str) -> None:
        self.end_first_values()

    def call_raised(self, unit: Unit, error: BaseException) -> None:
        if len(self._units) > 1:
            note_shape(error, unit.label)

    def check(self, what: str) -> None:
        """Check that the parameters are those that were wrapped. Not collective.

        Args:
            what: the operation that follows, for the message.

        Raises:
            RuntimeError: parameters were added, removed or replaced; names them.
        """
        self.end_first_values()
        if not self._is_same():
            if changes := self.changes():
                raise RuntimeError(
                    f"{what}: the model changed after wrapping: {changes}. New parameters are in "
                    "no unit, so they would not be sharded, reduced or saved. Change modules "
                    "before wrapping and values inside summon_full_params(); or call "
                    "layerzero.rewrap(model) on every rank, and pass new parameters to the "
                    "optimizer. (torch.func.functional_call takes a copy of the module made before "
                    "wrapping, or this one inside summon_full_params() and torch.no_grad())"
                )
            self._take_snapshot(self._ignored.walk(self._root))

    def end_first_values(self) -> None:
        """The model is about to be used."""
        values, self.first_values = self.first_values, None
        if values is not None:
            values.end()

    def _take_snapshot(self, modules: Modules) -> None:
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
        shown_now = self._named_parameters(self._ignored.walk(self._root))
        now = {name: (own.get(id(shown), shown), slots) for name, (shown, slots) in shown_now}
        before = self._named
        came = [name for name in now if name not in before]
        gone = [name for name in before if name not in now]
        replaced = [n for n in now if n in before and not all(map(is_, now[n], before[n]))]
        parts = {"added": came, "removed": gone, "replaced": replaced}
        return "; ".join(f"{what} {some(names)}" for what, names in parts.items() if names)

    def _named_parameters(self, modules: Modules) -> Iterator[tuple[str, tuple[Any, Any]]]:
        for name, each, slots in members_of(modules):
            if isinstance(each, torch.Tensor) and name not in self._ignored.names:
                yield name, (each, slots)
