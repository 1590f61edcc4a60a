"""The host runs ahead: a steady step, optimizer included, waits for nothing on the device."""

from __future__ import annotations

import pytest

from tests.gpu.process import in_process
from tests.gpu.scenes import USES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("use", USES)
def test_a_steady_step_returns_while_the_device_is_busy(use: str) -> None:
    assert in_process("tests.gpu.scenes:host_goes_on", "cuda", use, timeout=60) == {"busy": True}
