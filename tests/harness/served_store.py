"""The default group with a store in the memory of one rank, as `torchrun` has it."""

import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def serve_store(host: int, folder: Path) -> None:
    """Make the default group again, with a store that rank `host` serves; `folder` is empty, and
    the same on all ranks. Collective. The harness's own store, a file, outlives every rank, and a
    limit on the sizes of files cuts what is written to it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    path = folder / "port"
    timeout = timedelta(seconds=60)
    if rank == host:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
    else:
        while not path.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(path.read_text()), None, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    (folder / f"joined-{rank}").touch()
    while len(list(folder.glob("joined-*"))) < world_size:
        time.sleep(0.01)
