"""Run the fault matrix, print each cell, and write the table of docs/reference/reliability.md."""

import argparse
import contextlib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="cells whose names contain all these")
    parser.add_argument("--at-once", type=int, default=4, help="cells that run at the same time")
    parser.add_argument("--short", action="store_true", help="some cells of each fault and place")
    arguments = parser.parse_args()
    # The ranks' server finds the repository without a change of the environment meanwhile.
    os.environ["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    from tests.faults import page
    from tests.faults.cells import Cell, all_cells, some_cells
    from tests.faults.judge import Verdict, run_cell

    cells = some_cells() if arguments.short else all_cells()
    cells = [cell for cell in cells if all(part in str(cell) for part in arguments.only)]
    start = time.monotonic()

    def tell(text: str) -> None:
        print(text, file=sys.__stdout__, flush=True)

    # What ranks print, `run_ranks` prints: of struck ranks that is much, and says little.

    def run(cell: Cell) -> Verdict:
        verdict = run_cell(cell)
        tell(f"{verdict.how:10} {verdict.seconds:6.2f} s  {verdict.cell}")
        for problem in verdict.problems:
            tell(f"    PROBLEM: {problem}")
        return verdict

    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        ThreadPoolExecutor(arguments.at_once) as pool,
    ):
        verdicts = list(pool.map(run, cells))
        again = [verdict.cell for verdict in verdicts if verdict.problems]
        if again:
            tell(f"once more, one at a time: {len(again)} cells")
        second = {cell: run(cell) for cell in again}
    verdicts = [second.get(verdict.cell, verdict) for verdict in verdicts]
    failed = [verdict for verdict in verdicts if verdict.problems]
    seconds = time.monotonic() - start
    print(f"{len(cells)} cells, {len(again)} failed at first, {len(failed)} twice; {seconds:.0f} s")
    if not (arguments.only or arguments.short or failed):
        page.write(verdicts, len(again))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
