"""Measured figures in README and docs are those of the committed results.

A paragraph, list item or table row that links to a page of benchmarks/results, or names the
benchmark that wrote one, may only have decimal numbers and percentages that the page has too,
rounded or not.
"""

import re
from collections.abc import Iterable

from tests.harness.pages import DOCS, REPOSITORY

RESULTS = {
    path.name: path.read_text()
    for path in sorted((REPOSITORY / "benchmarks" / "results").glob("*.md"))
}
NUMBER = r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)"
SPACE = r"[ \u00a0]"


def paragraphs(text: str) -> Iterable[str]:
    """Paragraphs, items and rows; a row that says "same run" with the row above it."""
    above = ""
    for part in re.split(r"\n\s*\n|\n(?=[-|*] )", text):
        if "| same run |" in part:
            yield part + " " + " ".join(sources(above))
        else:
            above = part
            yield part


def sources(paragraph: str) -> list[str]:
    """The result pages that a paragraph links to, or whose benchmark it names."""
    names = set(re.findall(r"results/(\w+\.md)", paragraph))
    for benchmark in re.findall(r"bench_(\w+)\.py", paragraph):
        names |= {name for name in RESULTS if name.startswith(f"{benchmark}_")}
    return sorted(f"results/{name}" for name in names)


def unknown_figures(text: str) -> list[str]:
    """Figures of `text` that no result page beside them has."""
    unknown = []
    for paragraph in paragraphs(text):
        pages = [RESULTS.get(name.removeprefix("results/"), "") for name in sources(paragraph)]
        if not pages:
            continue
        measured = [float(number) for page in pages for number in re.findall(NUMBER, page)]
        prose = re.sub(r"`[^`]*`", "", paragraph)  # commands and their options
        for figure, percent in re.findall(rf"({NUMBER})({SPACE}?%)?", prose):
            digits = len(figure.partition(".")[2])
            if percent:  # 1.4 % of a step: the page may have 1.4 %, 0.014 or 1.014
                meant = [(float(figure) / 100 + one, digits + 2) for one in (0, 1)]
                meant.append((float(figure), digits))
            elif digits:
                meant = [(float(figure), digits)]
            else:
                continue
            if not any(_rounds_to(value, *each) for value in measured for each in meant):
                unknown.append(figure)
    return unknown


def _rounds_to(value: float, figure: float, digits: int) -> bool:
    """Whether `value` may be written as `figure`, either way where it lies in the middle."""
    return abs(value - figure) <= 0.5 * 10**-digits + 1e-9


def test_figures_of_pages_were_measured() -> None:
    pages = [path for path in DOCS.rglob("*.md") if "decisions" not in path.parts]
    for page in (REPOSITORY / "README.md", *pages):
        assert unknown_figures(page.read_text()) == [], page


def test_a_figure_that_nobody_measured_is_found() -> None:
    name = next(iter(RESULTS))
    link = f"([table](benchmarks/results/{name}))"
    assert unknown_figures(f"It takes 0.123456 of the time {link}.") == ["0.123456"]
    assert unknown_figures(f"It takes 98.7654 % more\nthan others {link}.") == ["98.7654"]
    first = next(n for n in re.findall(NUMBER, RESULTS[name]) if "." in n)
    assert unknown_figures(f"It takes {first} of the time {link}.\n\nOthers 0.123456.") == []
    row = f"| step | 0.123456 | `python benchmarks/bench_{name.rsplit('_', 2)[0]}.py` |"
    assert unknown_figures(row + "\n| peak | 0.654321 | same run |") == ["0.123456", "0.654321"]
