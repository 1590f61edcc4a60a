"""Which bytes the example trains on. Standard library only, like the check of the flags."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Other people's packages, tests (many machines lack them, and all should train on like data) and
# the two large packages of tables, which read as noise.
SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
)


def stdlib_sources() -> Iterator[Path]:
    """The Python standard library's own modules."""
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
