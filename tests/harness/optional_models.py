"""Models with optional regions, and batches that say which of them one rank enters, and how.

A text backbone with slots before, between, inside and after its blocks. A slot holds regions, and a
batch lists for each slot the calls to make: of which region, how often, which of its blocks in
which order, and what becomes of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


@dataclass(frozen=True)
class Call:
    """One call of a region."""

    region: int
    """Index in its slot."""
    order: tuple[int, ...]
    """Blocks of the region to run."""
    way: str = "used"
    """One of `WAYS`, or "fails": raises `Failure` after the first block."""
    image: Tensor | None = None
    """[rows, WIDTH], the region's input; None: what the backbone has come to."""
    inner: tuple[Call, ...] = ()
    """Calls of the region inside it, after its first block."""


WAYS = ("used", "lost", "detached", "no_grad", "part")
"""The result is added to the backbone's; is not used; is used without its gradient; is computed
without autograd; is that of one block, called alone."""


@dataclass(frozen=True)
class Sample:
    """What one rank gives to one forward."""

    rows: Tensor
    """[rows, WIDTH]"""
    calls: dict[str, tuple[Call, ...]] = field(default_factory=dict)
    """Name of a slot (in `Backbone.slot_names`) -> what to call there."""


class Failure(Exception):
    """A region cannot read its image."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Region(nn.Module):
    """Blocks in the order that the call gives, perhaps with a region between them."""

    def __init__(
        self,
        depth: int = 2,
        *,
        norm: bool = False,
        inner: Region | None = None,
        projects: bool = False,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.inner = inner
        self.norm = nn.LayerNorm(WIDTH) if norm else None
        self.projector = nn.Linear(WIDTH, WIDTH) if projects else None
        self.recomputes = recomputes

    def forward(self, x: Tensor, call: Call) -> Tensor:
        for place, index in enumerate(call.order):
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            if place == 0:
                if call.way == "fails":
                    raise Failure("no image")
                for each in call.inner if self.inner is not None else ():
                    x = x + self.inner(x, each)
        x = x if self.norm is None else self.norm(x)
        return x if self.projector is None else self.projector(x)


class Slot(nn.Module):
    def __init__(self, regions: Sequence[Region], recomputes: bool = False) -> None:
        super().__init__()
        self.regions = nn.ModuleList(regions)
        self.recomputes = recomputes

    def forward(self, x: Tensor, calls: Sequence[Call]) -> Tensor:
        for call in calls:
            source = x if call.image is None else call.image.to(x.dtype)
            with torch.set_grad_enabled(torch.is_grad_enabled() and call.way != "no_grad"):
                y = self._result(self.regions[call.region], source, call)
            if call.way != "lost":
                x = x + torch.tanh(y.detach() if call.way == "detached" else y)
        return x

    def _result(self, region: nn.Module, source: Tensor, call: Call) -> Tensor:
        if call.way == "part":
            return region.blocks[call.order[0]](source)
        if self.recomputes:
            return checkpoint(region, source, call, use_reentrant=False)
        return region(source, call)


class TextBlock(nn.Module):
    """Runs on every rank; may have a slot inside."""

    def __init__(self, slot: Slot | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.slot = slot
        self.down = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor, calls: Sequence[Call] = ()) -> Tensor:
        y = torch.tanh(self.up(x))
        if self.slot is not None:
            x = self.slot(x, calls)
        return x + self.down(y)


class Backbone(nn.Module):
    def __init__(
        self, slots: Sequence[Slot | None], text: Sequence[TextBlock], recomputes: bool = False
    ) -> None:
        """
        Args:
            slots: before each text block, and one after the last.
            recomputes: run the text blocks, with what is inside them, under `checkpoint`.
        """
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.slots = nn.ModuleDict(
            {str(index): slot for index, slot in enumerate(slots) if slot is not None}
        )
        self.text = nn.ModuleList(text)
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.recomputes = recomputes
        self.ends_in_slot = False

    def end_in_slot(self) -> set[str]:
        """Have the head run before the last slot, whose result is the model's.

        Returns:
            The modules to make units of, so that the root has no parameters.
        """
        self.ends_in_slot = True
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        return {"stem", "head", *(f"text.{index}" for index in range(len(self.text)))}

    def forward(self, sample: Sample) -> Tensor:
        x = self.stem(sample.rows.to(self.head.weight.dtype))
        for index, block in enumerate(self.text):
            x = self._slot(x, index, sample)
            calls = sample.calls.get(f"inside {index}", ())
            x = (
                checkpoint(block, x, calls, use_reentrant=False)
                if self.recomputes
                else block(x, calls)
            )
        if self.ends_in_slot:
            return self._slot(self.head(x), len(self.text), sample)
        return self.head(self._slot(x, len(self.text), sample))

    def _slot(self, x: Tensor, index: int, sample: Sample) -> Tensor:
        calls = sample.calls.get(str(index), ())
        return self.slots[str(index)](x, calls) if calls else x

    @property
    def all_slots(self) -> dict[str, Slot]:
        """By the names that `Sample.calls` uses."""
        inside = {
            f"inside {index}": block.slot
            for index, block in enumerate(self.text)
            if block.slot is not None
        }
        return {**dict(self.slots.items()), **inside}


def loss_of(output: Tensor) -> Tensor:
    """In float32 at least."""
    return output.to(torch.promote_types(output.dtype, torch.float32)).square().mean()
