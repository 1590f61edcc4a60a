"""ZeRO3PipelineStage: a `torch.distributed.pipelining` stage for a ZeRO3 module.

torch's own stage signals the last micro-batch to DDP and FSDP modules only. In it, a ZeRO3 module
would reduce in every backward and all-gather in every forward and backward: the same results, but
the traffic of a step multiplied by the number of micro-batches.

Note [Two stages of one rank]
    Two stages on a rank are two models on one process group, and may all-gather and reduce at the
    same time. Messages are matched by name, so the names of a stage's collectives begin with the
    stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import RESHARD, UNSHARD

from layerzero.flat.groups import resolve_process_groups
from layerzero.optim.norm import clip_factor, grad_norm, scale_gradients_
from layerzero.optional.arguments import names_of
from layerzero.parallel.totals import Totals
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import get_unit
from layerzero.wrapping.methods import gradients_to_clip
from layerzero.wrapping.units import ordered_units
from layerzero.wrapping.zero3 import ZeRO3


class ZeRO3PipelineStage(PipelineStage):
    """A `PipelineStage` whose `ZeRO3` module unshards each unit and reduces once in each step.

    In a step of `ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B` or `ScheduleLoopedBFS`:

    - Units stay unsharded from the first forward to the last backward, which reshards each unit as
      it finishes. That costs U all-gathers for U units, and memory for the stage's full parameters.
    - Gradients of micro-batches accumulate as inside `no_sync` (`accumulation="unsharded"`: nothing
      is sent before the last). The backward of the last micro-batch reduces: U reductions.
    - Gradients are complete before the schedule scales them.
    - `with model.no_sync(): schedule.step(...)` accumulates over several steps of the schedule.

    A step that an error on this rank interrupted is discarded when the next one begins: its
    gradients, and those accumulated in earlier steps inside `no_sync`.

    Args:
        submodule: the stage's part of the model, wrapped. Its process group has the data-parallel
            ranks of this stage.
        stage_index: index of this stage, from 0.
        num_stages: number of stages in the whole pipeline.
        device: device that the stage runs on.
        reshard_between_micro_batches: reshard units after every forward and backward, as outside a
            pipeline: up to 2U - 1 all-gathers for each micro-batch, in the memory of a few units.
        **options: arguments of `PipelineStage` (`group`, `input_args`, `output_args` and so on).

    Attributes:
        model: the wrapped module.

    Raises:
        TypeError: `submodule` is not a ZeRO3 module.
        ValueError: `submodule` is part of another ZeRO3 module.
        NotImplementedError: `submodule` has `optional_modules`.
        NotImplementedError: (in the schedule's step) the schedule splits the backward into one for
            inputs and one for weights, as zero-bubble schedules do.
        RuntimeError: (in the schedule's step) the schedule scales gradients that the optimizer has
            used already (`step_in_backward`).
    """

    def __init__(
        self,
        submodule: ZeRO3,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        reshard_between_micro_batches: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(submodule, ZeRO3):
            raise TypeError(
                f"stage {stage_index}: expected a ZeRO3 module, got {type(submodule).__name__}; "
                "wrap the stage's part of the model, or use torch's PipelineStage"
            )
        root_unit = root_of(ordered_units(submodule)[0]).units[0]
        if root_unit is not get_unit(submodule):
            raise ValueError(
                f"stage {stage_index}: its module is part of another ZeRO3 module; wrap each stage "
                "separately, because stages reduce and free at different times"
            )
        optional = names_of.get(root_unit)
        if optional:
            raise NotImplementedError(
                f"stage {stage_index}: its ZeRO3 module has optional_modules {optional}; several "
                "micro-batches in flight on several stages give the ranks of a stage no order in "
                "which to agree about them: leave optional_modules out, or train without stages"
            )
        super().__init__(submodule, stage_index, num_stages, device, **options)
        self.model = submodule
        self._reshards = reshard_between_micro_batches
        self._in_step = False
        # See Note [Two stages of one rank].
        self._root.operations.prefix = f"stage {stage_index}: "

    @property
    def _root(self) -> RootState:
        return root_of(ordered_units(self.model)[0])

    def gather(self) -> None:
        """Start unsharding all units, which then stay unsharded; no effect outside a step.

        Collective over the stage's data-parallel ranks.
        """
        if self._in_step:
            unshard_all(self._root)

    def free(self) -> None:
        """Reshard all units. Not collective."""
        self._root.scheduler.free_all()

    def clear_runtime_states(self) -> None:
        """Begin a step of the schedule; discard one that was interrupted."""
        super().clear_runtime_states()
        if self._in_step:
            self._root.abort()
            self._root.shown.give_up()
        self._in_step = True
        self._root.before_call("micro_batches")
        self._root.scheduler.hold_micro_batches(not self._reshards)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch; the last one of an evaluation reshards the units."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward and fwd_chunk_id == len(self.args_recv_info) - 1:
            self._end_step()
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Run the backward of one micro-batch; the last one ends the step."""
        if self.has_backward and not full_backward:
            raise NotImplementedError(
                f"stage {self.stage_index}: the schedule runs the backward of inputs separately, "
                "as zero-bubble schedules do; ZeRO3 needs the backward of inputs and weights in "
                "one: use ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B or ScheduleLoopedBFS"
            )
        result = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self.has_backward and last_backward:
            self._end_step()
        return result

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Reduce only in the backward of the last micro-batch."""
        if last_backward:
            self._root.scheduler.hold_micro_batches(False)  # It frees each unit once that is done.
        with nullcontext() if last_backward else self.model.no_sync():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients by the number of micro-batches, once they are complete."""
        if not self._root.reducer.requires_sync:
            return  # They wait, and are divided with those of the step that reduces them.
        if grad_scale_factor != 1 and self._root.extensions.deliver:
            raise RuntimeError(
                f"stage {self.stage_index}: the schedule scales gradients after the backward, but "
                "step_in_backward has used them already: pass scale_grads=False to the schedule "
                "and divide the loss by the number of micro-batches"
            )
        super().scale_grads(grad_scale_factor)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        # Some versions of torch run a backward here to infer the shapes of gradients.
        with self.model.no_sync():
            return super()._prepare_backward_infra(*args, **kwargs)

    def _end_step(self) -> None:
        self._in_step = False
        self._root.scheduler.free_all()


def gather_as_scheduled(schedule: Any, stages: Sequence[ZeRO3PipelineStage]) -> None:
    """Let the schedule decide when stages are unsharded and resharded. Not collective.

    Schedules with several stages on a rank plan UNSHARD and RESHARD actions a few stages ahead,
    which torch executes for FSDP modules only. Without this function, a stage is unsharded by its
    first forward and stays unsharded until its last backward.

    Args:
        schedule: one that plans these actions, such as `ScheduleInterleaved1F1B`.
        stages: all of its stages on this rank.

    Raises:
        TypeError: the schedule plans no such actions, or a stage is not a ZeRO3PipelineStage.
    """
    register = getattr(schedule, "register_custom_function", None)
    if register is None:
        raise TypeError(
            f"gather_as_scheduled: {type(schedule).__name__} plans no gathers; expected a schedule "
            "with several stages per rank, such as ScheduleInterleaved1F1B"
        )
    by_index: dict[int, ZeRO3PipelineStage] = {}
    for stage in stages:
        if not isinstance(stage, ZeRO3PipelineStage):
            raise TypeError(
                f"gather_as_scheduled: expected ZeRO3PipelineStages, got {type(stage).__name__}"
            )
        by_index[stage.stage_index] = stage
    register(UNSHARD, lambda action, context: by_index[action.stage_index].gather())
    register(RESHARD, lambda action, context: by_index[action.stage_index].free())


def clip_grad_norm_(
    stages: Sequence[ZeRO3PipelineStage], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale the gradients of a whole pipeline so that their norm is at most `max_norm`.

    Collective over all ranks of the pipeline: over the data-parallel ranks of each stage, then over
    the group of stages. `clip_grad_norm_` of a stage's module covers that stage only.

    Args:
        stages: all stages on this rank.
        norm_type: p of the norm: p > 0, or infinity.

    Returns:
        The norm before clipping, a scalar tensor, the same on all ranks.

    Raises:
        ValueError: no stages, or a bad `norm_type`.
        RuntimeError: the optimizer has used the gradients already (`step_in_backward`).
    """
    if not stages:
        raise ValueError("clip_grad_norm_: expected the stages on this rank, got none")
    parts = [gradients_to_clip(stage.model) for stage in stages]
    norms = torch.stack([grad_norm(part, norm_type) for part in parts])
    everyone = Totals(stages[0]._root, (), resolve_process_groups(stages[0].group))
    norm = torch.linalg.vector_norm(everyone.gather("gradient norm", norms), norm_type)
    for part in parts:
        scale_gradients_(part.parameters, clip_factor(norm, max_norm))
    return norm


@remembers_failure
def unshard_all(root: RootState) -> None:
    """Start gathering all units, held for micro-batches. Collective; does not block the host.

    Raises:
        CollectiveError: a collective of this model failed.
    """
    root.before_call("micro_batches")
    root.backward.clear_abandoned()
    root.context.note_weights()
    if not root.reducer.kept.adds_up:
        root.scheduler.mark_stale()
    root.scheduler.unshard_ahead(root.units, waits=False)
    root.scheduler.hold_micro_batches(True)
