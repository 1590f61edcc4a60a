"""Verifier: gathers and reduces for a model whose bytes are checked.

    step_n |> checksums of main shards and state
    forward, backward: checksums of what is sent, and of what was received before it is used
    gradients are reduced |> check: wire, main shards, state; ranks agree |> .grad, step_n+1

Note [A check is before delivery]
    Ranks agree when all reductions of a backward are done and no `.grad` is written: a rank can
    step only after every rank has found all its bytes in order. With `step_in_backward`, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook

from layerzero.comm import collectives
from layerzero.comm.collectives import slices_of
from layerzero.comm.exchanges import gather_along, gather_texts
from layerzero.comm.ordered_sums import Add, reduce_in_order
from layerzero.comm.pending import Operation, Pending
from layerzero.flat.placement import ShardGroup
from layerzero.ops import checked_sum_, ordered_sum_, word_sums
from layerzero.step.context import Transport
from layerzero.step.extension import Extension
from layerzero.step.root import RootState
from layerzero.verify.resting import Resting
from layerzero.verify.wire import Checksums, Wire, kept

_WHAT = "the model"
_LASTS = "load a checkpoint"


class CorruptionError(RuntimeError):
    """Bytes are not those that were sent or written. The message names unit, operation and rank.

    Every rank of the model raises it, and weights and optimizer state are as before the step. What
    was corrupted on the way, or in a full buffer, is gone with the step, which may be run again.
    After corruption of a main shard or of optimizer state, load a checkpoint.
    """


@dataclass
class _Sent:
    """A shard, at the version at which it was sent."""

    shard_ref: weakref.ref[torch.Tensor]
    version: int
    checksum: Checksums
    gathers: list[tuple[ShardGroup, Operation]] = field(default_factory=list)
    is_void: bool = False
    """Whether it was written since, so that these gathers are not checked."""


class Verifier(Transport, Extension):
    """Keeps checksums of all that its model sends, receives and keeps, and compares them."""

    def __init__(self, root: RootState, every: int) -> None:
        """`every`: backward passes that synchronize from one check to the next."""
        self._root_ref = root_ref = weakref.ref(root)
        self._every = every
        self._num_passes = 0
        self._records = every == 1
        """Whether the backward that comes next is checked."""
        self._wire = Wire(root.device, root.operations)
        self._resting = Resting(lambda: () if (root := root_ref()) is None else root.units)
        self._sent: dict[int, _Sent] = {}
        """Of each shard that was sent since a forward began, by id."""
        self._unchecked: list[_Sent] = []
        """The main shards among them, since the last check."""
        self._watch_steps()

    def _watch_steps(self) -> None:
        """Have `after_step` called."""
        own_ref = weakref.ref(self)

        @_disable_dynamo
        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (own := own_ref()) is not None:
                own.after_step(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def _keep(self, checksums: torch.Tensor) -> Checksums:
        return kept(checksums)

    @property
    def _root(self) -> RootState:
        root = self._root_ref()
        assert root is not None, "it runs a pass"
        return root

    def weights_written(self) -> None:
        self._void_written()
        self._sent.clear()

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: ShardGroup, operation: Operation
    ) -> Pending:
        """`collectives.all_gather`, checked."""
        if not self._records:
            return collectives.all_gather(full, shard, group, operation)
        shown, slices = self._shown(shard), slices_of(full, group)
        shown.gathers.append((group, operation))
        pending = collectives.all_gather(full, shard, group, operation)
        pending.then(functools.partial(self._gathered, operation, group, shown, slices))
        return pending

    def _shown(self, shard: torch.Tensor) -> _Sent:
        version = self._resting.version_of(shard)
        known = self._sent.get(id(shard))
        if known is None or known.shard_ref() is not shard or known.version != version:
            noted = self._resting.checksum_of(shard)
            checksum = self._keep(word_sums([shard])) if noted is None else [noted]
            known = self._sent[id(shard)] = _Sent(weakref.ref(shard), version, checksum)
            if self._resting.handle_of(shard) is not None:  # Programs write no other shard.
                self._unchecked.append(known)
        return known

    def _void_written(self) -> None:
        """Do not check gathers of shards that were written since, perhaps while they were sent.

        At the same points of a step on every rank: a use of the unit gathers it again.
        """
        for sent in self._unchecked:
            shard = sent.shard_ref()
            if shard is not None and self._resting.version_of(shard) != sent.version:
                sent.is_void = True
                self._wire.forget(sent.gathers)

    def _gathered(
        self, operation: Operation, group: ShardGroup, sent: _Sent, slices: list[torch.Tensor]
    ) -> None:
        """What peers sent is in `slices`."""
        if not sent.is_void:
            self._wire.note(operation, group, sent.checksum, self._keep(word_sums(slices)))

    def reduce_scatter(
        self,
        chunks: torch.Tensor,
        group: ShardGroup,
        operation: Operation,
        scale: float = 1.0,
        deterministic: bool = False,
        order: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        add: Add = ordered_sum_,
    ) -> tuple[torch.Tensor, Pending]:
        """`collectives.reduce_scatter`, checked: chunks are sent as they are, and summed here."""
        if not self._records:
            return collectives.reduce_scatter(
                chunks, group, operation, scale, deterministic, order, out, add
            )
        own = chunks.chunk(group.size)
        chosen = own if order is None else [own[place] for place in order]
        check_and_add = self._checked(_of_peers(chosen, group), group, operation, add)
        return reduce_in_order(chunks, group, operation, scale, order, out, check_and_add)

    def _checked(
        self, sent: torch.Tensor, group: ShardGroup, operation: Operation, add: Add
    ) -> Add:
        """`add`, which also notes what was `sent` and received: checksums of each rank's part."""
        kept_sent = self._keep(sent)

        def check_and_add(summed: torch.Tensor, parts: list[torch.Tensor], scale: float) -> None:
            if add is ordered_sum_:
                received = checked_sum_(summed, parts, scale, skip=group.rank)
            else:
                received = _of_peers(parts, group)
                add(summed, parts, scale)
            self._wire.note(operation, group, kept_sent, self._keep(received))

        return check_and_add

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, of any model, has stepped."""
        if self._records:
            self._resting.after_step(optimizer)

    def before_write(self, reductions: object) -> bool:
        """See Note [A check is before delivery]. Collective; blocks the host.

        Raises:
            CorruptionError: on every rank.
        """
        self._check_step()
        return False

    def _check_step(self) -> None:
        is_due = self._records
        self._num_passes += 1
        self._records = (self._num_passes + 1) % self._every == 0
        if not is_due:
            return
        root = self._root
        self._wait_for_streams()
        self._void_written()
        self._unchecked.clear()
        findings = self._changed(root.placements[0].rank)
        findings += self._resting.different(root)
        self._settle(_groups(root), [*root.groups, *root.tensor_parallel_groups], findings)
        if not self._records:  # The steps that follow are not noted, and some count no write.
            self._resting.forget()

    def _changed(self, rank: int) -> list[str]:
        return [
            f"{label} on rank {rank} changed since the last optimizer step, and torch counted no "
            f"write: a bit flipped in memory, so {_LASTS}; or the program wrote it through .data "
            "or numpy(), and has to write it under torch.no_grad() instead"
            for label in self._resting.changed()
        ]

    def after_forward(self) -> RuntimeError | None:
        """Check what a forward without gradients gathered. Collective over the groups it used.

        Raises:
            CorruptionError: on every rank of these groups.
        """
        root = self._root
        # Inside a join, ranks without batches do not come here.
        if torch.is_grad_enabled() or root.join is not None:
            return None
        if self._every == 1:
            self._wait_for_streams()
        self._void_written()
        self._unchecked.clear()  # What they sent has come; an evaluation has many forwards.
        used = self._wire.used() if self._every == 1 else []
        for group in _groups(root) if used else ():
            if group in used:
                self._settle([group], [group], [])
        return None

    def _settle(
        self, groups: Sequence[ShardGroup], axes: Sequence[ShardGroup], findings: list[str]
    ) -> None:
        """Compare what was sent over `groups`; agree with all ranks of the axes."""
        rank = self._root.placements[0].rank
        is_bad = self._wire.differs(groups) or bool(findings)
        self._before_free()
        if not self._is_any(is_bad, axes):
            self._wire.clear(groups)
            return
        findings = [*(findings or self._changed(rank)), *self._wire.find(groups)]
        text = findings[0] if findings else None
        texts = gather_texts(text, rank, axes, self._root.device, "verification")
        # What lasts comes first: a main shard that changed is also sent otherwise than it was.
        different = sorted(set(texts.values()), key=lambda text: (_LASTS not in text, text))
        if different:
            # What waits may be of bytes that were compared only now.
            self._wire.clear(self._wire.used())
            self._root.reducer.kept.forget_sums()
            raise CorruptionError(
                f"{different[0]}. No rank finishes this step: weights and optimizer state are as "
                "before it" + "".join(f"\n  also: {text}" for text in different[1:5])
            )

    def _is_any(self, is_bad: bool, axes: Sequence[ShardGroup]) -> bool:
        """Whether it is bad on any rank. Words of 64 equal bits: one flipped changes nothing."""
        own = torch.tensor([-1 if is_bad else 0], device=self._root.device)
        name = functools.partial(self._root.operations.next, "verification", _WHAT)
        words = gather_along(own, axes, name).view(-1).tolist()
        return any((word & (2**64 - 1)).bit_count() > 32 for word in words)

    def _wait_for_streams(self) -> None:
        """Order this check after all that other streams have summed."""
        streams = self._root.streams
        if streams.are_apart:
            for stream in (streams.unshard, streams.reduce):
                stream.drain_handle().wait()

    def _before_free(self) -> None:
        """Order the streams that own checksums after this check, which has read them."""
        streams = self._root.streams
        if streams.are_apart:
            compute = streams.record_compute_event()
            for stream in (streams.unshard, streams.reduce):
                stream.wait(compute)

    def kept_micro_batch(self) -> None:
        self._wire.keep()

    def after_abort(self) -> None:
        self._wire.undo()
        self._sent.clear()


def _of_peers(parts: Sequence[torch.Tensor], group: ShardGroup) -> torch.Tensor:
    """[group_size] checksums; 0 for the own part, which goes nowhere."""
    others = [part for rank, part in enumerate(parts) if rank != group.rank]
    if not others:
        return torch.zeros(1, dtype=torch.int64, device=parts[0].device)
    checksums = word_sums(others)
    return torch.cat([checksums[: group.rank], checksums.new_zeros(1), checksums[group.rank :]])


def _groups(root: RootState) -> list[ShardGroup]:
    """All groups over which the model gathers and reduces, in one order on all their ranks."""
    found = (group for placement in root.placements for group in placement.all_groups)
    return list(dict.fromkeys(found))
