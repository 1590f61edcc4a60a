"""What a ledger keeps of a step, in seconds on one rank's clock, and how it travels between ranks.

Job   one gather or reduction of one unit, from the call that asks for it
Hop   one collective of a job: a job has several with an outer axis, or several flat parameters
Wait  compute stood still until a job let it go on
Slice forward or backward of a unit on the compute lane
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Stamp = Any
"""A place in time: seconds on the host's clock, or an event of a device until it is resolved."""
JobKind = Literal["gather", "reduction"]
Phase = Literal["forward", "backward", "between"]

ISSUED_LATE = "issued late"
LIMITER = "limiter"
PREVIOUS = "previous reduction"
HOST_BOUND = "host-bound"
PEER_LATE = "peer late"
TRANSFER = "transfer"
REASONS = (ISSUED_LATE, LIMITER, PREVIOUS, HOST_BOUND, PEER_LATE, TRANSFER)


@dataclass(slots=True)
class Hop:
    """One collective."""

    number: int
    """Number of the operation in the model: the same on every rank of the group."""
    verb: str
    ranks: tuple[int, ...]
    """Global ranks of its group."""
    nbytes: int
    """Bytes of the whole tensor on one rank, of which (size - 1) / size travel."""
    called: float
    """When the host issued it."""
    issued: Stamp
    """When its lane came to it; on the CPU, `called`."""
    arrived: Stamp | None = None
    """When its data had arrived, by the work handle; None: it never did inside the block."""
    done: Stamp | None = None
    """When its result was ready: a reduction on gloo sums what arrived."""


@dataclass(slots=True)
class Job:
    """One gather or reduction of one unit."""

    kind: JobKind
    unit: str
    """Label of the unit."""
    phase: Phase
    asked: Stamp
    cause: str
    """Reason of a wait for it that nothing else explains: one of `REASONS`."""
    asked_on_host: float = 0.0
    hops: list[Hop] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffers; the hop along the outer axis carries parts of them."""
        whole = [hop for hop in self.hops if not hop.verb.startswith("outer")]
        return sum(hop.nbytes for hop in whole or self.hops)

    @property
    def end(self) -> float | None:
        """When its result was ready; None if it never was."""
        ends: list[Any] = [h.arrived if h.done is None else h.done for h in self.hops]
        return None if not ends or None in ends else max(ends)


@dataclass(slots=True)
class Wait:
    """Compute stood still."""

    job: int
    """Index of the job that it counts for."""
    blocker: int
    """Index of the job that was waited for: another one, if a reduction waits for the one before
    it."""
    begin: Stamp
    end: Stamp
    begin_on_host: float = 0.0


@dataclass(slots=True)
class Slice:
    """Forward or backward of a unit on the compute lane, the waits inside it included."""

    phase: Phase
    unit: str
    """Label of the unit; "" for the pass of the whole model."""
    begin: Stamp
    end: Stamp
    job: int | None = None
    """Index of the gather that it used."""


@dataclass(slots=True)
class Record:
    """What one rank did inside the block."""

    rank: int
    begin: Stamp
    end: Stamp
    jobs: list[Job] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    num_forwards: int = 0
    num_backwards: int = 0
    """Backward passes that reduced gradients."""
    num_optimizer_steps: int = 0
    step_ends: list[float] = field(default_factory=list)
    """Ends of these backward passes, or of forwards if there are none, on the host's clock."""
    silent: list[tuple[float, float]] = field(default_factory=list)
    """Times in which no Python thread of the process ran but one."""

    @property
    def num_steps(self) -> int:
        """Steps in the block; see `Ledger.num_steps`."""
        if not self.num_backwards:
            return self.num_forwards
        return min(self.num_backwards, self.num_optimizer_steps or self.num_backwards)

    def resolve(self, seconds: Any) -> None:
        """Replace every stamp by its seconds; forget jobs' hops that never arrived."""
        self.begin, self.end = seconds(self.begin), seconds(self.end)
        for job in self.jobs:
            job.asked = seconds(job.asked)
            job.hops = [hop for hop in job.hops if hop.arrived is not None]
            for hop in job.hops:
                hop.issued, hop.arrived = seconds(hop.issued), seconds(hop.arrived)
                hop.done = hop.arrived if hop.done is None else seconds(hop.done)
        spans: list[Wait | Slice] = [*self.waits, *self.slices]
        for span in spans:
            span.begin, span.end = seconds(span.begin), seconds(span.end)
