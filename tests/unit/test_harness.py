"""The harness itself: every way a rank can end is told apart, and nothing stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.harness import expected_time
from tests.harness.checks import assert_bitwise, assert_close, assert_same_parameters
from tests.harness.models import CASES, Mlp, loss_of
from tests.harness.ranks import run_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    backward_of_all_ranks,
    batches_of,
    full_gradients,
    full_parameters,
    seeded,
    train_unsharded,
)


def _who_am_i(offset: int) -> tuple[int, int, int]:
    return dist.get_rank() + offset, dist.get_world_size(), os.getpid()


def _sum_of_ranks() -> torch.Tensor:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total


def _draws() -> tuple[float, float, int]:
    return torch.rand(()).item(), float(np.random.rand()), torch.get_num_threads()


def _rank_0_is_late() -> int:
    if dist.get_rank() == 0:
        time.sleep(0.3)
    return dist.get_rank()


def _rank_1_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such layer")
    dist.barrier()


def _rank_1_exits(code: int) -> str:
    if dist.get_rank() == 1:
        print("good", "bye")
        os._exit(code)
    try:
        dist.barrier()
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def _rank_1_is_killed() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def _rank_1_hangs(pids: str) -> None:
    Path(pids, str(dist.get_rank())).write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        _sleep_forever()


def _sleep_forever() -> None:
    while True:
        time.sleep(60)


def _cannot_be_sent() -> object:
    return lambda: None


def test_values_come_back_in_rank_order() -> None:
    values = run_ranks(3, _who_am_i, 10)
    assert [value[:2] for value in values] == [(10, 3), (11, 3), (12, 3)]
    assert len({value[2] for value in values} | {os.getpid()}) == 4
    assert run_ranks(2, _rank_0_is_late) == [0, 1]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_a_process_group_and_return_tensors(world_size: int) -> None:
    for total in run_ranks(world_size, _sum_of_ranks):
        assert total.item() == sum(range(world_size))


def test_ranks_start_with_equal_seeds_and_one_thread() -> None:
    first, second = run_ranks(2, _draws)
    assert first == second
    assert first[2] == 1


def test_a_rank_that_raises_is_reported_with_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_ranks(2, _rank_1_raises)
    text = str(error.value)
    assert "rank 1 first" in text
    assert "rank 1: raised, exit code 1" in text
    assert "in _rank_1_raises" in text
    assert "ValueError: no such layer" in text
    assert time.monotonic() - start < 30


def test_a_rank_that_exits_is_reported_with_its_code_and_output() -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(2, _rank_1_exits, 7)
    assert "rank 1: died, exit code 7\noutput:\ngood bye" in str(error.value)
    assert "rank 0: returned, exit code 0" in str(error.value)


def test_a_rank_may_exit_on_purpose() -> None:
    assert run_ranks(2, _rank_1_exits, 7, expect_exit={1: 7}) == ["RuntimeError", None]
    assert run_ranks(2, _rank_1_is_killed, expect_exit={1: -signal.SIGKILL}) == ["alive", None]


def test_a_rank_that_does_not_exit_as_expected_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="rank 1: died, exit code 7"):
        run_ranks(2, _rank_1_exits, 7, expect_exit={1: 3})
    with pytest.raises(AssertionError, match="returned instead of exiting with 3"):
        run_ranks(2, _who_am_i, 0, expect_exit={1: 3})


def test_a_rank_that_is_killed_is_reported_with_the_signal() -> None:
    with pytest.raises(AssertionError, match="rank 1: died, signal SIGKILL"):
        run_ranks(2, _rank_1_is_killed)


def test_a_rank_that_hangs_is_killed_and_shows_where(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(2, _rank_1_hangs, str(tmp_path), timeout=2)
    text = str(error.value)
    assert "rank 1: hung in the function, killed after 2." in text
    assert "in _sleep_forever" in text
    if sys.platform == "linux":
        assert re.search(r"threads, by the kernel:\n\w+ S ", text)
    assert "rank 0: returned, exit code 0" in text
    for rank in range(2):
        pid = int((tmp_path / str(rank)).read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_value_that_cannot_be_pickled_is_a_failure_of_its_rank() -> None:
    with pytest.raises(AssertionError, match="rank 0: raised"):
        run_ranks(1, _cannot_be_sent)


def test_the_environment_stays_as_it_was() -> None:
    before = dict(os.environ)
    run_ranks(1, _who_am_i, 0)
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", CASES)
def test_every_toy_model_trains_in_plain_torch(name: str) -> None:
    case = CASES[name]
    model = seeded(case.build)
    before = full_parameters(model)
    batches = batches_of(case, world_size=2, steps=2)
    losses = train_unsharded(model, OPTIMIZERS["sgd_momentum"](model.parameters()), batches)
    assert all(torch.isfinite(loss) for step in losses for loss in step)
    changed = {key for key, value in full_parameters(model).items() if _differ(value, before[key])}
    trained = {key for key, parameter in model.named_parameters() if parameter.grad is not None}
    frozen = {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    assert trained and changed <= trained and not (trained & frozen)
    assert [type(module) for module in model.modules() if isinstance(module, case.units)] or (
        not case.units
    )


def _differ(left: torch.Tensor, right: torch.Tensor) -> bool:
    return not torch.equal(left, right)


def test_reference_gradient_is_the_mean_over_ranks() -> None:
    model = seeded(Mlp)
    batches = batches_of(CASES["mlp"], world_size=4, steps=1)[0]
    backward_of_all_ranks(model, batches)
    mean = full_gradients(model)
    model.zero_grad()
    torch.stack([loss_of(model(batch)) for batch in batches]).mean().backward()
    assert_same_parameters(mean, full_gradients(model), roundings=8, what="gradient")
    backward_of_all_ranks(model, batches, reduction="sum")
    total = {name: 5 * value for name, value in mean.items() if value is not None}
    assert_same_parameters(full_gradients(model), total, roundings=16, what="gradient")


def test_checks_name_the_parameter_and_the_place() -> None:
    value = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    other = value.clone()
    other[1, 0] += 1e-5
    assert_bitwise(value, value.clone())
    with pytest.raises(AssertionError, match=r"parameter w is not .*1 of 4 .* at \(1, 0\)"):
        assert_same_parameters({"w": other}, {"w": value})
    assert_same_parameters({"w": other}, {"w": value}, roundings=100)
    with pytest.raises(AssertionError, match="1 of 4"):
        assert_bitwise(value, torch.tensor([[1.0, 2.0], [3.0, -0.0]]))
    with pytest.raises(AssertionError, match=r"got a tensor \(2, 2\), expected None"):
        assert_same_parameters({"w": value}, {"w": None})
    with pytest.raises(AssertionError, match="names"):
        assert_same_parameters({"w": value}, {"v": value})
    with pytest.raises(AssertionError, match="float64"):
        assert_bitwise(value, value.double())
    with pytest.raises(AssertionError, match="differs by more"):
        assert_close(torch.tensor([float("nan")]), torch.tensor([1.0]), roundings=5)


SKIPPED_TESTS = """
import pytest

def test_runs(): pass

@pytest.mark.gpu
def test_needs_a_gpu(): pytest.skip("no GPU")
"""


def _pytest_on(folder: Path, *args: str, plugin: str = "skips") -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", f"tests.harness.{plugin}", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *args, str(folder)], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_strict_skips_fail_what_is_skipped_without_need(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(SKIPPED_TESTS)
    expected = int(torch.accelerator.is_available())
    assert _pytest_on(tmp_path, "--strict-skips")[0] == expected
    (tmp_path / "test_b.py").write_text("import pytest\npytest.importorskip('nonesuch')\n")
    (tmp_path / "test_c.py").write_text("import pytest\ndef test(): pytest.skip('dislike')\n")
    code, text = _pytest_on(tmp_path, "--strict-skips", "-n", "1")
    assert code == 1
    assert "unexpected skip: test_b.py: Skipped: could not import 'nonesuch'" in text
    assert "unexpected skip: test_c.py::test: Skipped: dislike" in text


def test_a_run_prints_how_many_tests_it_has_and_how_long_they_take(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_x(): pass\ndef test_y(): pass\n")
    _, text = _pytest_on(tmp_path, "-n", "2", plugin="expected_time")
    assert text.count(f"2 tests, 2 at a time: {expected_time.FIRST_TIME}\n") == 1
    cached = tmp_path / ".pytest_cache" / "v" / expected_time.KEY
    tests = json.loads(cached.read_text())
    assert sorted(tests) == ["test_a.py::test_x", "test_a.py::test_y"]
    cached.write_text(json.dumps(dict.fromkeys(tests, 300.0)))
    _, text = _pytest_on(tmp_path, "-n", "2", plugin="expected_time")
    assert text.count("2 tests, 2 at a time: about 5 minutes, as they took here before\n") == 1
