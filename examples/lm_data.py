"""Collects the bytes that the example trains on. Uses the standard library only."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Third-party packages, tests (which many machines lack, and all should train on similar data) and
# two large packages of tables, which look like noise.
SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
)


def stdlib_sources() -> Iterator[Path]:
    """The source files of the Python standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in root.rglob("*.py"):
        if SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts):
            yield file


def files_under(folder: Path) -> Iterator[Path]:
    """Every regular file below `folder`, except hidden ones and those in hidden folders."""
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not hidden:
            yield file


def read_corpus(path: Path | None) -> bytearray:
    """The bytes of `path` (a file, or a folder's files in name order), or of the standard library.

    The order is by name, so ranks and machines with the same files see the same bytes. A bytearray,
    not bytes, because torch takes a writable buffer without a copy.

    Raises:
        OSError: `path` does not exist or a file in it cannot be read.
    """
    if path is None:
        files = sorted(stdlib_sources())
    elif path.is_dir():
        files = sorted(files_under(path))
    else:
        files = [path]
    corpus = bytearray()
    for file in files:
        corpus += file.read_bytes()
    return corpus
