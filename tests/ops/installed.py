"""What test_wheel.py runs in an environment into which layerzero was installed, without arguments:
a step, and what was installed. With a library in which an op writes out of bounds: the step and all
tests of the ops, then one test with that library in the place of the installed one."""

import os
import sys
import tempfile
from collections.abc import Callable
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


def run_tests(*options: str) -> int:
    return pytest.main(["-q", "-p", "no:cacheprovider", *options])


def all_ops() -> int:
    train_a_step()
    # Some tests call no kernel, or only register it.
    names = (f"{TESTS}/test_{name}.py" for name in OPS)
    return run_tests(*names, "-k", "not (reference or compiled or opcheck)")


def one_op() -> int:
    from layerzero.ops import native_status

    assert native_status().native, native_status().reason
    return run_tests(f"{TESTS}/test_find_changed.py", "-k", "any_density")


def exit_code_of(run: Callable[[], int]) -> int:
    """Of a process that has torch, and loads the library itself."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            code = run()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(broken: str = "") -> None:
    if not broken:
        train_a_step()
        return
    assert "layerzero" not in sys.modules
    assert exit_code_of(all_ops) == 0
    (library,) = Path(sys.prefix).glob("lib/python*/site-packages/layerzero/_C.abi3.so")
    os.replace(broken, library)
    print("with the broken library:", abs(exit_code_of(one_op)))


if __name__ == "__main__":
    main(*sys.argv[1:])
