"""The threads of gloo's sockets take no core from a thread that computes; see the note in
comm/gloo/threads.py."""

import os
import sys
from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion

from layerzero import ZeRO3
from layerzero.comm.gloo import threads as loop_threads
from tests.harness.models import Mlp
from tests.harness.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="scheduling classes of threads are Linux's"
)


def _classes() -> set[int]:
    threads = loop_threads._loop_threads()
    assert threads, "gloo's threads have another name"
    return {os.sched_getscheduler(thread) for thread in threads}


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="gloo gives them no name")
@on_ranks(2, fresh=True)
def test_wrapping_lets_them_wait_for_a_core() -> None:
    # The harness has chosen a class for all threads of a rank.
    for thread in (0, *loop_threads._loop_threads()):
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    ZeRO3(Mlp())
    assert _classes() == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    for thread in loop_threads._loop_threads():
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    ZeRO3(Mlp())
    assert _classes() == {os.SCHED_IDLE}, "a class that somebody chose is kept"


def test_a_system_that_forbids_it_is_left_alone() -> None:
    with (
        mock.patch.object(loop_threads, "_loop_threads", return_value=[os.getpid()]),
        mock.patch.object(os, "sched_getscheduler", return_value=os.SCHED_OTHER),
        mock.patch.object(os, "sched_setscheduler", side_effect=PermissionError) as call,
    ):
        loop_threads.wake_without_preempting()
    assert call.called
