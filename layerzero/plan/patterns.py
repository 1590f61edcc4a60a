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
from typing import NamedTuple

_REGEX_PREFIX = "re:"
_MOST_NUMBERS = 10_000
_NUMBER = re.compile(r"\{(?:\*|([0-9]+)-([0-9]+))\}")
_LANGUAGE = (
    "a pattern is a name in which {*} matches a number, {0-4} a number in a range, * any "
    "characters and ? one character; or 're:' and a regular expression"
)


class Match(NamedTuple):
    """What the wildcards of a pattern matched, in order, and the underlying `re.Match`."""

    captures: tuple[str, ...]
    regex: re.Match[str] | None


class _Token(NamedTuple):
    regex: str
    is_number: bool
    is_wildcard: bool
    text: str


@dataclass(frozen=True)
class NamePattern:
    """One pattern on dotted names."""

    text: str
    """The pattern as the user wrote it."""
    is_regex: bool
    _compiled: re.Pattern[str]
    _tokens: tuple[_Token, ...]

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
            return cls(text, True, compiled, ())
        tokens = tuple(_tokenize(text))
        compiled = re.compile("".join(token.regex for token in tokens), re.DOTALL)
        return cls(text, False, compiled, tokens)

    def match(self, name: str) -> Match | None:
        """Match the whole of `name`; None if it does not match."""
        found = self._compiled.fullmatch(name)
        if found is None:
            return None
        return Match(tuple(group or "" for group in found.groups()), found)

    def fill(self, match: Match, owner: NamePattern) -> str:
        """This pattern with its wildcards replaced by what those of `owner` matched, in order.

        With a regular expression as `owner`, `\\1` and `\\g<name>` stand for its groups instead.

        Raises:
            ValueError: it has more wildcards than `owner`, or names a group that `owner` lacks.
        """
        if owner.is_regex:
            assert match.regex is not None
            try:
                return match.regex.expand(self.text)
            except (re.error, IndexError) as error:
                raise ValueError(
                    f"{self.text!r} refers to a group that {owner.text!r} does not have: {error}"
                ) from None
        captures = iter(match.captures)
        parts = []
        for token in self._tokens:
            if not token.is_wildcard:
                parts.append(token.text)
                continue
            part = next(captures, None)
            if part is None:
                raise ValueError(
                    f"{self.text!r} has more wildcards than {owner.text!r}, whose matches fill "
                    "them in order"
                )
            parts.append(part)
        return "".join(parts)


def _tokenize(text: str) -> Iterator[_Token]:
    position = 0
    after_number = False
    while position < len(text):
        character = text[position]
        number = _NUMBER.match(text, position)
        if number is not None:
            _refuse_adjacent(text, position, number.end(), after_number)
            yield _Token(_number_regex(text, number), True, True, number[0])
            position = number.end()
            after_number = True
            continue
        if character in "{}[]":
            raise ValueError(
                f"pattern {text!r}: unexpected {character!r} at {position}; {_LANGUAGE}"
            )
        if character in "*?":
            yield _Token("(.*)" if character == "*" else "(.)", False, True, character)
        else:
            yield _Token(re.escape(character), False, False, character)
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
