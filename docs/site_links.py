"""A hook of mkdocs: links out of docs/ and to folders, which work on GitHub, work in the site.

A link to a file of the repository outside docs/ becomes one to the repository's page; a link to a
folder of docs/ becomes the heading of the list of its pages. Targets are checked here, because
mkdocs sees only the links that are left.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)\)")
_LISTS = {
    "docs/howto": "how-to-pages",
    "docs/reference": "reference",
    "docs/internals": "internals",
}


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    root = Path(config["docs_dir"]).parent
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if not (root / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links {match[2]}, which is not there")
        if target in _LISTS:
            return f"[{match[1]}](#{_LISTS[target]})"
        if target.startswith("docs/"):
            return match[0]
        repository = str(config["repo_url"] or "").rstrip("/")
        return f"[{match[1]}]({repository}/blob/main/{target})" if repository else f"`{target}`"

    return _LINK.sub(replaced, markdown)
