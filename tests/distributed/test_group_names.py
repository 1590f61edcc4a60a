"""Groups are made also where ranks know different numbers of other groups."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from layerzero import ZeRO3, checkpoint
from layerzero.parallel import ParallelManager
from tests.harness.ranks import on_ranks, run_ranks

SHORT = timedelta(seconds=20)


def _a_group_for_some(ranks: list[int]) -> None:
    """As scripts make them: everybody calls, only members know it from then on."""
    dist.new_group(ranks)


def _step(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def _train(model: ZeRO3, plain: nn.Linear) -> None:
    """A step gives the weights of plain torch: the groups have the ranks that they should have."""
    _step(model)
    _step(plain)
    with model.summon_full_params():
        for name, parameter in plain.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name


@on_ranks(4)
def test_groups_that_only_some_ranks_know_do_not_matter(tmp_path: Path) -> None:
    _a_group_for_some([0, 1])
    for outer in ("zero1", "shard"):
        plain = nn.Linear(8, 8)
        model = ZeRO3(copy.deepcopy(plain), zero3_size=2, outer=outer, timeout=SHORT)
        _train(model, plain)
        _a_group_for_some([3])
    checkpoint.save(tmp_path, model)
    _a_group_for_some([0, 2])
    checkpoint.save(tmp_path, model, process_group=dist.group.WORLD)
    _a_group_for_some([1, 2])
    manager = ParallelManager(dp_size=2, cp_size=2)
    plain = nn.Linear(8, 8)
    _train(manager.parallelize(copy.deepcopy(plain)), plain)


def _save_two_stages(folder: str) -> None:
    rank = dist.get_rank()
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    _a_group_for_some([0, 3])  # as for weights that the first stage shares with the last
    model = nn.ModuleDict({f"stage{rank // 2}": nn.Linear(8, 8)})
    wrapped = ZeRO3(model, stages[rank // 2], auto_wrap_policy={nn.Linear}, timeout=SHORT)
    checkpoint.save(folder, wrapped, process_group=dist.group.WORLD)


def test_stages_save_together(tmp_path: Path) -> None:
    run_ranks(4, _save_two_stages, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "step-00000000\n"
