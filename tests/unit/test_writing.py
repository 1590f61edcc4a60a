"""Docstrings and comments of the engine follow rules 2 and 3 of docs/WRITING.md.

Each check is a function of a text that returns what breaks a rule, and a test of its own shows that
it finds a seeded mistake.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "layerzero"
ROOMS = ("flat", "step", "comm", "watch", "build", "ops")
SOURCES = [
    *sorted(PACKAGE.glob("*.py")),
    *sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")),
]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, those of attributes included."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every block of comments; a comment behind code is a block of its own."""
    start, end, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != end + 1:
                if lines:
                    yield start, "\n".join(lines)
                start, lines = token.start[0], []
            end = token.start[0]
            lines.append(token.string)
    if lines:
        yield start, "\n".join(lines)


def broken(check: Callable[[str], list[str]], *, in_comments: bool) -> dict[str, list[str]]:
    """What `check` returns for the texts of all sources, by place."""
    found = {}
    for path in SOURCES:
        source = path.read_text()
        texts = [*docstrings(source), *(comments(source) if in_comments else ())]
        for line, text in texts:
            if wrong := check(text):
                found[f"{path.relative_to(PACKAGE)}:{line}"] = wrong
    return found


# "Whether", "How", "Which", "Where", "When" and "Why" begin a clause that is itself the noun, such
# as a flag or a count. "What" does so too, but hides which noun: bytes, tensors, a function.
BEGINNING = re.compile(
    r"(?:None or )?(Also|As|At|By|For|From|In|It|Likewise|Of|On|That|Then|Those|To|Under|What|"
    r"Whatever|Whoever|Whose|With)\b"
)


def unnamed_subject(docstring: str) -> list[str]:
    """The first word, if it is neither the noun nor the verb that the docstring describes."""
    found = BEGINNING.match(docstring.strip())
    return [found[1]] if found else []


def test_docstrings_begin_with_the_noun_or_verb_that_they_describe() -> None:
    assert broken(unnamed_subject, in_comments=False) == {}


def test_a_docstring_without_its_noun_is_found() -> None:
    source = (
        'def f():\n    """\n    Of a chunk."""\n\nclass A:\n    b: int\n    """Whether it is."""\n'
    )
    assert [unnamed_subject(text) for _, text in docstrings(source)] == [["Of"], []]


WORD = re.compile(
    r"\b(?:anybody|ask(?:s|ed|ing)?|hears?|heard|know[ns]?|knew|learn(?:s|ed|t)?|meets?|met|"
    r"nobody|somebody|tells?|telling|told|want(?:s|ed)?|whoever|wish(?:es|ed)?)\b",
    re.IGNORECASE,
)
# People want, and a size may be known; neither is a machine that does it.
ALLOWED = re.compile(r"`[^`]*`|\b(?:user|program)s? wants?\b|\b(?:a|an|the) known \w+")


def human_words(text: str) -> list[str]:
    return WORD.findall(ALLOWED.sub("", text))


def test_machines_do_not_tell_know_ask_or_meet() -> None:
    assert broken(human_words, in_comments=True) == {}


def test_a_machine_that_knows_is_found() -> None:
    source = "a = 1  # The rank tells\nb = 2\n# others what it\n# knows: a known size, `ask()`\n"
    assert [human_words(text) for _, text in comments(source)] == [["tells"], ["knows"]]


# Words of an earlier dialect; the glossary in docs/README.md has those of the field.
DIALECT = re.compile(
    r"(?:^|_)(?:asks?|asked|claims?|hears?|know[ns]?|leftovers?|loans?|lookout|meets?|meeting|"
    r"onlooker|party|seats?|shadows?|sits?|surroundings|tells?|wants?|wanted|wish|wishes)(?:_|$)"
)


def dialect_names(source: str) -> list[str]:
    """Classes, functions and arguments with such a word in their names."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.append(node.name)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
    snake = {name: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in names}
    return [name for name in names if DIALECT.search(snake[name])]


def test_names_are_words_of_the_field() -> None:
    found = {str(path.relative_to(PACKAGE)): dialect_names(path.read_text()) for path in SOURCES}
    assert {place: names for place, names in found.items() if names} == {}


def test_a_name_of_the_dialect_is_found() -> None:
    source = "class WishList: ...\ndef tell_of(known: int, unknown: int) -> None: ...\n"
    assert dialect_names(source) == ["WishList", "tell_of", "known"]
