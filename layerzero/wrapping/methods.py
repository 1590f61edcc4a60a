"""FeatureMethods: methods of `ZeRO3` that features implement, each imported at its first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook

from layerzero.step.root import RootState, root_of
from layerzero.step.unit import Unit
from layerzero.wrapping.units import UnitMethods

if TYPE_CHECKING:
    from layerzero.graphs.arena import Arena
    from layerzero.memory_budget import MemoryChoice
    from layerzero.optim.norm import Clipped


class FeatureMethods(UnitMethods, Joinable):
    module: nn.Module
    _kept_whole: Sequence[nn.Parameter]
    """Parameters that are not sharded."""

    @property
    def _root_state(self) -> RootState:
        return root_of(self._layerzero_unit)

    def __reduce_ex__(self, protocol: object = None) -> Any:
        from layerzero.module_tree.conversions import refuse_copies

        refuse_copies(type(self).__name__)

    __deepcopy__ = __reduce_ex__

    def _subtree(self) -> list[Unit]:
        """The units of this module and of modules inside it, in the order of the root's list."""
        return self._root_state.units_inside(self.module)

    @property
    def memory_choice(self) -> MemoryChoice | None:
        """The choice for `memory_budget`, the same on every rank; None: no budget, or not yet.

        `print` shows it. It is made in the first forward after the fifth step, and logged once.
        """
        learner = self._root_state.learner
        return None if learner is None else learner.choice

    @property
    def arena(self) -> Arena | None:
        """The memory of `arena=True`, whose `nbytes` and `taken_nbytes` say how large it is and
        how much of it an order takes at once; None without that argument."""
        from layerzero.graphs.arena import Arena

        return next(iter(self._root_state.extensions.of(Arena)), None)

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Reduce gradients by `hook`, as FSDP1 does; torch's own hooks work unchanged.

        `hook(state, gradient, chunk)` receives the gradients of a flat parameter, [group size *
        chunk size] in the reduce dtype, which it may overwrite, and writes this rank's chunk of
        their mean; see docs/reference/migrating.md for their order. With `zero3_size=1` and
        `outer="replicate"`: `hook(state, gradient)`, in place. It is called once a micro-batch
        where sums of micro-batches are sharded (`accumulation`), and never on one rank alone. For
        the whole model that this module belongs to; the same on every rank; not collective.

        Raises:
            RuntimeError: the model has a hook already.
            NotImplementedError: gradients are reduced in two hops, or `deterministic` or `verify`
                is set.
        """
        from layerzero.wrapping.comm_hooks import register

        register(self._root_state, state, hook)

    def join_hook(self, **options: Any) -> JoinHook:
        """Called by torch's `Join`, inside which ranks may run out of batches. Collective.

        Args:
            options: `optimizers`: those of the model, in the same order on every rank;
                `divide_by_initial_world_size`: whether gradients stay means over all ranks (the
                default), or are over those that still have batches.

        Raises:
            ValueError, TypeError, NotImplementedError: this model or an argument cannot join.
            RuntimeError: the model is inside another join.
        """
        from layerzero.uneven.joinable import hook_of

        return hook_of(self, **options)

    @property
    def join_device(self) -> torch.device:
        """The host: the answers decide what it does next."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """A gloo group of the model's data-parallel ranks. The first use makes it, and is
        collective."""
        from layerzero.uneven.joinable import group_of

        return group_of(self._root_state)

    def step_signature(
        self,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
    ) -> str:
        """One number for all weights and optimizer state: 64 bits, as 16 hexadecimal digits.

        Equal for equal bits, by original names, whatever the units and the number of ranks. So two
        runs can be bisected for the first step in which they differ. Covers all parameters of the
        whole model that this module belongs to, ignored ones included, and the state of the given
        optimizers, step numbers included; neither buffers nor hyperparameters.

        Collective over `process_group` and over the mesh of DTensor parameters; blocks the host.
        Reads all of this rank's shards: not for every step of a large model. Main shards with
        `outer="replicate"` are those of the rank's own shard group.

        Args:
            optimizer: whose state counts; several by name. None: the weights alone.

        Raises:
            RuntimeError: inside forward or backward.
        """
        from layerzero.verify.signature import step_signature

        kept = {id(parameter) for parameter in self._kept_whole}
        whole = [(name, p) for name, p in self.module.named_parameters() if id(p) in kept]
        return step_signature(self._root_state, whole, optimizer)

    def step_in_backward(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Have `backward()` run `optimizer` on each unit as soon as its gradients are reduced.

        From now on all parameters are updated when a backward that synchronizes gradients returns:
        do not call `optimizer.step()`, but call `zero_grad()` as usual. With offloaded parameters,
        the host updates one unit while the device computes the gradients of the next ones. Not
        collective.

        It cannot be combined with anything that needs all gradients before the first step:
        `clip_grad_norm_` raises, and a `GradScaler` would find an overflow too late.

        Args:
            optimizer: an element-wise optimizer; its parameters that are not this model's are
                stepped last. None: switch back to `optimizer.step()`.
        """
        from layerzero.optim.in_backward import StepInBackward

        extensions = self._root_state.extensions
        new = [] if optimizer is None else [StepInBackward(optimizer)]
        for former in extensions.of(StepInBackward):
            extensions.remove(former)
        for each in new:
            extensions.add(each)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`.

        Collective over `process_group` and over the mesh of DTensor parameters: one gather of a
        scalar for each axis. Does not block the host on a device with streams.

        Args:
            norm_type: p > 0, or infinity.

        Returns:
            The norm before clipping, a scalar tensor, the same on all ranks.

        Raises:
            RuntimeError: `step_in_backward` is on, so the gradients were used already.
            NotImplementedError: an ignored parameter is a DTensor with a gradient.
        """
        from layerzero.optim.norm import clip_grad_norm_

        gradients = gradients_to_clip(self)
        if gradients.root.join is not None:
            gradients.root.join.before_clip(self._layerzero_unit, max_norm, norm_type)
        return clip_grad_norm_(gradients, max_norm, norm_type)

    def summon_full_params(
        self,
        *,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """A context in which parameters are full: original shapes, dtype of the main shards.

        Collective at entry and exit. Needs memory for all full parameters of this module at once.

        A parameter that was a DTensor before wrapping is a DTensor inside, with its mesh and
        placements: full over `process_group`, still split over tensor-parallel ranks. Its
        `full_tensor()`, which is collective over the mesh, returns the whole value. Writes into its
        `to_local()`, or in place into the DTensor, are written back. With `with_grads`, its `.grad`
        is a DTensor too.

        Args:
            writeback: at exit, copy changes made inside into the shards (not after an exception).
            rank0_only: only the group's first rank gets full parameters, the others see sharded
                ones; with `writeback`, the changes of the first rank go to all. With DTensors, the
                first rank of each data-parallel group gets them. Together these ranks form one
                tensor-parallel mesh, so they can call collectives such as `full_tensor()`.
            offload_to_cpu: put the full parameters on the CPU; a DTensor keeps the mesh of its
                device, with its local tensor on the CPU.
            with_grads: make `.grad` full inside as well, and write it back in the same way.

        Raises:
            RuntimeError: inside forward, backward or another `summon_full_params`.
        """
        from layerzero.state_dict.summon import SummonOptions, summon

        options = SummonOptions(
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )
        return summon(self._root_state, self._subtree(), options)


def gradients_to_clip(model: FeatureMethods) -> Clipped:
    """The gradients of which `model.clip_grad_norm_` takes the norm, for `optim.norm.grad_norm`."""
    from layerzero.optim.norm import Clipped, refuse_used

    root = model._root_state
    refuse_used(root)
    return Clipped(root, [*model._subtree()], model._kept_whole)
