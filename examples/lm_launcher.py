"""Ends a rank when torchrun is killed."""

import os
import threading
import time

POLL_S = 0.2


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
