"""Exchanges which parameters had a gradient on any rank, in one byte per parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from layerzero.comm.collectives import all_gather
from layerzero.comm.pending import Pending
from layerzero.flat.placement import ShardGroup
from layerzero.step.context import RuntimeContext
from layerzero.step.reduction import Reduction


def exchange_presence(
    context: RuntimeContext, reductions: Sequence[Reduction]
) -> Callable[[], list[tuple[Reduction, set[int]]]]:
    """Start exchanging which parameters had a gradient on any rank.

    A parameter that had none anywhere keeps the `.grad` it has, as in plain torch. Only a rank
    that misses a gradient itself reads the result, so ordinary steps do not wait for a device.
    One collective for each group.

    Returns:
        A function that waits, and returns the reductions with the parameters present anywhere.
    """
    by_placement: dict[int, list[Reduction]] = {}
    for reduction in reductions:
        if reduction.handle.placement.num_ranks > 1:
            by_placement.setdefault(id(reduction.handle.placement), []).append(reduction)
    started = []
    for members in by_placement.values():
        own, has_all = flags_tensor(members, context.device)
        first, *others = members[0].handle.placement.groups
        started.append((members, has_all, others, *_gather_flags(context, own, first)))

    def answer() -> list[tuple[Reduction, set[int]]]:
        answers = {id(reduction): reduction.present for reduction in reductions}
        for members, has_all, others, table, pending in started:
            pending.wait()
            for group in others:
                table, pending = _gather_flags(context, table.amax(dim=0), group)
                pending.wait()
            if has_all:
                continue  # All are present; reading the table would block the host.
            anywhere = iter(table.amax(dim=0).tolist())
            for reduction in members:
                trainable = reduction.handle.gradients.trainable
                answers[id(reduction)] = {i for i in trainable if next(anywhere)}
        return [(reduction, answers[id(reduction)]) for reduction in reductions]

    return answer


def flags_tensor(members: Sequence[Reduction], device: torch.device) -> tuple[torch.Tensor, bool]:
    """[trainable parameters] uint8 on `device`: which had a gradient here; and whether all had.

    Does not block the host."""
    trainable = [each.handle.gradients.trainable for each in members]
    pairs = [*zip(members, trainable, strict=True)]
    if all(each.present.issuperset(own) for each, own in pairs):
        return torch.ones(sum(map(len, trainable)), dtype=torch.uint8, device=device), True
    flags = [index in each.present for each, own in pairs for index in own]
    return torch.tensor(flags, dtype=torch.uint8, device="cpu").to(device, non_blocking=True), False


def _gather_flags(
    context: RuntimeContext, flags: torch.Tensor, group: ShardGroup
) -> tuple[torch.Tensor, Pending]:
    operation = context.operations.next("gradient presence", "the model", group)
    table = flags.new_empty(group.size, flags.numel())
    return table, all_gather(table.view(-1), flags, group, operation)
