"""What pages and docstrings name exists: paths, members of classes, Notes, links; Python compiles;
and measured figures are those of the committed results.

Each check is a function of a text that returns what it does not find. `SEEDED` has a mistake that
it must find.
"""

import ast
import functools
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.pages import DOCS, REPOSITORY, python_blocks

SUFFIXES = r"(?:py|md|cpp|cu|h|inc|yml|yaml|png|so|toml)"
# Made by a build, a user's own, or DeepSpeed's.
ELSEWHERE = {"layerzero/_C.abi3.so", "train.py", "zero_to_fp32.py"}


@functools.cache
def files() -> frozenset[str]:
    """All files of the repository, or of an unpacked source distribution."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    names = done.stdout.split("\n") if done.returncode == 0 else []
    if not names:
        names = [os.path.relpath(p, REPOSITORY) for p in REPOSITORY.rglob("*") if p.is_file()]
    return frozenset(name for name in names if name and (REPOSITORY / name).exists())


@functools.cache
def endings() -> frozenset[str]:
    """Every path under which a file may be named: `step/unit.py`, `unit.py`, ..."""
    parts = [name.split("/") for name in files()]
    return frozenset("/".join(each[start:]) for each in parts for start in range(len(each)))


def of_kind(*endings: str) -> list[str]:
    return sorted(name for name in files() if name.endswith(endings))


PAGES = [
    name for name in of_kind(".md") if not name.startswith((".github/", "benchmarks/", "csrc/"))
]
RESULTS = [name for name in of_kind(".md") if name.startswith("benchmarks/results/")]
# Records of decisions keep what was true when they were made.
CURRENT = [name for name in PAGES if "/decisions/" not in name]
SOURCES = [
    name
    for name in of_kind(".py")
    if name.startswith(("layerzero/", "tests/", "examples/", "benchmarks/", "docs/"))
    and name != "tests/unit/test_docs.py"
]


def missing_paths(text: str) -> list[str]:
    """Paths from the root anywhere in the text, and file names in backticks, that are not there."""
    rooted = re.findall(
        rf"(?<![\w/.-])((?:layerzero|docs|tests|examples|benchmarks|csrc)/[\w/.-]*\.{SUFFIXES})\b",
        text,
    )
    quoted = re.findall(r"`([a-z][\w/-]*\.(?:py|cpp|cu|h|inc))`", text)
    found = {*rooted, *quoted} - ELSEWHERE
    return sorted(name for name in found if name not in endings())


def _assigned(tree: ast.AST) -> Iterator[str]:
    """Names that a class or module defines: functions, classes, attributes, those of self too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


@functools.cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Class of the package -> (members, names of bases); of equal names, all together."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for name in files():
        if name.startswith("layerzero/") and name.endswith(".py"):
            for node in ast.walk(ast.parse((REPOSITORY / name).read_text())):
                if isinstance(node, ast.ClassDef):
                    members, bases = found.setdefault(node.name, (set(), set()))
                    members |= set(_assigned(node))
                    bases |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    return found


def members_of(cls: str) -> set[str] | None:
    """None where a base is not of the package, and anything may be a member."""
    members, bases = classes()[cls]
    known = set(members)
    for base in bases - {"NamedTuple", "Enum", "Protocol", "object"}:
        # A base of the same name is another package's: `class GradScaler(torch.amp.GradScaler)`.
        inherited = members_of(base) if base in classes() and base != cls else None
        if inherited is None:
            return None
        known |= inherited
    return known


@functools.cache
def modules() -> dict[str, set[str]]:
    """Module of the runtime, by its file's name -> what it defines."""
    return {
        Path(name).stem: set(_assigned(ast.parse((REPOSITORY / name).read_text())))
        for name in files()
        if name.startswith("layerzero/step/") and name.endswith(".py")
    }


def missing_members(text: str) -> list[str]:
    """`Class.member` of our classes, and `module._function` of step/, that are not defined."""
    missing = set()
    for owner, member in re.findall(r"`([A-Za-z_]\w*)\.([A-Za-z_]\w*)(?:\([^`]*\))?`", text):
        if owner in classes():
            members = members_of(owner)
        elif member.startswith("_"):
            members = modules().get(owner)
        else:
            members = None
        if members is not None and member not in members:
            missing.add(f"{owner}.{member}")
    return sorted(missing)


NOTE = re.compile(r"Note\s+\[([^\]]+)\]")


def notes(text: str) -> list[str]:
    """Titles, where one may go on in the next line, of a comment too."""
    return [re.sub(r"\s*\n\s*#?\s*", " ", title) for title in NOTE.findall(text)]


def defined_notes(text: str) -> list[str]:
    """Those at the start of a line, alone or before a colon."""
    return re.findall(r"^\s*(?:#\s*)?Note \[([^\]]+)\](?::|$)", text, re.MULTILINE)


@functools.cache
def all_notes() -> frozenset[str]:
    return frozenset(
        title for name in SOURCES for title in defined_notes((REPOSITORY / name).read_text())
    )


def missing_notes(text: str) -> list[str]:
    return sorted(set(notes(text)) - all_notes() - {"...", "Title"})


def broken_python(text: str) -> list[str]:
    """The first line of each fenced block of Python that does not compile."""
    broken = []
    for block in python_blocks(text):
        try:
            compile(block, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError:
            broken.append(block.splitlines()[0])
    return broken


def long_code(text: str, page: str) -> list[str]:
    """Lines of fenced blocks that a reader would have to scroll sideways for."""
    limit = 88 if page == "README.md" or "/howto/" in page else 100
    blocks = re.findall(r"^```.*?^```$", text, re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if len(line) > limit]


OF_OTHERS = {"a different number of tensors was saved"}
"""Texts of torch that no test repeats."""


@functools.cache
def texts_of_sources() -> str:
    """Sources with the literals of one string joined, as the user sees it."""
    sources = [name for name in SOURCES if name.startswith(("layerzero/", "tests/"))]
    joined = (re.sub(r'"\s*[rf]*"', "", (REPOSITORY / name).read_text()) for name in sources)
    return re.sub(r"\s+", " ", "".join(joined).replace("\\", ""))


def missing_texts(text: str) -> list[str]:
    """Errors quoted as symptoms in tables that no source raises and no test expects."""
    symptoms = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    quoted = re.findall(r'^\| "([^"]+)"|Error`?: `([^`]+)`', "\n".join(symptoms), re.M)
    found = {first or second for first, second in quoted} - OF_OTHERS
    gaps = r"\[?\.\.\.\]?|'[^']*'|\(.*|\d+"
    return sorted(
        each
        for each in found
        if any(part.strip(" :;,") not in texts_of_sources() for part in re.split(gaps, each))
    )


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", each.lower()).strip()) for each in headings}


def broken_links(text: str, page: str) -> list[str]:
    """Links of a page, pictures too, to files or headings that are not there."""
    broken = []
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (REPOSITORY / page).parent / path
        if path and not linked.exists():
            broken.append(target)
            continue
        if anchor and anchor not in anchors(linked.read_text() if path else text):
            broken.append(target)
    return broken


NUMBER = r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)"


def cited_results(paragraph: str) -> list[str]:
    """The result pages that it links to, or whose benchmark it names."""
    linked = re.findall(r"results/(\w+)\.md", paragraph)
    written = tuple(f"{each}_" for each in re.findall(r"bench_(\w+)\.py", paragraph))
    stems = {name: Path(name).stem for name in RESULTS}
    return [name for name, stem in stems.items() if stem in linked or stem.startswith(written)]


def unknown_figures(text: str) -> list[str]:
    """Decimal numbers and percentages of a paragraph, item or table row that cites results, which
    none of these has, rounded or not. A row that says "same run" cites those of the row above."""
    unknown, results = [], list[str]()
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|*] )", text):
        if "| same run |" not in paragraph:
            results = cited_results(paragraph)
        pages = [(REPOSITORY / name).read_text() for name in results]
        measured = [float(number) for page in pages for number in re.findall(NUMBER, page)]
        prose = re.sub(r"`[^`]*`", "", paragraph)  # commands and their options
        for figure, percent in re.findall(rf"({NUMBER})([ \u00a0]?%)?", prose if pages else ""):
            digits = len(figure.partition(".")[2])
            meant = [(float(figure), digits)] if percent or digits else []
            if percent:  # 1.4 % of a step: the page may have 1.4 %, 0.014 or 1.014
                meant += [(float(figure) / 100 + one, digits + 2) for one in (0, 1)]
            bounds = [(number, 0.5 * 10**-places + 1e-9) for number, places in meant]
            near = (abs(value - number) <= most for value in measured for number, most in bounds)
            if bounds and not any(near):
                unknown.append(figure)
    return unknown


def test_every_page_is_reached_from_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    listed = {os.path.normpath(f"docs/{path}") for path in re.findall(r"\]\(([^)#]+\.md)", index)}
    assert {page for page in PAGES if page.startswith("docs/")} - listed == {"docs/README.md"}


API = DOCS / "reference" / "api"
ADAPTERS = ("transformers", "accelerate", "lightning", "megatron", "megatron_checkpoint")
API_PACKAGES = (
    *("", "optim", "checkpoint", "parallel", "memory_plan", "step_ledger", "errors"),
    *(f"integrations.{name}" for name in ADAPTERS),
)


def public_names(package: str) -> set[str]:
    """`__all__` of a package or module below layerzero."""
    path = REPOSITORY.joinpath("layerzero", *package.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = re.search(r"^__all__ = (\[.*?\])", path.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, path
    return set(ast.literal_eval(found[1]))


def shown_names(page: str) -> set[str]:
    """The last part of each `::: path.of.name`."""
    paths = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    return {path.rpartition(".")[2] for path in paths}


def test_the_api_pages_have_every_public_name() -> None:
    pages = "\n".join(path.read_text() for path in sorted(API.glob("*.md")))
    modules = {"checkpoint", "errors", "optim", "__version__"}
    torchs = {"CPUOffloadPolicy", "MixedPrecisionPolicy"}  # torch documents its own classes.
    names = set().union(*(public_names(package) for package in API_PACKAGES)) - modules - torchs
    assert names - shown_names(pages) == set()


def test_the_list_of_api_pages_has_each_name_beside_its_page() -> None:
    rows = (API.parent / "api.md").read_text().splitlines()
    for path in API.glob("*.md"):
        (row,) = [row for row in rows if f"(api/{path.name})" in row]
        assert set(re.findall(r"`(\w+)`", row)) == shown_names(path.read_text()), path.name


CHECKS = {
    missing_paths: [*CURRENT, *SOURCES],
    missing_members: [*CURRENT, *SOURCES],
    missing_notes: [*SOURCES, *PAGES],
    broken_python: PAGES,
    missing_texts: [name for name in CURRENT if name.startswith("docs/howto/")],
    unknown_figures: [name for name in CURRENT if name == "README.md" or name.startswith("docs/")],
}
"""Check of a text -> pages and sources in which it must find nothing."""
CHECKS_BY_PLACE = {long_code: CURRENT, broken_links: [*PAGES, *RESULTS]}
"""Likewise, but the check also depends on where the page is."""


@pytest.mark.parametrize("check", [*CHECKS, *CHECKS_BY_PLACE])
def test_what_texts_name_exists(check: Callable[..., list[str]]) -> None:
    found = {}
    for name in CHECKS.get(check) or CHECKS_BY_PLACE[check]:
        place = (name,) if check in CHECKS_BY_PLACE else ()
        found[name] = check((REPOSITORY / name).read_text(), *place)
    assert {name: missing for name, missing in found.items() if missing} == {}


SEEDED = [
    (
        missing_paths,
        "See docs/layered.md, `step/unti.py`, `layerzero/config.py` and `unit.py`.",
        ["docs/layered.md", "step/unti.py"],
    ),
    (
        missing_members,
        "`FlatLayout.build` and `FlatLayout.construct()`; `OffloadPolicy.params`, `torch.nothing`",
        ["FlatLayout.construct"],
    ),
    (
        missing_notes,
        "as Note [Views outlive\n    # storage] says, and Note [Views outlive their storage]",
        ["Views outlive their storage"],
    ),
    (broken_python, "```python\nx = (1,\n```\n\n```python\ny = 1\n```\n", ["x = (1,"]),
    (
        functools.partial(long_code, page="README.md"),
        f"{'a' * 99}\n```\n{'b' * 88}\n{'c' * 89}\n```\n",
        ["c" * 89],
    ),
    (
        missing_texts,
        '| "the model changed after wrapping" | x |\n| ValueError: `2 ducks in a row` | y |\n',
        ["2 ducks in a row"],
    ),
    (
        unknown_figures,
        "0.12345 of the time, not 0.6 ([table](results/step_xeon2_202611.md)), nor 98.7654 %\n\n"
        "0.12346\n| step | 0.12347 | `benchmarks/bench_step.py` |\n| peak | 0.12348 | same run |",
        ["0.12345", "98.7654", "0.12347", "0.12348"],
    ),
    (
        functools.partial(broken_links, page="docs/page.md"),
        "## A b\n[1](README.md) [2](layered.md) [3](#a-b) [4](#a-c) ![5](figures/none.png)",
        ["layered.md", "#a-c", "figures/none.png"],
    ),
    (
        lambda page: sorted(shown_names(page)),
        "# T\n\n::: layerzero.units\n\n::: layerzero.a.B\n    options:\n      members: false\n",
        ["B", "units"],
    ),
]


@pytest.mark.parametrize(("check", "text", "found"), SEEDED)
def test_a_seeded_mistake_is_found(
    check: Callable[[str], list[str]], text: str, found: list[str]
) -> None:
    assert check(text) == found
