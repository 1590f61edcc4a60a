"""What the fork server imports once, so that each rank starts with it.

Only imports: an operator run here could start threads, which a fork does not copy.
"""

import contextlib
import ctypes
import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",  # torch.optim imports it at the first step
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "tests.harness.checks",
    "tests.harness.compare",
    "tests.harness.models",
    "tests.harness.ranks",
    "tests.harness.reference",
    "tests.harness.traffic",
    "layerzero",
)
EXTRAS = (
    "finetuning_scheduler",
    "lightning.pytorch",
    "megatron.core.models.gpt",
    "transformers.trainer",
)
"""Need not be there, and take as long as all others: not where this is a fork of a pytest that has
collected no test with them."""

_is_fork = "tests.conftest" in sys.modules
_extras = (name for name in EXTRAS if not _is_fork or name.partition(".")[0] in sys.modules)
# Most of its modules load at their first use, which is in each group of ranks.
_ROOT = Path(__file__).parents[2]
_own = (
    ".".join(path.relative_to(_ROOT).with_suffix("").parts)
    for path in (_ROOT / "layerzero").rglob("[a-z]*.py")
    if "integrations" not in path.parts
)
for _name in (*MODULES, *_extras, *_own):
    # A package that does not import must fail in the test that uses it, not here.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

# A rank that died reports nothing, and the others wait for it: with ranks on one machine, shorter.
with contextlib.suppress(Exception):
    for _name in ("layerzero.watch.diagnosis", "layerzero.watch.watchdog"):
        importlib.import_module(_name).REPORT_SECONDS = 2.0

# A rank leaves at once, and so would leave the semaphore of a progress bar behind.
with contextlib.suppress(Exception):
    importlib.import_module("tqdm.std").TqdmDefaultWriteLock.mp_lock = None

# A collection in a rank visits every object, and a visit copies the page it is on: for all that was
# imported here that took longer than most tests.
gc.collect()
gc.freeze()

_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1; the mmap module does not name it
_HUGE_NBYTES = 2 << 20


def _huge_pages() -> Iterator[int]:
    """Addresses of the anonymous memory that fills whole huge pages."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, _, *name = line.split(maxsplit=5)
        first, end = (int(address, 16) for address in span.split("-"))
        if access == "rw-p" and name in ([], ["[heap]"]):
            yield from range(
                -(-first // _HUGE_NBYTES) * _HUGE_NBYTES, end - _HUGE_NBYTES + 1, _HUGE_NBYTES
            )


def _gather_in_huge_pages() -> None:
    """Put the memory of the imports into huge pages, where the system can.

    A fork copies one entry for each page, and the end of a rank takes each back. Of pages of 4 KB
    they are a hundred thousand, and took two fifths of the processor time of an empty rank.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address in _huge_pages():
        libc.madvise(address, _HUGE_NBYTES, _COLLAPSE)


with contextlib.suppress(OSError, AttributeError):
    _gather_in_huge_pages()
