"""A hook of mkdocs: the site has README.md as its front page, and links that work on GitHub work.

Files of the repository outside docs/ that pages link are part of the site: README.md is
index.html, docs/README.md is README.html, and the others keep their paths. mkdocs then checks
every link and anchor itself. A link to any other file becomes one to the repository's page, if
mkdocs.yml has a `repo_url`, else its path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

_BESIDE = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "SECURITY.md")
_RESULTS = "benchmarks/results"
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_BOOSTS = {"howto": 4, "reference": 2, "reference/api": 1}
# A link to a folder leads to the list of its files.
_LISTS = {
    "docs/howto": "README.md#how-to-pages",
    "docs/reference": "README.md#reference",
    "docs/internals": "README.md#internals",
    _RESULTS: f"{_RESULTS}/index.md",
}


def _root(config: Any) -> Path:
    return Path(config["docs_dir"]).parent


def on_files(files: Any, *, config: Any) -> Any:
    root = _root(config)

    def add(name: str, **content: str) -> None:
        files.append(File.generated(config, name, inclusion=InclusionLevel.NOT_IN_NAV, **content))

    index = files.get_file_from_path("README.md")
    files.remove(index)
    files.append(
        File(
            "README.md",
            index.src_dir,
            index.dest_dir,
            use_directory_urls=False,
            dest_uri="README.html",
        )
    )
    files.append(File.generated(config, "index.md", abs_src_path=str(root / "README.md")))
    results = sorted((root / _RESULTS).iterdir())
    for path in [*(root / name for name in _BESIDE), *results]:
        add(path.relative_to(root).as_posix(), abs_src_path=str(path))
    titles = [
        f"- [{path.read_text().partition('# ')[2].partition(chr(10))[0]}]({path.name})"
        for path in results
        if path.suffix == ".md"
    ]
    add(f"{_RESULTS}/index.md", content="# Results\n\n" + "\n".join(titles) + "\n")
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    root = _root(config)
    source = page.file.src_uri
    # A search finds answers before what explains or records.
    page.meta["search"] = {"boost": _BOOSTS.get(posixpath.dirname(source), 0.5)}
    # Of this page, relative to the repository.
    path = {"index.md": "README.md"}.get(source, source)
    if (root / "docs" / source).exists():
        path = f"docs/{source}"

    def replaced(match: re.Match[str]) -> str:
        picture, text, link, anchor = match.groups(default="")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if target in _LISTS:
            name = _LISTS[target]
        elif target == "README.md":
            name = "index.md"
        else:
            name = target.removeprefix("docs/")
        if files.get_file_from_path(name.partition("#")[0]) is None:
            if picture or target.startswith("docs/") or not (root / target).exists():
                return match[0]  # mkdocs finds that it leads nowhere.
            repository = str(config["repo_url"] or "").rstrip("/")
            return f"[{text}]({repository}/blob/main/{target})" if repository else f"`{target}`"
        relative = posixpath.relpath(name, posixpath.dirname(source) or ".")
        return f"{picture}[{text}]({relative}{anchor})"

    # Every other part is a fenced block.
    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts)
