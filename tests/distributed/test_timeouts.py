"""How long a collective may take: what a user chose is kept, and nobody's group waits less."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from layerzero import GradScaler, ZeRO3
from layerzero.flat.groups import BACKEND_GRACE
from layerzero.state_dict.checkpoint_group import checkpoint_group_of
from layerzero.step.unit import get_unit
from tests.harness.internals import root_state
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import run_ranks

CPU = torch.device("cpu")
TORCH_DEFAULT = timedelta(minutes=30)


def timeouts(model: ZeRO3) -> set[timedelta]:
    placement = get_unit(model).handles[0].placement
    groups = (placement.shard_group, placement.outer_group, placement.post_forward_group)
    return {group.timeout for group in groups if group is not None}


def backend_timeout(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(CPU).options._timeout


def _default_group(folder: Path) -> None:
    for number, (given, expected) in enumerate(
        {
            None: timedelta(minutes=5),
            timedelta(hours=2): timedelta(hours=2),
            timedelta(seconds=40): timedelta(seconds=40),
        }.items()
    ):
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{number}", rank=0, world_size=1, timeout=given
        )
        assert timeouts(ZeRO3(nn.Linear(2, 2))) == {expected}
        # A group that was given none follows the default group.
        assert timeouts(ZeRO3(nn.Linear(2, 2), dist.new_group([0]))) == {expected}
        own = dist.new_group([0], timeout=timedelta(hours=1))
        assert timeouts(ZeRO3(nn.Linear(2, 2), own)) == {timedelta(hours=1)}
        chosen = timedelta(seconds=7)
        assert timeouts(ZeRO3(nn.Linear(2, 2), own, timeout=chosen)) == {chosen}


def test_a_timeout_given_to_a_process_group_is_kept(tmp_path: Path) -> None:
    run_ranks(1, _default_group, tmp_path)


def _derived_groups() -> None:
    hours, seconds, world = (
        timedelta(hours=2),
        timedelta(seconds=7),
        backend_timeout(dist.group.WORLD),
    )
    group = dist.new_group(timeout=hours)
    for outer in ("zero1", "replicate", "shard"):
        # Groups that are made for parts are used again, with the timeout of each model.
        for given, expected in ((seconds, seconds), (None, hours)):
            model = ZeRO3(nn.Linear(4, 4), group, zero3_size=1, outer=outer, timeout=given)
            assert timeouts(model) == {expected}, outer
            assert checkpoint_group_of(root_state(model), None).timeout == expected
    # Of two groups that a save may use, the longer.
    model = ZeRO3(nn.Linear(4, 4), timeout=seconds)
    assert checkpoint_group_of(root_state(model), group).timeout == hours
    mesh = init_device_mesh("cpu", (2, 1))
    assert backend_timeout(mesh.get_group(1)) in (TORCH_DEFAULT, world)
    assert timeouts(ZeRO3(nn.Linear(4, 4), mesh)) == {world}


def test_groups_made_for_parts_and_meshes_have_the_timeout_of_the_whole() -> None:
    run_ranks(2, _derived_groups)


def _kept_by_backends() -> None:
    own, shorter, longer = (timedelta(seconds=number) for number in (40, 3, 50))
    group = make_plain_group(own)
    ZeRO3(nn.Linear(4, 4), group, timeout=shorter)
    scaler = GradScaler("cpu", process_group=group, timeout=shorter)
    parameter = nn.Parameter(torch.ones(3))
    scaler.scale(parameter.sum()).backward()
    scaler.step(torch.optim.SGD([parameter], lr=0.1))
    assert backend_timeout(group) == own
    # One that the engine has to have waits longer, and is still known by what it was given.
    ZeRO3(nn.Linear(4, 4), group, timeout=longer)
    assert backend_timeout(group) == longer + BACKEND_GRACE
    assert timeouts(ZeRO3(nn.Linear(4, 4), group)) == {own}


def test_a_users_group_never_waits_less_than_before() -> None:
    run_ranks(2, _kept_by_backends)
