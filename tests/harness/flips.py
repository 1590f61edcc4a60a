"""Flips single bits of a model that trains, at random places, and looks who notices.

All ranks draw the same trials. In a trial one rank, the victim, flips one bit during one step; then
every rank must raise CorruptionError, which names the operation and a rank, and neither weights nor
optimizer state of any rank may have changed. Where nothing was flipped, no rank may raise.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from layerzero import ZeRO3
from layerzero.comm.gloo import messages
from layerzero.comm.pending import Pending
from layerzero.errors import CorruptionError
from layerzero.flat.placement import ShardGroup
from tests.harness.ranks import of_all_ranks
from tests.harness.recording import observed

SITES = ("wire", "full buffer")
REPLICA = "copy of a main shard"
"""Another site, for outer="replicate"."""
_CHECKED = ("all-gather", "outer all-gather", "reduce-scatter", "outer reduce-scatter")


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of a contiguous tensor, unseen by torch's version counters."""
    flat = tensor.detach().view(-1).data.view(torch.uint8)
    flat[bit // 8] ^= 1 << bit % 8


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
        self._skip = -1
        """Checked collectives before the one whose bytes are flipped; -1: none is."""
        self._flipped: str | None = None
        """The operation whose bytes were flipped, and the rank that sent them."""
        self.found = Counter()

    def run(self, count: int, sites: Sequence[str] = SITES) -> None:
        def exchanged(
            pending: Pending, incoming: Any, _: Any, group: Any, *more: Any, **named: Any
        ) -> None:
            if pending.operation.verb in _CHECKED and self._skip >= 0:
                self._skip -= 1
                if self._skip < 0:
                    self._corrupt(pending, incoming, group)

        with observed(messages, "exchange", after=exchanged):
            for _ in range(2):
                self._step()
            for number in range(count):
                self._run_one(sites[number % len(sites)])
                if number % 7 == 0:
                    self._step()
            self._step()

    def _corrupt(
        self, pending: Pending, incoming: Sequence[torch.Tensor], group: ShardGroup
    ) -> None:
        """Flip a bit of what the collective delivers to this rank, once it has arrived."""
        verb = pending.operation.verb
        ranks = [*range(group.size)]
        if not (self._takes_own and "gather" in verb):
            ranks.remove(group.rank)
        source = self._draw.choice(ranks)
        arrives = pending.wait_for_data
        target = incoming[source]
        bit = self._draw.randrange(8 * target.nbytes) if target.nbytes else None

        def arrive() -> None:
            arrives()
            if self._flipped is None and bit is not None:
                self._flipped = f"{verb} of {pending.operation.unit}\0rank {group.ranks[source]}"
                flip(target, bit)

        pending.wait_for_data = arrive

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
        self._flipped, self._draw, toggle = None, random.Random(seed), None
        if dist.get_rank() == victim and site in SITES:
            # One of a step's checked collectives, of which there are about so many.
            self._skip = self._draw.randrange(3 * len(self._model._root_state.units) - 1)
            self._takes_own = site == "full buffer"  # Also what this rank copies itself.
        elif dist.get_rank() == victim:
            tensor = self._draw.choice([each for each in self._main_shards() if each.numel()])
            toggle = partial(flip, tensor, self._draw.randrange(8 * tensor.nbytes))
        error: CorruptionError | None = None
        try:
            if toggle is not None:
                toggle()
            self._step()
        except CorruptionError as raised:
            error = raised
            self._optimizer.zero_grad()
        if toggle is not None:
            toggle()
            self._flipped = f"comparison of replicas\0rank {victim}"
        self._skip = -1
        expected = of_all_ranks(self._flipped)[victim]
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
