"""Exchange: what the ranks of one model say to each other inside a pass, on the host.

Each method is one exchange; `Exchange.agree` is the usual one: each rank says what it wants next,
and all take part in one of these requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from layerzero.comm.exchanges import gather_along, gather_texts
from layerzero.comm.new_groups import new_group
from layerzero.errors import CollectiveError
from layerzero.flat.placement import ShardGroup
from layerzero.step.root import RootState
from layerzero.watch.diagnosis import PeerRaised

NOTHING = -1
"""The request of a rank that wants nothing."""
_RAISED = -2
_HOST = torch.device("cpu")


class Exchange:
    """Exchanges numbers between the ranks of one model. All methods are collective and block the
    host.

    The answers decide what the host does next, so they must not come from the device: reading them
    would block the host until the device has come to it. Where the model is on one, the exchange
    has gloo groups of its own.

    `what` is the subject, which an error shows of each rank. Ranks with other subjects never
    exchange anything.
    """

    def __init__(self, root: RootState) -> None:
        """Collective; see `exchange_of`."""
        groups, on_device = root.placements[0].groups, root.device.type != "cpu"
        self._operations = root.operations
        if on_device or root.streams.are_apart:
            groups = tuple(map(_on_host, groups))
        self._groups = groups

    def __call__(self, row: Sequence[float], what: str) -> list[list[float]]:
        """Every rank's row, in one order on all ranks; as many numbers on every rank."""
        # Float64 has all integers that are sent, too.
        own = torch.tensor(row, dtype=torch.float64, device="cpu")
        rows: list[list[float]] = self._gather(own, what).tolist()
        return rows

    def counts(self, flags: Sequence[bool], what: str) -> list[int]:
        """For each flag, the number of ranks that set it; as many flags on every rank."""
        rows = self._gather(torch.tensor(flags, dtype=torch.uint8, device="cpu"), what)
        found: list[int] = rows.sum(dim=0).tolist()
        return found

    def _gather(self, own: torch.Tensor, what: str) -> torch.Tensor:
        name = partial(self._operations.next_on_host, "agreement", what)
        return gather_along(own, self._groups, name).view(-1, own.numel())

    def texts(self, text: str | None, what: str) -> dict[int, str]:
        return gather_texts(text, self._groups, _HOST, what)

    def agree(self, request: int, what: str) -> int:
        """Exchange requests, and return the lowest, in which all ranks take part now; NOTHING: no
        rank wants anything. Raises PeerRaised if another rank has raised."""
        requests = [int(number) for (number,) in self([request], what)]
        if _RAISED in requests:
            rank, text = next(iter(self.texts(None, what).items()))
            raise PeerRaised(
                f"rank {rank} raised between or inside units that ranks may skip: {text}"
            )
        return min((each for each in requests if each >= 0), default=NOTHING)

    def report(self, error: BaseException, what: str) -> None:
        """Raise on the ranks that call `agree`; not if they raise at the same place, or may be gone
        (after an interrupt, or a failed collective)."""
        is_own = isinstance(error, Exception) and not isinstance(error, CollectiveError)
        if not is_own or isinstance(error, PeerRaised) or self._operations.failure is not None:
            return
        self([_RAISED], what)
        self.texts(f"{type(error).__name__}: {error}".splitlines()[0], what)


def exchange_of(root: RootState) -> Exchange:
    """The exchange between the ranks of a model. The first use makes it, and is collective."""
    found: Exchange = root.__dict__.get("_exchange") or Exchange(root)
    root.__dict__["_exchange"] = found
    return found


def _on_host(group: ShardGroup) -> ShardGroup:
    process_group = new_group(group.ranks, "gloo", group.timeout)
    return ShardGroup(process_group, group.rank, group.ranks, "gloo", group.timeout)
