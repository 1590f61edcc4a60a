"""Kill a training run again and again, and compare its losses with those of an undisturbed run.

    python -m tests.faults.soak --kills 1000 --mean 1.5

Prints kills, goodput (useful steps over those possible in the time) and what differs.
"""

import argparse
import itertools
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.faults.supervisor import Report, supervise
from tests.faults.torchrun import kill_under_torchrun
from tests.faults.worker import SAVE_EVERY

_PAUSE_S = 0.02
_CALIBRATION_STEPS = 300


class Line(NamedTuple):
    """One step on one rank, as written by worker.py."""

    step: int
    world_size: int
    loss: str


class Result(NamedTuple):
    kills: int
    seconds: float
    useful_steps: int
    lines: int
    """Losses that were compared, on all ranks."""
    problems: list[str]


def disturbed(
    folder: Path,
    kills: int,
    mean_s: float,
    world_sizes: Sequence[int],
    seed: int,
    limit_s: float = math.inf,
) -> Result:
    """Train under fire in `folder`, and then once more without, beside it.

    Args:
        kills: with each number of ranks in turn; each ends with a stretch without any.
    """
    (hurt := folder / "hurt").mkdir()
    (whole := folder / "whole").mkdir()
    generator = random.Random(seed)

    def num_steps(left: int) -> int:
        return 10**9 if left else _saved_step(hurt) + 2 * SAVE_EVERY

    total = Report()
    for size in world_sizes:
        report = supervise(hurt, num_steps, size, kills, mean_s, generator, _PAUSE_S, limit_s)
        total.kills += report.kills
        total.seconds += report.seconds
        total.problems += report.problems
    lines, found = (0, []) if total.problems else compare(hurt, whole)
    problems = total.problems + found
    return Result(total.kills, total.seconds, _saved_step(hurt), lines, problems)


def compare(hurt: Path, whole: Path) -> tuple[int, list[str]]:
    """Every loss of the disturbed run, those of lost steps too, with an undisturbed one."""
    last = {line.step: line.world_size for line in _lines(hurt, 0)}
    if sorted(last) != list(range(len(last))):
        return 0, ["steps are missing"]
    # The undisturbed run changes its number of ranks where the disturbed one did for good.
    for size, steps in itertools.groupby(range(len(last)), key=last.__getitem__):
        end = max(steps) + 1
        report = supervise(whole, lambda _, end=end: end, size, 0, 1.0, random.Random(0))
        if report.problems:
            return 0, report.problems
    return differences(hurt, whole)


def differences(hurt: Path, whole: Path) -> tuple[int, list[str]]:
    """How many losses were compared, and which differ."""
    problems, count = [], 0
    for path in sorted(hurt.glob("losses-*")):
        rank = int(path.name.partition("-")[2])
        expected = {line[:2]: line.loss for line in _lines(whole, rank)}
        for line in _lines(hurt, rank):
            if line[:2] in expected:  # Else a step that was lost, with another number of ranks.
                count += 1
                if expected[line[:2]] != line.loss:
                    problems.append(f"rank {rank}: {line}, undisturbed {expected[line[:2]]}")
    return count, problems


def _lines(folder: Path, rank: int) -> Iterator[Line]:
    for text in (folder / f"losses-{rank}").read_text().splitlines():
        step, world_size, loss = text.split()
        yield Line(int(step), int(world_size), loss)


def _saved_step(folder: Path) -> int:
    path = folder / "saved" / "latest"
    return int(path.read_text().strip().rpartition("-")[2]) if path.exists() else 0


def steps_per_second(folder: Path, world_size: int) -> float:
    """Of an undisturbed run, its start and saves included."""
    folder.mkdir()
    steps = _CALIBRATION_STEPS
    report = supervise(folder, lambda _: steps, world_size, 0, 1.0, random.Random(0), _PAUSE_S)
    return steps / report.seconds


def _under_torchrun(folder: Path, kills: int, mean_s: float, seed: int) -> list[str]:
    (hurt := folder / "torchrun").mkdir()
    (whole := folder / "torchrun, undisturbed").mkdir()
    if not kills:
        return []
    done = kill_under_torchrun(hurt, 10 * kills, kills, mean_s, random.Random(seed))
    count, found = compare(hurt, whole)
    print(f"{done} SIGKILLs under torchrun, {count} losses compared, {len(found)} differ")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--mean", type=float, default=1.5, help="seconds from a start to its kill")
    parser.add_argument("--minutes", type=float, default=math.inf, help="kill no more after them")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", type=int, default=20, help="kills under torchrun itself")
    parser.add_argument("--folder", help="for checkpoints; the system's by default")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-", dir=given.folder) as name:
        folder = Path(name)

        def run(number: int) -> Result:
            (own := folder / str(number)).mkdir()
            kills = len(range(number, given.kills, given.at_once))
            seed = given.seed + number
            limit_s = 60 * given.minutes
            return disturbed(own, kills, given.mean, [given.ranks], seed, limit_s)

        before = steps_per_second(folder / "before", given.ranks)
        with ThreadPoolExecutor(given.at_once) as pool:
            results = list(pool.map(run, range(given.at_once)))
        after = steps_per_second(folder / "after", given.ranks)
        found = _under_torchrun(folder, given.torchrun, given.mean, given.seed)
    problems = found + [problem for result in results for problem in result.problems]
    kills = sum(result.kills for result in results)
    seconds = sum(result.seconds for result in results)
    steps = sum(result.useful_steps for result in results)
    print(
        f"{kills} SIGKILLs in {seconds:.0f} s of training, one in {seconds / max(kills, 1):.2f} s"
    )
    print(f"{steps} useful steps; undisturbed {before:.1f} a second before, {after:.1f} after")
    print(f"goodput {steps / seconds / ((before + after) / 2):.2f}")
    print(f"{sum(result.lines for result in results)} losses compared, {len(problems)} differ")
    print("\n".join(problems[:20]))
    return bool(problems) or kills < given.kills


if __name__ == "__main__":
    sys.exit(main())
