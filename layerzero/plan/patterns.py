"""The pattern language for dotted names: parse a pattern, match a name, fill a template. No torch.

    {*}       a number: a whole run of digits
    {0-4}     a number from 0 to 4, both included
    *         any number of any characters, dots included
    ?         any one character
    re:...    a Python regular expression
    others    themselves

A pattern must match the whole name. What its wildcards matched can fill those of another pattern,
in order (`NamePattern.fill`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_REGEX_PREFIX = "re:"
_MOST_NUMBERS = 10_000
_NUMBER = re.compile(r"\{(?:\*|([0-9]+)-([0-9]+))\}")
_WILDCARD = re.compile(f"{_NUMBER.pattern}|[*?]")
_LANGUAGE = (
    "a pattern is a name in which {*} matches a number, {0-4} a number in a range, * any "
    "characters and ? one character; or 're:' and a regular expression"
)


@dataclass(frozen=True)
class NamePattern:
    """One pattern on dotted names."""

    text: str
    """The pattern as the user wrote it."""
    is_regex: bool
    _compiled: re.Pattern[str]

    @classmethod
    def parse(cls, text: str) -> NamePattern:
        """Read a pattern.

        Raises:
            TypeError: not a string.
            ValueError: not a pattern; the message says at which position, and what to write.
        """
        if not isinstance(text, str):
            raise TypeError(f"pattern: expected a string, got {text!r}; {_LANGUAGE}")
        if text.startswith(_REGEX_PREFIX):
            try:
                compiled = re.compile(text.removeprefix(_REGEX_PREFIX), re.DOTALL)
            except re.error as error:
                raise ValueError(f"pattern {text!r}: not a regular expression: {error}") from None
            return cls(text, True, compiled)
        return cls(text, False, re.compile("".join(_regexes(text)), re.DOTALL))

    def match(self, name: str) -> re.Match[str] | None:
        """Match the whole of `name`; None if it does not match."""
        return self._compiled.fullmatch(name)

    def fill(self, match: re.Match[str], owner: NamePattern) -> str:
        """This pattern with its wildcards replaced by what those of `owner` matched, in order.

        With a regular expression as `owner`, `\\1` and `\\g<name>` stand for its groups instead.

        Raises:
            ValueError: it has more wildcards than `owner`, or names a group that `owner` lacks.
        """
        if owner.is_regex:
            try:
                return match.expand(self.text)
            except (re.error, IndexError) as error:
                raise ValueError(
                    f"{self.text!r} refers to a group that {owner.text!r} does not have: {error}"
                ) from None
        captures = iter(match.groups(""))
        try:
            return _WILDCARD.sub(lambda _: next(captures), self.text)
        except StopIteration:
            raise ValueError(
                f"{self.text!r} has more wildcards than {owner.text!r}, whose matches fill them in "
                "order"
            ) from None


def _regexes(text: str) -> Iterator[str]:
    """Of each part of a pattern."""
    position = 0
    after_number = False
    while position < len(text):
        character = text[position]
        number = _NUMBER.match(text, position)
        if number is not None:
            _refuse_adjacent(text, position, number.end(), after_number)
            yield _number_regex(text, number)
            position = number.end()
            after_number = True
            continue
        if character in "{}[]":
            raise ValueError(
                f"pattern {text!r}: unexpected {character!r} at {position}; {_LANGUAGE}"
            )
        if character in "*?":
            yield "(.*)" if character == "*" else "(.)"
        else:
            yield re.escape(character)
        position += 1
        after_number = False


def _refuse_adjacent(text: str, start: int, stop: int, after_number: bool) -> None:
    """Raise ValueError for a number beside a digit or another number.

    A number is a whole run of digits, so such a pattern could never match.
    """
    touches = text[start - 1 : start].isdigit() or text[stop : stop + 1].isdigit()
    if after_number or touches:
        raise ValueError(
            f"pattern {text!r}: {text[start:stop]!r} at {start} is next to a digit or another "
            "number, but matches a whole run of digits; write the number out, or use 're:'"
        )


def _number_regex(text: str, number: re.Match[str]) -> str:
    digits = "[0-9]+"
    if number[1] is not None:
        low, high = int(number[1]), int(number[2])
        if low > high:
            raise ValueError(f"pattern {text!r}: {number[0]} is empty; write {{{high}-{low}}}")
        if high - low >= _MOST_NUMBERS:
            raise ValueError(
                f"pattern {text!r}: {number[0]} has more than {_MOST_NUMBERS} numbers; write "
                "{*}, or use 're:'"
            )
        digits = f"0*(?:{'|'.join(map(str, range(low, high + 1)))})"
    return f"(?<![0-9])({digits})(?![0-9])"
