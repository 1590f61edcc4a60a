"""Shards in files of `torch.save`: what an earlier version wrote still loads."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

from layerzero.state_dict.parameter_shard import ParameterShard
from layerzero.state_dict.ranges import Extent
from layerzero.state_dict.rank_local import RankLocal, rank_local

OF_0_1 = (
    (ParameterShard, "layerzero.checkpoint.parameter_shard"),
    (Extent, "layerzero.checkpoint.runs"),
    (rank_local, "layerzero.checkpoint.rank_local"),
)


@pytest.mark.parametrize("version", ["0.1", "this one"])
def test_a_rank_loads_the_shards_that_it_saved(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = torch.arange(3.0)
    state = {
        "weight": ParameterShard(local, Extent.whole((2, 3)), (1, 4)),
        "moment": rank_local(torch.ones(2), "a moment"),
    }
    with monkeypatch.context() as patches:
        if version == "0.1":
            for named, module in OF_0_1:
                patches.setitem(sys.modules, module, sys.modules[named.__module__])
                patches.setattr(named, "__module__", module)
        torch.save(state, tmp_path / "state")
    written = (tmp_path / "state").read_bytes()
    assert (b"layerzero.checkpoint.runs" in written) == (version == "0.1")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    assert isinstance(loaded["weight"], ParameterShard)
    assert (loaded["weight"].extent, loaded["weight"].range) == (Extent.whole((2, 3)), (1, 4))
    assert torch.equal(loaded["weight"].local, local)
    assert isinstance(loaded["moment"], RankLocal)
    assert torch.equal(loaded["moment"].plain(), torch.ones(2))


def test_a_copy_of_a_tensor_of_one_rank_is_one_too() -> None:
    moment = rank_local(torch.ones(2), "a moment")
    copied = copy.deepcopy({"moment": moment, "same": moment})
    assert isinstance(copied["moment"], RankLocal) and copied["moment"].what == "a moment"
    assert copied["moment"] is copied["same"]
    moment.plain().zero_()
    assert torch.equal(copied["moment"].plain(), torch.ones(2))
