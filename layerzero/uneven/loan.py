"""Loan: an object that has another class during a join."""

from __future__ import annotations


class Loan:
    """An object that has another class during a join, and what that adds or replaces."""

    def __init__(self, lent: object, cls: type) -> None:
        self._lent = lent
        self._class = type(lent)
        self._before = dict(lent.__dict__)
        self._names: list[str] = []
        lent.__class__ = cls

    def begins(self) -> None:
        """The new class has set its attributes."""
        before = self._before
        now = self._lent.__dict__
        self._names = [n for n in now if n not in before or before[n] is not now[n]]

    def ends(self) -> None:
        now = self._lent.__dict__
        for name in self._names:
            if name in self._before:
                now[name] = self._before[name]
            else:
                now.pop(name, None)
        self._lent.__class__ = self._class
