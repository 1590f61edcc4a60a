"""Real NCCL between two ranks, on one GPU: not supported by NCCL, which may refuse or hang.

Ranks that name different hosts get past its check that no two share a GPU, and then talk over
sockets. What it shows is right or wrong values; not how fast anything is.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu.process import REFUSED, ProcessFailed, in_process

pytestmark = pytest.mark.gpu


def test_two_ranks_train_like_the_replica(tmp_path: Path) -> None:
    def run(rank: int) -> int:
        return in_process(
            "tests.gpu.scenes:one_of_two",
            "cuda",
            rank,
            str(tmp_path),
            timeout=80,
            env={
                "NCCL_HOSTID": f"host-{rank}",
                "NCCL_NET": "Socket",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_P2P_DISABLE": "1",
                "NCCL_SHM_DISABLE": "1",
                "NCCL_IB_DISABLE": "1",
            },
        )

    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(run, rank) for rank in range(2)]
    try:
        wrong = [each.result() for each in started]
    except ProcessFailed as error:
        if "NCCL error" in str(error) or "Duplicate GPU" in str(error) or "killed" in str(error):
            pytest.skip(f"{REFUSED}by NCCL: {str(error).splitlines()[-1][:200]}")
        raise
    assert wrong == [0, 0]
