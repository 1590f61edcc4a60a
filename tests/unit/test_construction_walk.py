"""A module's way through construction is short: each object has it once, on the way down."""

import sys
from pathlib import Path
from types import FrameType
from unittest import mock

from torch import nn

import layerzero
from layerzero import zero3
from tests.harness.fake_ranks import fake_rank
from tests.harness.models import Block, Mlp
from tests.unit.test_imports import LAYERS

PACKAGE = Path(layerzero.__file__).parent
MOST_VISITS, MOST_FILES, MOST_CLIMBS = 40, 20, 5
"""Calls that are given the module; files that they are in; calls of a file in a higher layer."""


def layer_of(path: str) -> int:
    return LAYERS.index(Path(path).relative_to(PACKAGE).with_suffix("").parts[0])


def visits_of(module: nn.Module, model: nn.Module) -> list[tuple[str, str]]:
    """(file, caller's file) of each call that is given `module` while `model` is wrapped."""
    frames: dict[int, FrameType] = {}
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if (
            event != "call"
            or id(frame) in frames
            or not Path(code.co_filename).is_relative_to(PACKAGE)
        ):
            return
        frames[id(frame)] = frame  # Kept: a generator that goes on is no other visit.
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(frame.f_locals.get(name) is module for name in names) and code.co_name[0] != "<":
            assert frame.f_back is not None
            found.append((code.co_filename, frame.f_back.f_code.co_filename))

    sys.setprofile(note)
    try:
        layerzero.ZeRO3(model, auto_wrap_policy={Block})
    finally:
        sys.setprofile(None)
    return found


def test_a_walk_through_construction_is_short_and_leads_down() -> None:
    # Other libraries that this process has loaded do not count.
    with fake_rank(0, 2), mock.patch.object(zero3, "_LIBRARIES", frozenset()):
        layerzero.ZeRO3(Mlp(), auto_wrap_policy={Block})  # Imports what the first one needs.
        for take in (lambda model: model, lambda model: model.blocks[1]):
            model = Mlp()
            visits = visits_of(take(model), model)
            inside = [(at, before) for at, before in visits if before.startswith(str(PACKAGE))]
            climbs = [pair for pair in inside if layer_of(pair[0]) > layer_of(pair[1])]
            assert 10 < len(visits) <= MOST_VISITS, visits
            assert len({at for at, _ in visits}) <= MOST_FILES, visits
            assert len(climbs) <= MOST_CLIMBS, climbs
