"""Predicts the step time of layered ZeRO by an alpha-beta model: arithmetic on seconds and bytes.

A collective over k ranks in which each rank sends b bytes takes

    alpha * (k - 1) + b / bandwidth        seconds

This is a ring, or messages between all pairs in sequence: k - 1 messages, each with a latency of
alpha seconds, and b bytes through a rank's only link. The inner link joins ranks of a shard group
(a node), the outer link ranks of different groups. A collective over all ranks crosses nodes, so it
runs at the speed of the outer link.

Letters as in docs/reference/layered.md: P bytes of parameters are all-gathered, G bytes of
gradients reduced; n ranks in a shard group, K in an outer group, N = n K; a step gathers g P. Each
hop is one collective for each unit. Bytes that a rank sends:

                forward                                    backward
    zero1       inner  P (n - 1) / n                       inner  ((g - 1) P + G) (n - 1) / n
                outer  P / n (K - 1) / K                   outer  G / n (K - 1) / K
    replicate   inner  P (n - 1) / n                       inner  ((g - 1) P + G) (n - 1) / n
                                                           outer  2 G / n (K - 1) / K
    shard       all    P (N - 1) / N                       all    ((g - 1) P + G) (N - 1) / N

All-gathers of the forward overlap perfectly with its compute, as do all-gathers and reductions of
the backward with its own; inner and outer hops of one phase add up. The optimizer overlaps with
nothing:

    step = max(compute, communication) of the forward + the same of the backward + optimizer

Not modelled: sums, copies and casts around a collective; the first all-gather and the last
reduction, which nothing can hide; units of unequal size; ranks that wait for each other;
congestion; collectives that use all links of a node (see `through_all_links`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["zero1", "replicate", "shard"]
Axis = Literal["inner", "outer", "all"]


@dataclass(frozen=True)
class Link:
    """The connection between two ranks."""

    alpha_s: float
    """Latency: seconds for an empty message."""
    bandwidth: float
    """Bytes per second that one rank sends."""

    def time_s(self, ranks: int, sent_nbytes: float, calls: int = 1) -> float:
        """Seconds for `calls` collectives in which a rank sends `sent_nbytes` in total."""
        return calls * self.alpha_s * (ranks - 1) + sent_nbytes / self.bandwidth


@dataclass(frozen=True)
class Links:
    """The link along each axis."""

    inner: Link
    outer: Link
    all: Link

    def of(self, axis: Axis) -> Link:
        return {"inner": self.inner, "outer": self.outer, "all": self.all}[axis]


def through_all_links(inner: Link, outer: Link, node_size: int) -> Link:
    """The effective link of one hop over all ranks that uses `node_size` rings in parallel.

    A ring visits all ranks of a node before the next node, so one of `node_size` messages crosses
    nodes, for each ring through another rank's link. NCCL does this if every GPU has a network
    card.
    """
    return Link(
        alpha_s=((node_size - 1) * inner.alpha_s + outer.alpha_s) / node_size,
        bandwidth=min(inner.bandwidth, node_size * outer.bandwidth),
    )


@dataclass(frozen=True)
class Split:
    """How the ranks are grouped."""

    inner: int
    """n, ranks of a shard group."""
    outer: int
    """K, shard groups."""

    @property
    def ranks(self) -> int:
        return self.inner * self.outer


@dataclass(frozen=True)
class Workload:
    """One step of one micro-batch on each rank."""

    gathered_nbytes: float
    """P, the total over units."""
    regathered_nbytes: float
    """(g - 1) P: gathered again in the backward, for every unit but the forward's last."""
    gradient_nbytes: float
    """G, the total over units."""
    num_units: int
    forward_s: float
    """Seconds of compute on a rank."""
    backward_s: float
    optimizer_s: float = 0.0
    """Seconds of the optimizer over the whole model; each rank takes its share."""

    @classmethod
    def of_model(
        cls,
        num_parameters: float,
        num_tokens: float,
        flops: float,
        num_units: int,
        gradient_itemsize: int,
        parameter_itemsize: int = 2,
    ) -> Workload:
        """The workload of a transformer with units of equal size.

        Assumes 6 floating-point operations for each parameter and token, a third of them in the
        forward, no recomputation, and an optimizer that takes no time.

        Args:
            num_tokens: tokens of one rank in a step.
            flops: operations per second that a rank achieves.
        """
        gathered = num_parameters * parameter_itemsize
        compute = 6 * num_parameters * num_tokens / flops
        return cls(
            gathered_nbytes=gathered,
            regathered_nbytes=gathered * (num_units - 1) / num_units,
            gradient_nbytes=num_parameters * gradient_itemsize,
            num_units=num_units,
            forward_s=compute / 3,
            backward_s=compute * 2 / 3,
        )


@dataclass(frozen=True)
class Hop:
    """The collectives of one kind in one phase of a step."""

    axis: Axis
    ranks: int
    sent_nbytes: float
    """Bytes that one rank sends in all of them."""
    calls: int


@dataclass(frozen=True)
class Prediction:
    """The prediction for one step."""

    step_s: float
    serial_s: float
    """The step if nothing overlapped."""
    communication_s: float
    sent_nbytes: dict[Axis, float]
    """Bytes that one rank sends along each axis."""


def predict(mode: Mode, work: Workload, split: Split, links: Links) -> Prediction:
    """Predict one step; the module's docstring lists the assumptions."""
    forward, backward = forward_hops(mode, work, split), backward_hops(mode, work, split)
    sent: dict[Axis, float] = {"inner": 0.0, "outer": 0.0, "all": 0.0}
    for hop in (*forward, *backward):
        sent[hop.axis] += hop.sent_nbytes
    forward_s, backward_s = _time_s(forward, links), _time_s(backward, links)
    optimizer_s = work.optimizer_s / num_owners(mode, split)
    compute_s = work.forward_s + work.backward_s
    return Prediction(
        step_s=max(work.forward_s, forward_s) + max(work.backward_s, backward_s) + optimizer_s,
        serial_s=compute_s + forward_s + backward_s + optimizer_s,
        communication_s=forward_s + backward_s,
        sent_nbytes=sent,
    )


def forward_hops(mode: Mode, work: Workload, split: Split) -> list[Hop]:
    """All-gathers of units; with zero1 also those that update compute shards."""
    gathered = work.gathered_nbytes
    if mode == "shard":
        return _hops(_hop("all", split.ranks, gathered, work.num_units))
    inner = _hop("inner", split.inner, gathered, work.num_units)
    if mode == "replicate":
        return _hops(inner)
    return _hops(inner, _hop("outer", split.outer, gathered / split.inner, work.num_units))


def backward_hops(mode: Mode, work: Workload, split: Split) -> list[Hop]:
    """All-gathers of all units but the forward's last, and reductions."""
    axis, ranks = ("all", split.ranks) if mode == "shard" else ("inner", split.inner)
    gathers = _hop(axis, ranks, work.regathered_nbytes, work.num_units - 1)
    reductions = _hop(axis, ranks, work.gradient_nbytes, work.num_units)
    if mode == "shard":
        return _hops(gathers, reductions)
    own = work.gradient_nbytes / split.inner
    # The two halves of an all-reduce move the same bytes.
    halves = 2 if mode == "replicate" else 1
    outer = _hop("outer", split.outer, halves * own, halves * work.num_units)
    return _hops(gathers, reductions, outer)


def num_owners(mode: Mode, split: Split) -> int:
    """Number of shards of the optimizer state."""
    return split.inner if mode == "replicate" else split.ranks


def resident_nbytes(
    mode: Mode, split: Split, main_nbytes: float, compute_nbytes: float, casts: bool
) -> float:
    """Bytes on a rank between backward and optimizer step, with Adam (docs/reference/layered.md).

    Args:
        main_nbytes: M, bytes of the model in the optimizer's dtype; gradients take as many.
        compute_nbytes: P.
        casts: whether parameters are gathered in another dtype than the optimizer's.
    """
    state = 4 * main_nbytes / num_owners(mode, split)
    if not casts and (mode != "zero1" or split.outer == 1):
        return state
    return state + compute_nbytes / (split.ranks if mode == "shard" else split.inner)


def _hop(axis: Axis, ranks: int, nbytes: float, calls: int) -> Hop:
    """An all-gather or reduce-scatter of `nbytes` in total; a rank's own part is not sent."""
    return Hop(axis, ranks, nbytes * (ranks - 1) / ranks, calls)


def _hops(*hops: Hop) -> list[Hop]:
    return [hop for hop in hops if hop.ranks > 1]


def _time_s(hops: Sequence[Hop], links: Links) -> float:
    return sum(links.of(hop.axis).time_s(hop.ranks, hop.sent_nbytes, hop.calls) for hop in hops)
