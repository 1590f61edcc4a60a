"""Flips single bits of a model that trains, at random places, and looks who notices.

All ranks draw the same trials. In a trial one rank, the victim, flips one bit during one step; then
every rank must raise CorruptionError, which names the operation and a rank, and neither weights nor
optimizer state of any rank may have changed. Where nothing was flipped, no rank may raise.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from layerzero import ZeRO3
from layerzero.comm.gloo import messages
from layerzero.comm.pending import Pending
from layerzero.errors import CorruptionError
from layerzero.flat.placement import ShardGroup

SITES = ("wire", "full buffer")
REPLICA = "copy of a main shard"
"""Another site, for outer="replicate"."""
_CHECKED = ("all-gather", "outer all-gather", "reduce-scatter", "outer reduce-scatter")


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of a contiguous tensor, unseen by torch's version counters."""
    flat = tensor.detach().view(-1).data.view(torch.uint8)
    flat[bit // 8] ^= 1 << bit % 8


class Transport:
    """Flips a bit of what the next collectives deliver to this rank."""

    flipped: str | None
    """The operation whose bytes were flipped, and the rank that sent them."""

    def __init__(self) -> None:
        self.flipped = None
        self._skip = -1

    def arm(self, rng: random.Random, number: int, own: bool) -> None:
        """Flip a bit of the checked collective `number` from now.

        Args:
            own: of a gather, also the part that this rank copies itself.
        """
        self.flipped, self._skip, self._rng, self._own = None, number, rng, own

    def disarm(self) -> None:
        self.flipped, self._skip = None, -1

    @contextmanager
    def installed(self) -> Iterator[None]:
        real = messages.exchange

        def exchange(
            incoming: Sequence[torch.Tensor],
            outgoing: Sequence[torch.Tensor],
            group: ShardGroup,
            operation: Any,
            *more: Any,
            **named: Any,
        ) -> Pending:
            pending = real(incoming, outgoing, group, operation, *more, **named)
            if operation.verb in _CHECKED and self._skip >= 0:
                self._skip -= 1
                if self._skip < 0:
                    self._corrupt(pending, incoming, group)
            return pending

        with mock.patch.object(messages, "exchange", exchange):
            yield

    def _corrupt(
        self,
        pending: Pending,
        incoming: Sequence[torch.Tensor],
        group: ShardGroup,
    ) -> None:
        verb = pending.operation.verb
        ranks = range(group.size)
        if not (self._own and "gather" in verb):
            ranks = [rank for rank in ranks if rank != group.rank]
        source = self._rng.choice(ranks)
        arrives = pending.wait_for_data
        target = incoming[source]
        bit = self._rng.randrange(8 * target.nbytes) if target.nbytes else None

        def arrive() -> None:
            arrives()
            if self.flipped is None and bit is not None:
                self.flipped = f"{verb} of {pending.operation.unit}\0rank {group.ranks[source]}"
                flip(target, bit)

        pending.wait_for_data = arrive


class Trials:
    """Trials with one model and one optimizer."""

    found: Counter[str]
    """Flips that were found, by site."""

    def __init__(
        self,
        model: ZeRO3,
        optimizer: torch.optim.Optimizer,
        forward: Callable[[], torch.Tensor],
        rng: random.Random,
        backward_steps: bool = False,
    ) -> None:
        """
        Args:
            forward: runs the next batch; returns the loss.
            rng: in the same state on all ranks.
            backward_steps: `step_in_backward` is on.
        """
        self._model, self._optimizer, self._forward, self._rng = model, optimizer, forward, rng
        self._steps_itself = not backward_steps
        self._transport = Transport()
        self.found = Counter()

    def run(self, count: int, sites: Sequence[str] = SITES) -> None:
        with self._transport.installed():
            for _ in range(2):
                self._step()
            for number in range(count):
                self._run_one(sites[number % len(sites)])
                if number % 7 == 0:
                    self._step()
            self._step()

    def _step(self) -> None:
        self._forward().backward()
        if self._steps_itself:
            self._optimizer.step()
        self._optimizer.zero_grad()

    def _memory(self) -> list[torch.Tensor]:
        states = [each for state in self._optimizer.state.values() for each in state.values()]
        return self._main_shards() + [each for each in states if isinstance(each, torch.Tensor)]

    def _main_shards(self) -> list[torch.Tensor]:
        root = self._model._root_state
        return [h.main_shard for unit in root.units for h in unit.handles]

    def _run_one(self, site: str) -> None:
        victim, seed = self._rng.randrange(dist.get_world_size()), self._rng.random()
        kept = [tensor.clone() for tensor in self._memory()]
        toggle: Callable[[], None] | None = None
        if dist.get_rank() == victim:
            toggle = self._prepare(site, random.Random(seed))
        error: CorruptionError | None = None
        try:
            if toggle is not None:
                toggle()
            self._step()
        except CorruptionError as raised:
            error = raised
            self._optimizer.zero_grad()
        flipped = self._transport.flipped
        if toggle is not None:
            toggle()
            flipped = f"comparison of replicas\0rank {victim}"
        self._transport.disarm()
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, flipped)
        expected = texts[victim]
        if expected is None:
            assert error is None, f"nothing was flipped: {error}"
            return
        assert error is not None, f"{site}: not found: {expected!r}"
        for part in expected.split("\0"):
            assert part in str(error), f"{part!r} is not in {error}"
        for now, before in zip(self._memory(), kept, strict=True):
            same = torch.equal(now.view(-1).view(torch.uint8), before.view(-1).view(torch.uint8))
            assert same, f"{site}: the step that failed changed something"
        self.found[site] += 1

    def _prepare(self, site: str, rng: random.Random) -> Callable[[], None] | None:
        """Choose a bit. What flips it, and flips it back; None: the transport does."""
        if site in SITES:
            self._transport.arm(rng, rng.randrange(self._num_checked), site == "full buffer")
            return None
        tensor = rng.choice([each for each in self._main_shards() if each.numel()])
        bit = rng.randrange(8 * tensor.nbytes)
        return lambda: flip(tensor, bit)

    @property
    def _num_checked(self) -> int:
        """Checked collectives of a step, about."""
        return max(1, 3 * len(self._model._root_state.units) - 1)
