"""`optional_modules` by name, for adapters whose users configure a model that does not exist yet.

Names are fully qualified names, or patterns as in plans (docs/reference/plans.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from layerzero.plan.options import near_matches
from layerzero.plan.patterns import NamePattern
from layerzero.plan.resolve import named_modules


def optional_by_name(root: nn.Module, listed: Any) -> Iterator[nn.Module]:
    """The `optional_modules` argument of `ZeRO3(root)`: each name replaced by what it matches.

    Of what a pattern matches, modules inside another one are left out. Raises while it is iterated,
    which `ZeRO3` does where it can raise on every rank.

    Args:
        listed: names, patterns or modules.

    Raises:
        TypeError: not an iterable of these.
        ValueError: a name matches nothing; lists near matches.
    """
    if isinstance(listed, (str, nn.Module)) or not isinstance(listed, Iterable):
        got = type(listed).__name__ if isinstance(listed, nn.Module) else repr(listed)
        raise TypeError(f"optional_modules: expected a list of names or modules, got {got}")
    for each in listed:
        if isinstance(each, str):
            yield from _matching(root, each)
        else:
            yield each


def _matching(root: nn.Module, text: str) -> Iterator[nn.Module]:
    try:
        pattern = NamePattern.parse(text)
    except ValueError as error:
        raise ValueError(f"optional_modules: {error}") from None
    known = {name: module for name, module in reversed(list(named_modules(root))) if name}
    names = [name for name, _ in named_modules(root) if name and pattern.match(name) is not None]
    if not names:
        series = [re.sub("[0-9]+", "{*}", name) for name in known]
        raise ValueError(
            f"optional_modules: {text!r} matches no module{near_matches(text, [*series, *known])}; "
            "a name must match a whole name of named_modules()"
        )
    inside: set[int] = set()
    for name in names:
        if id(known[name]) not in inside:
            inside |= {id(part) for part in known[name].modules()}
            yield known[name]
