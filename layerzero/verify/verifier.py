"""Verifier: gathers and reduces for a model whose bytes are checked.

    forward, backward: checksums of what is sent, and of what was received before it is used
    gradients are reduced |> check: wire, copies of main shards; ranks agree |> .grad, step

Note [A check is before delivery]
    Ranks agree when all reductions of a backward are done and no `.grad` is written: a rank can
    step only after every rank has found all its bytes in order. With `step_in_backward`, too.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from layerzero.comm import collectives
from layerzero.comm.collectives import slices_of
from layerzero.comm.exchanges import gather_along, gather_small, gather_texts
from layerzero.comm.ordered_sums import reduce_in_order
from layerzero.comm.pending import Operation, Pending
from layerzero.config import Verify
from layerzero.errors import CorruptionError
from layerzero.flat.flat_param import FlatParam
from layerzero.flat.placement import ShardGroup
from layerzero.ops import ordered_sum_
from layerzero.step.extension import Extension, Transport
from layerzero.step.root import RootState
from layerzero.verify.checksums import word_sums
from layerzero.verify.wire import Checksums, Wire, kept

_WHAT = "the model"
_SAMPLED_EVERY = 8


@dataclass
class _Sent:
    """A gather of a main shard."""

    handle_ref: weakref.ref[FlatParam]
    version: int
    group: ShardGroup
    operation: Operation
    is_void: bool = False
    """Whether the shard was written since, so that this gather is not checked."""


class Verifier(Transport, Extension):
    """Keeps checksums of all that its model sends and receives, and compares them."""

    def __init__(self, root: RootState, verify: Verify) -> None:
        """Check the bytes of a model from now on. Before its first pass."""
        self._root: RootState = weakref.proxy(root)
        self._every = 1 if verify == "always" else _SAMPLED_EVERY
        """Backward passes that synchronize from one check to the next."""
        self._num_passes = 0
        self._records = self._every == 1
        """Whether the backward that comes next is checked."""
        self._wire = Wire(root.device, root.operations)
        self._unchecked: list[_Sent] = []
        """Since the last check."""
        root.extensions.add(self)

    @functools.cached_property
    def _handle_of(self) -> dict[int, weakref.ref[FlatParam]]:
        handles = (handle for unit in self._root.units for handle in unit.handles)
        return {id(handle.main_shard): weakref.ref(handle) for handle in handles}

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: ShardGroup, operation: Operation
    ) -> Pending:
        if not self._records:
            return collectives.all_gather(full, shard, group, operation)
        checksum, slices = kept(word_sums([shard])), slices_of(full, group)
        handle_ref, sent = self._handle_of.get(id(shard)), None
        handle = None if handle_ref is None else handle_ref()
        if handle_ref is not None and handle is not None and handle.main_shard is shard:
            # Programs write no other shard.
            sent = _Sent(handle_ref, _version_of(handle), group, operation)
            self._unchecked.append(sent)
        pending = collectives.all_gather(full, shard, group, operation)
        pending.then(functools.partial(self._gathered, operation, group, checksum, slices, sent))
        return pending

    def weights_written(self) -> None:
        """Do not check gathers of shards that were written since, perhaps while they were sent.

        At the same points of a step on every rank: a use of the unit gathers it again.
        """
        for sent in self._unchecked:
            handle = sent.handle_ref()
            if handle is not None and _version_of(handle) != sent.version:
                sent.is_void = True
                self._wire.forget(sent.group, sent.operation)

    def _gathered(
        self,
        operation: Operation,
        group: ShardGroup,
        checksum: Checksums,
        slices: list[torch.Tensor],
        sent: _Sent | None,
    ) -> None:
        """What peers sent is in `slices`."""
        if sent is None or not sent.is_void:
            self._wire.note(operation, group, checksum, kept(word_sums(slices)))

    def reduce_scatter(
        self,
        chunks: torch.Tensor,
        group: ShardGroup,
        operation: Operation,
        scale: float = 1.0,
        deterministic: bool = False,
        order: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Pending]:
        """`collectives.reduce_scatter`, checked: chunks are sent as they are, and summed here."""
        if not self._records:
            return collectives.reduce_scatter(
                chunks, group, operation, scale, deterministic, order, out
            )
        own = chunks.chunk(group.size)
        chosen = own if order is None else [own[place] for place in order]
        sent = kept(_of_peers(chosen, group))

        def check_and_add(summed: torch.Tensor, parts: list[torch.Tensor], scale: float) -> None:
            received = kept(_of_peers(parts, group))
            ordered_sum_(summed, parts, scale)
            self._wire.note(operation, group, sent, received)

        return reduce_in_order(chunks, group, operation, scale, order, out, check_and_add)

    def before_write(self, reductions: object) -> bool:
        """See Note [A check is before delivery]. Collective; blocks the host.

        Raises:
            CorruptionError: on every rank.
        """
        is_due = self._records
        self._num_passes += 1
        self._records = (self._num_passes + 1) % self._every == 0
        if is_due:
            root = self._root
            self.weights_written()
            self._unchecked.clear()
            groups = [*root.groups, *root.tensor_parallel_groups]
            self._settle(_groups(root), groups, _differing_copies(root))
        return False

    def after_forward(self) -> RuntimeError | None:
        """Check what a forward without gradients gathered. Collective over the groups it used.

        Raises:
            CorruptionError: on every rank of these groups.
        """
        root = self._root
        # Inside a join, ranks without batches do not come here.
        if torch.is_grad_enabled() or root.join is not None:
            return None
        self.weights_written()
        self._unchecked.clear()  # What they sent has come; an evaluation has many forwards.
        used = self._wire.used() if self._every == 1 else []
        for group in _groups(root) if used else ():
            if group in used:
                self._settle([group], [group], [])
        return None

    def _settle(
        self, groups: Sequence[ShardGroup], axes: Sequence[ShardGroup], findings: list[str]
    ) -> None:
        """Compare what was sent over `groups`; agree with all ranks of the axes. `findings`: what
        is wrong besides."""
        streams = self._root.streams
        streams.join()  # They have summed what is compared, own it, and may free it after that.
        is_bad = self._wire.differs(groups) or bool(findings)
        streams.fork()
        if not self._is_any(is_bad, axes):
            self._wire.clear(groups)
            return
        findings = [*findings, *chain.from_iterable(map(self._wire.find, groups))]
        text = findings[0] if findings else None
        texts = gather_texts(text, axes, self._root.device, "verification")
        different = sorted(set(texts.values()))
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

    def kept_micro_batch(self) -> None:
        self._wire.keep()

    def after_abort(self) -> None:
        self._wire.undo()


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


def _version_of(handle: FlatParam) -> int:
    """Of the main shard: it changes with each write that torch or the engine counts."""
    return sum(handle.versions) + handle.num_rewrites


def _differing_copies(root: RootState) -> list[str]:
    """Main shards that outer peers have otherwise, in words; with `outer="replicate"` these are
    copies. Collective; blocks the host."""
    by_group: dict[ShardGroup, list[tuple[str, torch.Tensor]]] = {}
    for unit in root.units:
        for handle in unit.handles:
            outer = handle.placement.outer_group
            if outer is not None and outer.size > 1 and handle.placement.owned_slices > 1:
                by_group.setdefault(outer, []).append((unit.label, handle.main_shard))
    found = []
    for group, entries in by_group.items():
        own = word_sums(shard for _, shard in entries).to(root.device)
        operation = root.operations.next("comparison of replicas", _WHAT, group)
        table = gather_small(own, group, operation).tolist()
        for (label, _), *checksums in zip(entries, *table, strict=True):
            (usual, number), *_ = Counter(checksums).most_common(1)
            if number < group.size:
                rows = zip(group.ranks, checksums, strict=True)
                # Without a majority every copy may be the wrong one.
                is_known = number > group.size // 2
                ranks = [rank for rank, each in rows if each != usual or not is_known]
                found.append(
                    f"comparison of replicas: the main shard of {label} differs from its other "
                    f"copies on {' and '.join(f'rank {rank}' for rank in ranks)}: load a checkpoint"
                )
    return found
