"""The pattern language for dotted names: parse a pattern, match a name. No torch.

    {*}       a number: a whole run of digits
    {0-4}     a number from 0 to 4, both included
    *         any number of any characters, dots included
    ?         any one character
    re:...    a Python regular expression
    others    themselves

A pattern must match the whole name.
"""

from __future__ import annotations

import re

_REGEX_PREFIX = "re:"
_PART = re.compile(r"\{\*\}|\{([0-9]+)-([0-9]+)\}|.", re.DOTALL)
_WILDCARDS = {"*": ".*", "?": ".", "{*}": "(?<![0-9])[0-9]+(?![0-9])"}


def parse_pattern(text: str) -> re.Pattern[str]:
    """Read a pattern; its `fullmatch` matches names.

    Raises:
        TypeError: not a string.
        ValueError: not a pattern.
    """
    if not isinstance(text, str):
        raise TypeError(f"pattern: expected a string, got {text!r}")
    is_regex = text.startswith(_REGEX_PREFIX)
    regex = text.removeprefix(_REGEX_PREFIX) if is_regex else _PART.sub(_regex_of, text)
    try:
        return re.compile(regex, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {text!r}: not a regular expression: {error}") from None


def _regex_of(part: re.Match[str]) -> str:
    if part[1] is not None:
        if numbers := range(int(part[1]), int(part[2]) + 1):
            return f"(?<![0-9])0*(?:{'|'.join(map(str, numbers))})(?![0-9])"
    elif part[0] not in "{}[]":
        return _WILDCARDS.get(part[0]) or re.escape(part[0])
    raise ValueError(
        f"pattern {part.string!r}: unexpected {part[0]!r} at {part.start()}; a pattern is a name "
        "in which {*} matches a number, {0-4} a number in a range, * any characters and ? one "
        "character; or 're:' and a regular expression"
    )
