"""What the fork server imports once, so that each rank starts with it.

Only imports: an operator run here could start threads, which a fork does not copy.
"""

import contextlib
import gc
import importlib
import sys
from pathlib import Path

MODULES = (
    "torch._dynamo",  # torch.optim imports it at the first step
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "tests.harness.compare",
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
