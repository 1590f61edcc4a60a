"""Switches the parameters that modules show between the sharded and the unsharded ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn


class Slot(NamedTuple):
    """A module's attribute that holds a parameter, `module.name`; tied parameters have several."""

    module: nn.Module
    name: str


class _Entry(NamedTuple):
    """One slot: `parameters[name]` shows `sharded` or `full`."""

    parameters: dict[str, nn.Parameter | None]
    name: str
    sharded: nn.Parameter
    full: nn.Parameter
    fqn: str


class ParameterViews:
    """Swaps the parameters in the slots of one unit: one dict write per slot, no allocation."""

    shows_stand_ins: bool
    """Whether slots show other parameters than sharded and unsharded ones, on purpose; state dicts
    then return these as they are."""

    def __init__(self) -> None:
        self.shows_stand_ins = False
        self._entries: list[_Entry] = []

    def add(
        self, fqn: str, slots: Iterable[Slot], sharded: nn.Parameter, full: nn.Parameter
    ) -> None:
        for module, name in slots:
            self._entries.append(_Entry(module._parameters, name, sharded, full, fqn))

    def rename(self, prefix: str) -> None:
        """Put `prefix` before every name."""
        self._entries = [each._replace(fqn=f"{prefix}.{each.fqn}") for each in self._entries]

    def show_sharded(self) -> None:
        for parameters, name, sharded, _, _ in self._entries:
            parameters[name] = sharded

    def show_unsharded(self, where: str) -> None:
        """Show the unsharded parameters.

        Raises:
            RuntimeError: another parameter was put in a slot after wrapping. All slots then show
                the sharded parameters.
        """
        for parameters, name, sharded, full, _ in self._entries:
            if parameters.get(name) is not sharded:
                self._refuse_replaced(where)
            parameters[name] = full

    def hide_unsharded(self) -> list[str]:
        """Show the sharded parameters instead of the unsharded ones.

        Returns:
            FQNs of parameters whose slot held another parameter, which is now dropped.
        """
        replaced = []
        for parameters, name, sharded, full, fqn in self._entries:
            if parameters.get(name) is not full:
                replaced.append(fqn)
            parameters[name] = sharded
        return replaced

    def show(self, shown: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Show other parameters, given by a map from sharded ones."""
        for parameters, name, sharded, _, _ in self._entries:
            parameters[name] = shown[sharded]

    def shown_for(self, sharded: nn.Parameter) -> list[nn.Parameter | None]:
        """Parameter that each slot of `sharded` shows now; None if it was removed."""
        return [e.parameters.get(e.name) for e in self._entries if e.sharded is sharded]

    def give_back(self, sharded: nn.Parameter, parameter: nn.Parameter) -> None:
        """Put `parameter` in every slot that still shows `sharded`."""
        for parameters, name, each, _, _ in self._entries:
            if each is sharded and parameters.get(name) is sharded:
                parameters[name] = parameter

    def _refuse_replaced(self, where: str) -> None:
        names = [
            fqn
            for parameters, name, sharded, full, fqn in self._entries
            if parameters.get(name) is not sharded and parameters.get(name) is not full
        ]
        self.show_sharded()
        raise RuntimeError(
            f"{where}: parameters {names} were replaced or removed after wrapping; the sharded "
            "parameters have been restored: copy values into them inside summon_full_params(), or "
            "change the module before wrapping it"
        )
