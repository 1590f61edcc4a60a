"""What the fork server imports once, so that each rank starts with it.

Only imports: an operator run here could start threads, which a fork does not copy.
"""

import contextlib
import gc
import importlib

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
    "lightning.pytorch",  # extras, which need not be there
    "megatron.core.models.gpt",
)

for _name in MODULES:
    # A package that does not import must fail in the test that uses it, not here.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

# A rank that died reports nothing, and the others wait for it: with ranks on one machine, shorter.
with contextlib.suppress(Exception):
    for _name in ("layerzero.comm.diagnosis", "layerzero.comm.watchdog"):
        importlib.import_module(_name).REPORT_SECONDS = 2.0  # type: ignore[attr-defined]

# A collection in a rank visits every object, and a visit copies the page it is on: for all that was
# imported here that took longer than most tests.
gc.collect()
gc.freeze()
