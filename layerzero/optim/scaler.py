"""GradScaler: loss scaling for float16, where all ranks agree on every overflow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.exchanges import gather_along
from layerzero.comm.pending import Operation
from layerzero.flat.groups import make_shard_groups, mesh_groups
from layerzero.flat.parameter_info import get_info
from layerzero.notices import warn_once
from layerzero.optim import attach
from layerzero.optim.adamw import AdamW
from layerzero.optim.steps import models_of
from layerzero.step.root import RootState


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded gradients.

    Each rank sees only its shards, so an overflow on one rank must make all ranks skip the step and
    lower the scale. Therefore `unscale_` (which `step` calls if you did not) is collective over
    `process_group`, and over the mesh of DTensor parameters if the group does not contain it: one
    scalar for each group. The optimizers of `layerzero.optim` unscale in the pass of their step
    instead, and know of an overflow from the sum of squares that they take at delivery.

    Args:
        device: device type of the gradients; None: that of the accelerator, or the CPU.
        process_group: ranks that must agree: a ProcessGroup, a 1-D DeviceMesh, or None for all.
        timeout: timeout of the collective; None: as for `ZeRO3`.
        **options: passed to `torch.amp.GradScaler`.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        if device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device = "cpu" if accelerator is None else accelerator.type
        super().__init__(device, **options)
        self._process_group = process_group
        self._timeout = timeout
        self._num_agreements = 0

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and agree on infinities. Collective.

        Raises:
            CollectiveError: a rank did not take part within the timeout.
            NotImplementedError: the model is inside a `layerzero.join`.
        """
        if not self.is_enabled():
            return
        with self._scale_beside_gradients(optimizer):
            super().unscale_(optimizer)
        found: dict[torch.device, torch.Tensor]
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found:
            # No gradient here, but other ranks may have some, and all take part.
            assert self._scale is not None, "unscale_ has set the scale up"
            found[self._scale.device] = torch.zeros((), device=self._scale.device)
        device = next(iter(found))
        here = torch.stack([found_inf.to(device) for found_inf in found.values()]).amax()
        anywhere = self._agree(here, optimizer)
        for found_inf in found.values():
            found_inf.copy_(anywhere)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """For an optimizer that unscales in the pass of its step: no pass over the gradients."""
        if not isinstance(optimizer, AdamW):
            return super()._check_inf_per_device(optimizer)
        found_inf = self._agree(optimizer.overflow(), optimizer)
        found: dict[Any, Any] = {found_inf.device: found_inf}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _agree(self, found_inf: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        # On the device of the scale, which the group supports; gradients may be on the host.
        assert self._scale is not None, "a loss was scaled"
        for _ in models_of(optimizer, lambda root: root.join is not None):
            refuse_scaler(optimizer)
        found_inf = found_inf.to(self._scale.device)
        if any(models_of(optimizer, _is_skipping)):
            # An overflow that `on_nonfinite="skip"` has found: no gradient is left to show it.
            found_inf = torch.ones_like(found_inf)
        self._num_agreements += 1
        groups = make_shard_groups(self._process_group, found_inf.device, self._timeout)
        infos = (get_info(each) for group in optimizer.param_groups for each in group["params"])
        splits = (None if info is None else info.tensor_parallel for info in infos)
        mesh = next((split.mesh for split in splits if split is not None), None)
        if mesh is not None and not set(mesh.mesh.flatten().tolist()) <= set(groups[0].ranks):
            groups.extend(mesh_groups(mesh, found_inf.device, self._timeout))
        name = Operation("overflow agreement", "the optimizer", self._num_agreements)
        return gather_along(found_inf, groups, lambda _: name).amax()

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step unless any rank found an infinity or NaN. Collective if it has to unscale."""
        if not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        unscales = isinstance(optimizer, AdamW)
        stage = self._per_optimizer_states[id(optimizer)]["stage"]
        if stage is torch.amp.grad_scaler.OptState.READY and not unscales:
            # Optimizers that unscale themselves would check only this rank's shards.
            self.unscale_(optimizer)
        with nullcontext() if unscales else self._scale_beside_gradients(optimizer):
            result = super().step(optimizer, *args, **kwargs)
        for root in models_of(optimizer, _is_skipping):  # The optimizer was not called, to end it.
            root.shown.give_up()
        return result

    @contextmanager
    def _scale_beside_gradients(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, the scale is on the host if gradients are: torch copies numbers from a device
        to the host without waiting until they are there, and uses them at once."""
        scale = self._scale
        gradients = (each.grad for group in optimizer.param_groups for each in group["params"])
        if scale is not None and any(g is not None and g.device.type == "cpu" for g in gradients):
            self._scale = scale.cpu()
        try:
            yield
        finally:
            self._scale = scale


def _is_skipping(root: RootState) -> bool:
    return root.reducer.kept.is_skipping


def refuse_scaler(optimizer: torch.optim.Optimizer) -> NoReturn:
    raise NotImplementedError(
        f"{type(optimizer).__name__}: a gradient scaler inside a join; train in bfloat16 instead"
    )


@attach.on_first_step
def _warn_about_torchs(optimizer: torch.optim.Optimizer) -> None:
    """Warn if torch's own GradScaler calls `step`: its ranks do not agree on an overflow."""
    caller = scaler_that_calls()
    if caller is not None and caller.is_enabled() and not isinstance(caller, GradScaler):
        warn_once(
            "torch.amp.GradScaler is used with sharded parameters: it checks this rank's "
            "shards only, so after an overflow some ranks skip the step and others do not, "
            "and their scales differ from then on; use layerzero.GradScaler"
        )


def scaler_that_calls() -> torch.amp.GradScaler | None:
    """The gradient scaler whose `step` runs the calling function; None if there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        # Skip the user's frames: before Python 3.13, reading `f_locals` keeps the values alive
        # until the frame ends, so a model deleted there would stay.
        if frame.f_code.co_filename == torch.amp.grad_scaler.__file__:
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.amp.GradScaler):
                return caller
    return None
