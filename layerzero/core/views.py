"""Which parameters a module shows: this rank's pieces or the full leaves; ties share a place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn


class Slot(NamedTuple):
    """A place that shows a parameter: `module.name`. A tied parameter has several."""

    module: nn.Module
    name: str


class ParameterViews:
    """Swaps what the slots of one unit show. One dict write per slot, nothing allocated."""

    shows_stand_ins: bool
    """Whether slots show neither pieces nor leaves, on purpose: state dicts then give what they
    show."""

    def __init__(self) -> None:
        self.shows_stand_ins = False
        self._entries: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._full: list[nn.Parameter] = []
        self._names: list[str] = []

    def add(
        self, fqn: str, slots: Iterable[Slot], sharded: nn.Parameter, full: nn.Parameter
    ) -> None:
        for module, name in slots:
            self._entries.append((module._parameters, name, sharded))
            self._full.append(full)
            self._names.append(fqn)

    def rename(self, prefix: str) -> None:
        """Put `prefix` before every name."""
        self._names = [f"{prefix}.{name}" for name in self._names]

    def show_sharded(self) -> None:
        for parameters, name, sharded in self._entries:
            parameters[name] = sharded

    def show_unsharded(self, where: str) -> None:
        """Show the full leaves.

        Raises:
            RuntimeError: somebody put another parameter in a slot since it was wrapped.
        """
        for (parameters, name, sharded), full in zip(self._entries, self._full, strict=True):
            if parameters.get(name) is not sharded:
                self._refuse_replaced(where)
            parameters[name] = full

    def hide_unsharded(self) -> list[str]:
        """Show the pieces where full leaves are.

        Returns:
            Names of leaves in whose place somebody has put another parameter; that is dropped.
        """
        replaced = []
        for index, (parameters, name, sharded) in enumerate(self._entries):
            if parameters.get(name) is not self._full[index]:
                replaced.append(self._names[index])
            parameters[name] = sharded
        return replaced

    def show(self, shown: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Show other parameters, given for each sharded one."""
        for parameters, name, sharded in self._entries:
            parameters[name] = shown[sharded]

    def shown_for(self, sharded: nn.Parameter) -> list[nn.Parameter | None]:
        """What each slot of a sharded parameter shows now; None where it was removed."""
        return [parameters.get(name) for parameters, name, each in self._entries if each is sharded]

    def give_back(self, sharded: nn.Parameter, parameter: nn.Parameter) -> None:
        """Put `parameter` where the sharded one is still shown."""
        for parameters, name, each in self._entries:
            if each is sharded and parameters.get(name) is sharded:
                parameters[name] = parameter

    def _refuse_replaced(self, where: str) -> None:
        names = [
            fqn
            for (parameters, name, sharded), full, fqn in zip(
                self._entries, self._full, self._names, strict=True
            )
            if parameters.get(name) is not sharded and parameters.get(name) is not full
        ]
        self.show_sharded()
        raise RuntimeError(
            f"{where}: parameters {names} were replaced or removed after wrapping; the sharded "
            "ones are in place again: copy values into them inside summon_full_params(), or "
            "change the module before wrapping it"
        )
