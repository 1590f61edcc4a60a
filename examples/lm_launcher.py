"""Starts the ranks of `make train`, one a GPU or two on the CPU.

    python examples/lm_launcher.py --steps 50

Ranks call `leave_with_launcher`, so that they end when torchrun is killed.
"""

import os
import shlex
import sys
import threading
import time
from collections.abc import Sequence

from lm_options import build_parser, load_options

POLL_S = 0.2


def main(argv: Sequence[str]) -> None:
    """Run torchrun in this process, which saves a second import of torch."""
    build_parser().parse_args(argv)  # --help needs no torch
    print("Training a small language model: torch starts here, then in every rank", flush=True)
    import torch
    from torch.distributed.run import main as torchrun

    num_ranks = torch.cuda.device_count() or 2
    # Checked here too: a refusal is one line, without torchrun's report of a failed rank.
    load_options(argv, num_ranks)
    # torchrun sets 1 thread and prints a notice where the variable is missing.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // num_ranks)))
    program = os.path.relpath(os.path.join(os.path.dirname(__file__), "train_lm.py"))
    # The `--` keeps torchrun from reading our --log as a short form of its own flags.
    command = ["--standalone", "--nproc-per-node", str(num_ranks), "--", program, *argv]
    print("Starting:", shlex.join(["torchrun", *command]), flush=True)
    torchrun(command)


def leave_with_launcher() -> None:
    """Make this process end as soon as torchrun is gone.

    After `kill -9`, torchrun cannot end its ranks. They would train on unnoticed, and write the log
    and checkpoints that a resumed run uses.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
