"""What test_wheel.py runs where layerzero was installed: a step, and all tests of the ops if the
argument is "ops"."""

import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

OPS = ("find_changed", "flat_step", "pack", "sums")
TESTS = Path(__file__).parent


def train_a_step() -> None:
    import layerzero

    assert Path(layerzero.__file__).is_relative_to(sys.prefix), layerzero.__file__
    store = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    model = layerzero.ZeRO3(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)
    dist.destroy_process_group()
    print("installed:", layerzero.__version__, layerzero.native_status().native, flush=True)


def run_ops() -> int:
    # Some tests call no kernel, or only register it.
    names = (f"{TESTS}/test_{name}.py" for name in OPS)
    chosen = "not (reference or opcheck)"
    return pytest.main(["-q", "-p", "no:cacheprovider", *names, "-k", chosen])


if __name__ == "__main__":
    train_a_step()
    sys.exit(run_ops() if sys.argv[1:] == ["ops"] else 0)
