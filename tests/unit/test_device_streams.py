"""Streams of any device: every file asks the one interface for them."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from layerzero.build.device import check_device_type
from layerzero.flat.device_streams import missing_stream_names, stream_interface

PACKAGE = Path(__file__).resolve().parents[2] / "layerzero"
CUDA = torch.device("cuda", 0)


class _Bare:
    """What a device from outside torch must have: no streams."""

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1


def test_a_module_with_streams_is_its_own_interface() -> None:
    assert stream_interface(CUDA) is torch.cuda


def test_without_streams_of_its_own_a_device_has_those_of_torch() -> None:
    module = _Bare()
    assert missing_stream_names(module) == ["Stream", "stream", "current_stream"]
    with mock.patch.object(torch, "get_device_module", lambda _: module):
        interface = stream_interface(CUDA)
    assert interface.Stream is torch.Stream
    assert not missing_stream_names(interface)


def test_a_device_without_either_is_refused_by_the_names_that_are_missing() -> None:
    with (
        mock.patch.object(torch, "get_device_module", lambda _: _Bare()),
        pytest.raises(ValueError, match=r"lacks torch\.cuda\.Stream, torch\.cuda\.stream"),
    ):
        check_device_type(CUDA, "device='cuda'")


def test_no_other_file_asks_a_device_module_for_streams() -> None:
    asks = re.compile(r"get_device_module\([^)]*\)\s*\.(Stream|stream|current_stream|Event)\b")
    found = [path.name for path in PACKAGE.rglob("*.py") if asks.search(path.read_text())]
    assert not found
