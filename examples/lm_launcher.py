"""What a rank does when torchrun is killed outright."""

import os
import threading
import time

POLL_S = 0.2


def leave_with_launcher() -> None:
    """End this process, at once, as soon as torchrun is gone.

    After `kill -9` it cannot take its ranks along. They would train on, unseen, and write the very
    log and checkpoints that a resumed run reads and writes.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
