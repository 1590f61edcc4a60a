"""What the mirror trains: settings of the engine, and ways to use it, as any rank of any world."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from layerzero import ZeRO3
from tests.gpu.mirror import Mirror, Replica, compare_delivered, fake_world
from tests.harness import missing_waits, stream_uses
from tests.harness.internals import inner_units
from tests.harness.models import Block, Mlp

WIDTH, HIDDEN, ROWS, DEPTH = 24, 7, 8, 3
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: stream_uses.SETTINGS[name] for name in stream_uses.SETTINGS if name != "sum"},
    **{f"layered: {name}": each for name, each in stream_uses.LAYERED.items()},
    **{f"offloaded: {name}": each for name, each in stream_uses.OFFLOADED.items()},
}
"""The mean over ranks that all have one batch is what one of them computes; a sum is not."""


def build(width: int, hidden: int, depth: int) -> Mlp:
    """The same weights at every call."""
    torch.manual_seed(0)
    model = Mlp(0, width)
    model.blocks.extend(Block(width, hidden) for _ in range(depth))
    return model


class Pair:
    """A sharded model and its replica, trained alike."""

    def __init__(
        self,
        mirror: Mirror,
        settings: dict[str, Any],
        width: int = WIDTH,
        hidden: int = HIDDEN,
        num_spare: int = 12,
    ) -> None:
        """`num_spare`: see `Replica`."""
        self._width, self._hidden = width, hidden
        self.between: Callable[[], object] = nullcontext
        """Called between each forward and its backward, and after it."""
        options = {"accumulation": "unsharded", **settings}
        self.mirror = mirror
        self.model = ZeRO3(self._build(), auto_wrap_policy={Block}, **options)
        handles = [handle for unit in inner_units(self.model) for handle in unit.handles]
        self._dtype = handles[0].full.dtype
        self._sums_sharded = (
            options["accumulation"] == "sharded" and handles[0].placement.sums_in_shards
        )
        self._num_parts = dist.get_world_size() if options.get("deterministic") else 1
        self._compares_grads = handles[0].params_on is None
        self.replica = Replica(self._build(), self.model, num_spare)
        mirror.follow(self.model, self.replica)
        for block in self.model.module.blocks:  # The device falls behind the host.
            block.register_forward_pre_hook(lambda *_: mirror.sleep())
            block.register_full_backward_pre_hook(lambda *_: mirror.sleep())
        self._optimizers = [
            torch.optim.AdamW(parameters, lr=1e-2, foreach=True)
            for parameters in (self.replica.masters.values(), self.model.parameters())
        ]

    def _build(self) -> Mlp:
        return build(self._width, self._hidden, DEPTH).to(self.mirror.device)

    def batch(self) -> Tensor:
        # Made on the device: a copy from the host would wait for the device to catch up.
        device = self.mirror.device
        return torch.randn(ROWS, self._width, device=device).to(self._dtype)

    def backward(self, is_last: bool = True) -> None:
        """One micro-batch on both; a missing wait in the sharded model shows in what differs."""
        batch = self.batch()
        expected = self.replica.module(batch).square().mean()
        expected.backward()
        self.replica.collect(sends=is_last or self._sums_sharded, sums_sharded=self._sums_sharded)
        if is_last:
            self.replica.deliver(self._sums_sharded, self._num_parts)
        with nullcontext() if is_last else self.model.no_sync():
            loss = self.model(batch).square().mean()
            self.between()
            loss.backward()
            self.between()
        self.mirror.compare("losses", expected.detach(), loss.detach())
        if is_last and self._compares_grads:
            compare_delivered(self.mirror, self.model, self.replica.masters)

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
        self.replica.refresh()
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> None:
        batch = self.batch()
        self.mirror.compare("losses", self.replica.module(batch), self.model(batch))

    @torch.no_grad()
    def clip(self, max_norm: float) -> None:
        expected = self.replica.power().sqrt()
        norm = self.model.clip_grad_norm_(max_norm)
        # As assert_norm bounds it: a kernel's thread adds up 32 squares, and a tree over threads,
        # blocks and tensors their sums, so an element goes through 100 additions at most.
        bound = ((100 / 2 + 4) / 2 + 4) * torch.finfo(norm.dtype).eps * norm
        is_close = (norm - expected.to(norm.device)).abs() <= bound
        self.mirror.compare("norms", torch.ones_like(is_close), is_close)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for master in self.replica.masters.values():
            assert master.grad is not None
            master.grad.mul_(factor.to(master.device))


def plain(pair: Pair) -> None:
    for _ in range(3):
        pair.backward()
        pair.step()


def accumulation(pair: Pair) -> None:
    for _ in range(2):
        pair.backward(is_last=False)
        pair.backward()
        pair.step()


def evaluation(pair: Pair) -> None:
    for _ in range(2):
        pair.backward()
        pair.step()
        pair.evaluate()


def clipping(pair: Pair) -> None:
    for _ in range(2):
        pair.backward()
        pair.clip(0.01)
        pair.step()


def recomputation(pair: Pair) -> None:
    for block in pair.model.module.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    plain(pair)


USES: dict[str, Callable[[Pair], None]] = {
    each.__name__: each for each in (plain, accumulation, evaluation, clipping, recomputation)
}


FEW = ["default", "bfloat16", "layered: zero1", "layered: replicate, bfloat16"]
FEW_CASES = [(setting, "plain") for setting in FEW]
PLAIN_CASES = [(setting, "plain") for setting in SETTINGS]
USE_CASES = [(setting, use) for setting in ("default", "layered: zero1") for use in USES]
EVERY_CASE = [(setting, use) for setting in SETTINGS for use in USES]
EDGES = [(0, 8), (7, 8), (0, 64), (31, 64), (63, 64)]
"""(rank, size), beside rank 3 of 8, which runs more cases."""


def worlds(most: Sequence[Sequence[str]]) -> list[tuple[int, int, Sequence[Sequence[str]]]]:
    """(rank, size, cases): `most` in the middle of a small world, a few wherever else."""
    return [(3, 8, most), *((rank, size, FEW_CASES) for rank, size in EDGES)]


def run(
    device_type: str,
    rank: int,
    size: int,
    cases: Sequence[Sequence[str]],
    sleep_cycles: int = 0,
    missing: str | None = None,
) -> dict[str, Any]:
    """Train each (setting, use) as one rank; returns what was counted, by "setting, use".

    Args:
        device_type: "cuda" or "cpu".
        sleep_cycles: longest sleep of a stream, in cycles of the GPU's clock.
        missing: a defect of missing_waits that takes a wait away from the engine.
    """
    if dist.is_initialized():  # The ranks of run_ranks have a default group already.
        dist.destroy_process_group()
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    found: dict[str, Any] = {}
    for number, (setting, use) in enumerate(cases):
        mutation = missing_waits.defect(missing) if missing is not None else nullcontext()
        mirror = Mirror(device, sleep_cycles, seed=number)
        with fake_world(rank, size), mirror.installed(), mutation:
            torch.manual_seed(1)
            pair = Pair(mirror, SETTINGS[setting])
            USES[use](pair)
            found[f"{setting}, {use}"] = {"wrong": mirror.wrong(), **mirror.counts}
    return found


def run_worlds(
    device_type: str, worlds: Sequence[tuple[int, int, Sequence[Sequence[str]]]], *args: Any
) -> dict[str, Any]:
    """`run` for each (rank, size, cases), one after the other."""
    found: dict[str, Any] = {}
    for rank, size, cases in worlds:
        counted = run(device_type, rank, size, cases, *args)
        found |= {f"rank {rank} of {size}: {case}": each for case, each in counted.items()}
    return found


def total_wrong(found: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The cases in which anything differed."""
    return {case: each["wrong"] for case, each in found.items() if any(each["wrong"].values())}


def assert_all_ran(found: dict[str, Any], num_cases: int) -> None:
    """Every case is there, and has sent something."""
    assert len(found) == num_cases
    for case, counted in found.items():
        assert counted["gathers"] and counted["reductions"], case
