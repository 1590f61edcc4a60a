"""How a world is cut into axes, for which kind of device a mesh is made, and what initialising on a
device needs of torch: no ranks."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from layerzero.build.materialize import _kept_generators
from layerzero.parallel.manager import MeshSizes, device_type_of


def infer(world_size: int, **given: Any) -> MeshSizes:
    sizes = {
        "dp_size": None,
        "tp_size": 1,
        "cp_size": 1,
        "ep_size": 1,
        "pp_size": 1,
        "zero3_size": None,
    }
    return MeshSizes.infer(world_size, **{**sizes, **given})


def test_data_parallel_ranks_are_what_the_other_sizes_leave() -> None:
    sizes = infer(48, tp_size=2, cp_size=3, pp_size=2, ep_size=6)
    assert sizes.shape == (2, 4, 3, 2) and sizes.world == 48
    assert (sizes.data, sizes.edp, sizes.ep) == (12, 2, 6)
    assert infer(5).shape == (1, 5, 1, 1)
    assert infer(8, dp_size=4, tp_size=2) == infer(8, tp_size=2)


@pytest.mark.parametrize("unsaid", [None, 0])
def test_an_axis_that_a_recipe_leaves_open_is_inferred_or_one(unsaid: int | None) -> None:
    others = dict.fromkeys(("cp_size", "ep_size", "pp_size"), unsaid)
    expected = infer(8, tp_size=2)
    for dp_size in (unsaid, -1):
        assert infer(8, dp_size=dp_size, tp_size=2, **others) == expected
    assert infer(8, tp_size=unsaid, **others) == infer(8)


def test_sizes_that_do_not_fit_are_named_with_the_numbers() -> None:
    for world_size, given, error, message in (
        (4, {"tp_size": 3}, ValueError, r"tp_size=3 = 3 ranks do not divide the world of 4"),
        (6, {"pp_size": 2, "cp_size": 2}, ValueError, r"pp_size=2 x cp_size=2 .*= 4.*world of 6"),
        (4, {"dp_size": 3}, ValueError, r"dp_size=3 x .*makes 3 ranks, but the world has 4"),
        (4, {"dp_size": 4, "tp_size": 2}, ValueError, r"makes 8 ranks.*start 8 ranks"),
        (6, {"ep_size": 4}, ValueError, r"ep_size=4 does not divide the 6 data-parallel ranks"),
        (8, {"tp_size": 2, "zero3_size": 8}, ValueError, r"zero3_size=8 .*the 4 data-parallel"),
        (4, {"tp_size": -1}, ValueError, r"tp_size: expected at least 0, got -1"),
        (4, {"ep_size": -3}, ValueError, r"ep_size: expected at least 0, got -3"),
        (4, {"zero3_size": 0}, ValueError, r"zero3_size: expected at least 1, got 0"),
        (4, {"dp_size": "auto"}, TypeError, r"dp_size: expected a number of ranks, got 'auto'"),
        (4, {"cp_size": True}, TypeError, r"cp_size: expected a number of ranks, got True"),
        (4, {"zero3_size": 2.0}, TypeError, r"zero3_size: expected a number of ranks, got 2.0"),
    ):
        with pytest.raises(error, match=message):
            infer(world_size, **given)


def test_a_mesh_is_for_the_accelerator_that_the_backend_serves_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = "cpu:gloo,cuda:gloo"
    for backend, accelerator, expected in (
        ("gloo", None, "cpu"),
        ("gloo", "cuda", "cpu"),  # it serves both, and who wants the other says another backend
        (both, "cuda", "cpu"),
        ("nccl", "cuda", "cuda"),
        ("nccl", None, "cuda"),
        ("xccl", "xpu", "xpu"),
        ("cpu:gloo,cuda:nccl", "cuda", "cuda"),
        ("cpu:gloo,cuda:nccl", None, "cpu"),
        ("cpu:gloo,cuda:nccl", "xpu", "cpu"),  # an accelerator that the backend does not serve
        ("cuda:gloo", "cuda", "cuda"),
        ("npu:hccl", "npu", "npu"),
        ("cpu:gloo,npu:hccl", "npu", "npu"),
        ("npu:hccl", None, "npu"),
    ):
        found = None if accelerator is None else SimpleNamespace(type=accelerator)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda found=found: found)
        assert device_type_of(backend) == expected


class _TwoDevices:
    """The generators of two devices, of which the first is the current one; as in `torch.cuda`."""

    def __init__(self) -> None:
        self.states = [torch.tensor([1]), torch.tensor([2])]

    def get_rng_state(self, device: torch.device | str = "cuda") -> Tensor:
        return self.states[torch.device(device).index or 0]

    def set_rng_state(self, state: Tensor, device: torch.device | str = "cuda") -> None:
        self.states[torch.device(device).index or 0] = state


def test_the_generator_is_restored_of_the_models_device_also_where_another_one_is_current() -> None:
    module = _TwoDevices()
    with mock.patch.object(torch, "get_device_module", lambda _: module):
        before = torch.get_rng_state()
        kept = _kept_generators(torch.device("cuda", 1))
        torch.rand(3)
        module.states[1] = torch.tensor([3])
        for restore in kept:
            restore()
    assert torch.equal(torch.get_rng_state(), before)
    assert [int(state) for state in module.states] == [1, 2]
