"""The pattern language against a slow matcher that shares no code with it; its errors."""

import random

import pytest

from layerzero.plan.patterns import NamePattern


def slow_match(pattern: str, name: str, at: int = 0) -> bool:
    """Whether `pattern` (no regular expression) matches `name` from `at` on, by trying all."""
    if not pattern:
        return at == len(name)
    if pattern[0] == "*":
        return any(slow_match(pattern[1:], name, stop) for stop in range(at, len(name) + 1))
    if pattern[0] == "{":
        inside, rest = pattern[1:].split("}", 1)
        stop = at
        while stop < len(name) and name[stop].isdigit():
            stop += 1
        if stop == at or (at and name[at - 1].isdigit()):
            return False
        low, high = (0, 10**40) if inside == "*" else map(int, inside.split("-"))
        return low <= int(name[at:stop]) <= high and slow_match(rest, name, stop)
    if at == len(name) or (pattern[0] != "?" and pattern[0] != name[at]):
        return False
    return slow_match(pattern[1:], name, at + 1)


def random_pattern(random_: random.Random) -> str:
    low = random_.randint(0, 40)
    number = f"{{{low}-{low + random_.choice([0, 3, 30, 400])}}}"
    parts = ["a", "b", ".", "1", "*", "?", "{*}", number]
    return "".join(random_.choice(parts) for _ in range(random_.randint(0, 6)))


def random_name(random_: random.Random) -> str:
    parts = ["a", "b", ".", "0", "1", "7", "12", "30", "123"]
    return "".join(random_.choice(parts) for _ in range(random_.randint(0, 6)))


def test_random_patterns_match_what_a_slow_matcher_matches() -> None:
    random_ = random.Random(0)
    num_patterns = num_matches = num_refused = 0
    for _ in range(1000):
        text = random_pattern(random_)
        try:
            pattern = NamePattern.parse(text)
        except ValueError as error:
            assert "whole run of digits" in str(error)
            num_refused += 1
            continue
        num_patterns += 1
        for _ in range(12):
            name = random_name(random_)
            expected = slow_match(text, name)
            assert (pattern.match(name) is not None) == expected, (text, name)
            num_matches += expected
    # The sweep says something only if it meets enough of each.
    assert num_patterns > 500 and num_matches > 125 and num_refused > 25


def test_every_range_matches_its_numbers_and_no_others() -> None:
    random_ = random.Random(1)
    for _ in range(100):
        low = random_.choice([0, 1, 9, 10, 99, 100, random_.randint(0, 2000)])
        high = low + random_.choice([0, 1, 9, 10, 90, 900, random_.randint(0, 3000)])
        pattern = NamePattern.parse(f"layers.{{{low}-{high}}}.mlp")
        for number in {0, 1, low - 1, low, low + 1, high - 1, high, high + 1, *range(0, 5000, 37)}:
            if number >= 0:
                matches = pattern.match(f"layers.{number}.mlp") is not None
                assert matches == (low <= number <= high), (low, high, number)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("layers.{*}", ["layers.0", "layers.12"], ["layers", "layers.x", "layers.1.a", "layers."]),
        ("layers.{0-4}", ["layers.0", "layers.4"], ["layers.5", "layers.12", "layers.40"]),
        ("block{08-11}", ["block8", "block08", "block11"], ["block7", "block12", "block"]),
        ("*.norm", ["a.norm", "a.b.norm", ".norm"], ["norm", "a.norm.b", "a.norms"]),
        ("l?yer", ["layer", "l.yer"], ["lyer", "laayer"]),
        ("re:(encoder|decoder)\\.[0-9]+", ["encoder.3"], ["encoder.3.mlp", "my.encoder.3"]),
        ("a+b.c", ["a+b.c"], ["aab.c", "a+bxc"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pattern_matches_whole_names(pattern: str, matching: list[str], others: list[str]):
    parsed = NamePattern.parse(pattern)
    assert [name for name in matching if parsed.match(name) is None] == []
    assert [name for name in others if parsed.match(name) is not None] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.[0-3]", r"unexpected '\[' at 7; .*\{0-4\} a number in a range"),
        ("layers.{0,2}", r"unexpected '\{' at 7"),
        ("layers.{4-0}", r"\{4-0\} is empty; write \{0-4\}"),
        ("layers.{0-10000}", r"\{0-10000\} has more than 10000 numbers; write \{\*\}"),
        ("layers.1{*}", r"'\{\*\}' at 8 is next to a digit"),
        ("{*}{0-4}", r"'\{0-4\}' at 3 is next to a digit or another number"),
        ("re:(", "not a regular expression: missing \\)"),
        (7, "pattern: expected a string, got 7"),
    ],
    ids=str,
)
def test_what_is_no_pattern_is_refused(pattern: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        NamePattern.parse(pattern)


@pytest.mark.parametrize(
    ("owner", "template", "name", "filled"),
    [
        ("layers.{*}.experts", "layers.{*}.mlp", "layers.12.experts", "layers.12.mlp"),
        ("layers.{0-3}.experts.{*}", "layers.{*}", "layers.2.experts.9", "layers.2"),
        ("*.experts", "*", "a.b.experts", "a.b"),
        ("bank", "head", "bank", "head"),
        (r"re:(\w+)\.(?P<i>\d+)\.bank", r"\1.\g<i>", "layers.3.bank", "layers.3"),
    ],
)
def test_wildcards_of_a_template_are_filled_in_order(owner, template, name, filled) -> None:
    pattern = NamePattern.parse(owner)
    match = pattern.match(name)
    assert match is not None
    assert NamePattern.parse(template).fill(match, pattern) == filled


def test_a_template_with_more_wildcards_than_its_owner_is_refused() -> None:
    pattern = NamePattern.parse("layers.{*}.experts")
    with pytest.raises(ValueError, match=r"'layers.\{\*\}.\?' has more wildcards than 'layers"):
        NamePattern.parse("layers.{*}.?").fill(pattern.match("layers.1.experts"), pattern)
    regex = NamePattern.parse(r"re:layers\.(\d+)")
    with pytest.raises(ValueError, match="refers to a group"):
        NamePattern.parse(r"layers.\2").fill(regex.match("layers.1"), regex)
