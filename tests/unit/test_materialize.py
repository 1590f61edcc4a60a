"""What initialising on a device needs of torch's module for that device."""

from unittest import mock

import torch
from torch import Tensor

from layerzero.build.materialize import _kept_generators


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
