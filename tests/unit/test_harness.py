"""The harness itself: every way a rank can end is told apart, and nothing stays behind."""

import functools
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.harness.checks import (
    assert_bitwise,
    assert_close_in_float64,
    assert_norm,
    assert_same_parameters,
    assert_within,
)
from tests.harness.compare import Shared, assert_trains_alike
from tests.harness.models import CASES, Mlp, loss_of
from tests.harness.processes import call_alone
from tests.harness.ranks import KeptRanks, on_ranks, run_ranks
from tests.harness.reference import batches_of, in_turn, seeded


def _who_am_i(offset: int) -> tuple[int, int, int]:
    return dist.get_rank() + offset, dist.get_world_size(), os.getpid()


def _draws() -> tuple[float, float, int]:
    return torch.rand(()).item(), float(np.random.rand()), torch.get_num_threads()


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


def test_ranks_start_with_equal_seeds_and_one_thread(ranks: KeptRanks) -> None:
    first, *others = [*run_ranks(2, _draws), *ranks(2, _draws), *ranks(2, _draws)]
    assert others == [first] * 5
    assert first[2] == 1


def test_ranks_are_kept_until_one_fails(ranks: KeptRanks, capsys: pytest.CaptureFixture) -> None:
    first = ranks(2, _who_am_i, 0)
    assert ranks(2, _who_am_i, 0) == first
    with pytest.raises(AssertionError, match=r"_rank_1_raises failed, rank 1 first"):
        ranks(2, _rank_1_raises)
    second = ranks(2, _who_am_i, 0)
    assert not {pid for *_, pid in first} & {pid for *_, pid in second}
    ranks(2, print, "hello")
    assert capsys.readouterr().out.count("hello") == 2
    assert ranks(2, _who_am_i, 0) == second
    assert not capsys.readouterr().out


def test_a_rank_may_exit_on_purpose() -> None:
    assert run_ranks(2, _rank_1_exits, 7, expect_exit={1: 7}) == ["RuntimeError", None]
    assert run_ranks(2, _rank_1_is_killed, expect_exit={1: -signal.SIGKILL}) == ["alive", None]


def _error_of(*args: object, **options: object) -> str:
    with pytest.raises(AssertionError) as error:
        run_ranks(*args, **options)
    return str(error.value)


def test_each_way_to_fail_is_reported() -> None:
    start, before = time.monotonic(), dict(os.environ)
    text = _error_of(2, _rank_1_raises)
    assert "rank 1 first" in text and "rank 1: raised, exit code 1" in text
    assert "in _rank_1_raises" in text and "ValueError: no such layer" in text
    text = _error_of(2, _rank_1_exits, 7, expect_exit={1: 3})
    assert "rank 1: died, exit code 7\noutput:\ngood bye" in text
    assert "rank 0: returned, exit code 0" in text
    assert "returned instead of exiting with 3" in _error_of(2, _who_am_i, 0, expect_exit={1: 3})
    assert "rank 1: died, signal SIGKILL" in _error_of(2, _rank_1_is_killed)
    assert "rank 0: raised" in _error_of(1, _cannot_be_sent)
    assert time.monotonic() - start < 30 and dict(os.environ) == before


def test_a_rank_that_hangs_is_killed_and_shows_where(tmp_path: Path) -> None:
    text = _error_of(2, _rank_1_hangs, str(tmp_path), timeout=2)
    assert "rank 1: hung in the function, killed after 2." in text
    assert "in _sleep_forever" in text
    assert "rank 0: returned, exit code 0" in text
    for rank in range(2):
        pid = int((tmp_path / str(rank)).read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_checks_name_the_parameter_and_the_place() -> None:
    value = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    other = value.clone()
    other[1, 0] += 1e-5
    assert_bitwise(value, value.clone())
    with pytest.raises(AssertionError, match=r"parameter w is not .*1 of 4 .* at \(1, 0\)"):
        assert_same_parameters({"w": other}, {"w": value})
    assert_same_parameters({"w": other}, {"w": value}, {"w": 1.1e-5})
    with pytest.raises(AssertionError, match="1 of 4"):
        assert_bitwise(value, torch.tensor([[1.0, 2.0], [3.0, -0.0]]))
    with pytest.raises(AssertionError, match=r"got a tensor \(2, 2\), expected None"):
        assert_same_parameters({"w": value}, {"w": None})
    with pytest.raises(AssertionError, match="names"):
        assert_same_parameters({"w": value}, {"v": value})
    with pytest.raises(AssertionError, match="float64"):
        assert_bitwise(value, value.double())
    with pytest.raises(AssertionError, match="differs by more"):
        assert_within(torch.tensor([float("nan")]), torch.tensor([1.0]), 5.0)


def test_float64_tells_another_order_from_another_term() -> None:
    terms = torch.randn(7, 1000, dtype=torch.float64)
    terms[6] = 1e-3 * terms[6] - terms[:6].sum(0)  # They cancel to a thousandth of themselves.
    scaled, swapped = terms.clone(), terms.clone()
    scaled[2] *= 1.001
    swapped[3, :2] = terms[3, :2].flip(0)
    sums = (terms, terms.flip(0), terms[1:], scaled, swapped)
    total, backwards, *wrong = (functools.reduce(torch.add, each) for each in sums)
    assert not torch.equal(backwards, total)
    assert_close_in_float64(backwards, total)
    assert_close_in_float64({"a": terms[0], "b": None}, {"a": terms[0], "b": None})
    for each in wrong:
        with pytest.raises(AssertionError, match="differs by more than"):
            assert_close_in_float64(each, total)
    with pytest.raises(AssertionError, match=r"expected float64, got torch\.float32"):
        assert_close_in_float64(total.float(), total.float())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, 0.5, float("inf")])
def test_a_norm_may_be_summed_in_any_order(norm_type: float) -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0))
    parts = torch.stack([part.norm(norm_type) for part in values.split(7)])
    norm = parts.norm(norm_type)
    assert_norm(norm, [values[:9].view(3, 3), values[9:].flip(0)], norm_type)
    for wrong in (norm * 1.001, values[values.abs() < values.abs().max()].norm(norm_type)):
        with pytest.raises(AssertionError, match="norm differs by more than"):
            assert_norm(wrong, [values], norm_type)


def _reversed(model: torch.nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    return in_turn(model, batches[::-1]).flip(0)


def _without_the_last(model: torch.nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    losses = in_turn(model, batches[:-1])
    with torch.no_grad():
        return torch.cat([losses, loss_of(model(batches[-1]).requires_grad_()).view(1)])


def _scaled(model: torch.nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    losses = in_turn(model, batches)
    next(model.parameters()).grad.mul_(1.001)
    return losses


@on_ranks(1)
def test_training_alike_forgives_an_order_and_no_gradient() -> None:
    """One plain model beside another: passes in another order, and wrong gradients."""
    each = batches_of(CASES["mlp"], world_size=4, steps=3)
    batches = [[step] for step in each]
    alike = functools.partial(assert_trains_alike, batches=batches, reference_run=in_turn)
    for reference in (seeded(Mlp), Shared(seeded(Mlp)), Shared(seeded(Mlp))):
        alike(seeded(Mlp), reference, run=_reversed, regrouped=True)
    alike(seeded(Mlp), seeded(Mlp), run=in_turn)
    for run, regrouped in ((_reversed, False), (_without_the_last, True), (_scaled, True)):
        with pytest.raises(AssertionError, match="step 0: gradient of"):
            alike(seeded(Mlp), seeded(Mlp), run=run, regrouped=regrouped)
    with pytest.raises(AssertionError, match="before the first step: parameter"):
        alike(seeded(Mlp), seeded(Mlp, seed=1), run=in_turn)


SKIPPED_TESTS = """
import pytest

def test_runs(): pass

@pytest.mark.gpu
def test_needs_a_gpu(): pytest.skip("no GPU")

@pytest.mark.since_torch("99.0")
def test_of_what_no_torch_has(): raise AssertionError

@pytest.mark.since_torch("2.0")
def test_of_what_torch_has(): pass
"""


def _pytest_on(folder: Path, *args: str) -> tuple[int, str]:
    options = ["-ptests.harness.skips", "-c", os.devnull, "--rootdir", str(folder)]
    done = call_alone(_run_pytest, [*options, *args, str(folder)], cwd=folder)
    return done.returncode, done.stdout + done.stderr


def _run_pytest(arguments: list[str]) -> None:
    sys.exit(pytest.main(arguments))


@pytest.mark.slow
def test_strict_skips_fail_what_is_skipped_without_need(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(SKIPPED_TESTS)
    expected = int(torch.accelerator.is_available())
    code, text = _pytest_on(tmp_path, "--strict-skips")
    assert code == expected
    assert "2 passed, 2 skipped" in text
    (tmp_path / "test_b.py").write_text("import pytest\npytest.importorskip('nonesuch')\n")
    (tmp_path / "test_c.py").write_text("import pytest\ndef test(): pytest.skip('dislike')\n")
    code, text = _pytest_on(tmp_path, "--strict-skips", "-n", "1")
    assert code == 1
    assert "unexpected skip: Skipped: could not import 'nonesuch'" in text
    assert "unexpected skip: Skipped: dislike" in text and "2 passed, 2 skipped" in text
