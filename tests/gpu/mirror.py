"""One process trains as any rank of any world, and every byte it gets or sends is checked.

All ranks of the world see the same batch, so a plain replica, trained beside the sharded model,
knows what each rank holds. The world is torch's fake group. Where the engine issues a collective,
the mirror writes what the other ranks would send into one source tensor and passes it to a real
group of one rank: NCCL on a GPU (its stream, its works, its copies), gloo on the CPU. The call goes
through the engine's own functions, with the engine's own options.

Note [What makes a missing wait visible]
    Before the real collective runs, its output is filled with NaN and the stream sleeps for a
    random time, on the stream that the collective is queued on. Units sleep before their forward
    and backward, too. So whoever reads before the collective is done, or writes before everybody
    has read, ends with NaN where the replica has a number. Expected values lie in memory that is
    allocated beforehand, NaN as well, and written once, on the compute stream, at the time at which
    the replica has them: a stream that does not wait for compute finds NaN there. No check and no
    expected value waits for another stream, so none adds the order whose absence it is to find.

Note [Bits]
    Sizes of groups are powers of two, so sums of equal addends and their means are exact. The
    replica's parameters lie at the same offsets as in the full buffer: a matrix product may choose
    its algorithm by the alignment of its operands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllToAllOptions
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.gpu.link import Link
from tests.harness.internals import (
    ShardGroup,
    collectives,
    exchanges,
    get_info,
    groups,
    inner_units,
    ordered_sums,
    pending,
)

_ALL_TO_ALL = "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else ""


@functools.cache
def one_rank_group(device: torch.device) -> dist.ProcessGroup:
    """A real group of this process alone, outside the default group: NCCL, or gloo on the CPU.

    One for each device: a communicator takes longer to make than a model to train.
    """
    timeout = timedelta(seconds=60)
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend: Any
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(store, 0, 1, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        backend = dist.ProcessGroupGloo(store, 0, 1, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
    backend._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    if device.type != "cpu":  # The engine's small exchanges are the host's.
        on_host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), 0, 1, timeout)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, on_host)
    group._set_group_name("mirror")
    group._set_group_desc("one rank")
    return group


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """A default group in which this process is `rank` of `size`, and nobody else exists."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Wires:
    """Carries the engine's collectives over one rank's real group; subclasses say what arrives."""

    def __init__(
        self, device: torch.device, sleep_cycles: int = 0, seed: int = 0, link: Link | None = None
    ) -> None:
        """`link`: how long bytes take; None: as long as a copy within the device."""
        self.device = device
        self.link = link
        self.link_s = 0.0
        self.counts = {"gathers": 0, "reductions": 0}
        self._on_gpu = device.type == "cuda"
        self._sleep_cycles = sleep_cycles if self._on_gpu else 0
        self._random = random.Random(seed)
        self._real = one_rank_group(device)
        self._ones: dict[dist.ProcessGroup, ShardGroup] = {}
        self._operation: pending.Operation | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces the collectives of every model; wrap models inside, too."""
        start, describe = pending.start, groups.describe_group

        def noting(operation: pending.Operation, *args: Any) -> pending.Pending:
            self._operation = operation
            return start(operation, *args)

        def as_on_a_device(*args: Any) -> ShardGroup:
            # The engine takes the branches, and names the options, that it does for NCCL.
            group = describe(*args)
            return dataclasses.replace(group, backend="nccl") if self._on_gpu else group

        self._issue = collectives._issue_all_gather, collectives._issue_reduce_scatter
        with (
            mock.patch.object(collectives, "start", noting),
            mock.patch.object(exchanges, "start", noting),
            mock.patch.object(ordered_sums, "start", noting),
            mock.patch.object(collectives, "_issue_all_gather", self.all_gather),
            mock.patch.object(collectives, "_issue_reduce_scatter", self.reduce_scatter),
            mock.patch.object(dist, "all_to_all_single", self.all_to_all),
            mock.patch.object(groups, "describe_group", as_on_a_device),
        ):
            yield

    def sleep(self) -> None:
        """Keep the current stream busy for a random time."""
        if self._sleep_cycles:
            with torch.cuda.device(self.device):  # Its current stream stays the current one.
                torch.cuda._sleep(self._random.randrange(self._sleep_cycles))

    def all_gather(self, full: Tensor, shard: Tensor, group: ShardGroup) -> Any:
        self.counts["gathers"] += 1
        source = self.arriving(full, shard, group)
        self._before(full)
        source = self.over_link(full, source, full.nbytes, group.ranks, group.rank)
        return self._issue[0](full, source, self._one(group))

    def over_link(
        self, to: Tensor, source: Tensor, nbytes: int, ranks: Sequence[int], own: int
    ) -> Tensor:
        """Move `source` if there is a link; returns what the real collective then has to send.

        Its own source and target are one then: NCCL does all its work on the host, and no copy.
        """
        if self.link is None or to.device.type != self.device.type:
            return source
        seconds = self.link.seconds(nbytes, ranks, own)
        self.link_s += seconds
        self.link.carry(to, source, seconds)
        return to

    def reduce_scatter(self, summed: Tensor, chunks: Tensor, op: Any, group: ShardGroup) -> Any:
        self.counts["reductions"] += 1
        self.leaving(chunks, group)
        own = chunks.view(group.size, -1)[group.rank]
        if op == dist.ReduceOp.SUM:
            own = own * group.size
        self._before(summed)
        own = self.over_link(summed, own, chunks.nbytes, group.ranks, group.rank)
        # Over one rank the average is the sum. gloo has no average, and NCCL's is a kernel.
        has_average = self._on_gpu and self.link is None
        one_op = op if has_average else dist.ReduceOp.SUM
        return self._issue[1](summed, own, one_op, self._one(group))

    def all_to_all(self, output: Tensor, input: Tensor, *_: Any, **kwargs: Any) -> Any:
        self.counts["reductions"] += 1
        group = kwargs["group"]
        self.leaving(input, None)
        rows = input.view(group.size(), -1)
        own = rows[group.rank()].repeat(len(rows))
        self._before(output)
        options = AllToAllOptions()
        options.asyncOp = bool(kwargs.get("async_op"))
        return getattr(self._real, _ALL_TO_ALL or "alltoall_base")(output, own, [], [], options)

    def arriving(self, full: Tensor, shard: Tensor, group: ShardGroup) -> Tensor:
        """[full.numel()] what a gather brings; by default every rank sends what this one does."""
        # Not expanded: of one element that would be a view, which NCCL refuses.
        return shard.reshape(-1).repeat(group.size)

    def leaving(self, chunks: Tensor, group: ShardGroup | None) -> None:
        """Look at what is about to be reduced."""

    def _before(self, output: Tensor) -> None:
        """What happens on the stream before the real collective is queued."""

    def _one(self, group: ShardGroup) -> ShardGroup:
        # Made once: the engine would be charged for it where the host's time is measured.
        one = self._ones.get(group.process_group)
        if one is None:
            one = dataclasses.replace(group, process_group=self._real, rank=0, ranks=(0,))
            self._ones[group.process_group] = one
        return one


class Mirror(Wires):
    """The wires between a model and its replica: shards and gradients are compared on the way."""

    def __init__(self, device: torch.device, sleep_cycles: int = 0, seed: int = 0) -> None:
        super().__init__(device, sleep_cycles, seed)
        self._counters: dict[tuple[str, int], Tensor] = {}
        self._handles: list[Any] = []
        self._rest_of_norm: Tensor | None = None

    def follow(self, model: nn.Module, replica: Replica) -> None:
        """Check the collectives of `model` from now on."""
        self._replica = replica
        of_units = [(unit.label, handle) for unit in inner_units(model) for handle in unit.handles]
        self._unit_of = {id(handle): label for label, handle in of_units}
        self._handles = [handle for _, handle in of_units]

    def arriving(self, full: Tensor, shard: Tensor, group: ShardGroup) -> Tensor:
        verb = "" if self._operation is None else self._operation.verb
        handle = self._owner_of(full, lambda each: each.full)
        source: Tensor
        if handle is not None and full.numel() == handle.full.numel():
            source = self._replica.weights[id(handle)]
        elif (handle := self._owner_of(full, lambda each: each.compute_shard)) is not None:
            source = _part(self._replica.weights[id(handle)], handle)
        elif verb == "outer all-gather":
            handle = self._of_this_unit(full.numel())
            source = _part(self._replica.sums[id(handle)].to(full.dtype), handle)
        elif verb == "gradient norm":
            return self._norms(shard, group)
        else:
            return super().arriving(full, shard, group)
        self.compare("shards", source.view(group.size, -1)[group.rank], shard.reshape(-1))
        return source

    def leaving(self, chunks: Tensor, group: ShardGroup | None) -> None:
        handle = self._owner_of(chunks, lambda each: each.gradients.buffer)
        if handle is not None:
            self.compare("gradients", self._replica.sent[id(handle)], chunks)

    def _norms(self, shard: Tensor, group: ShardGroup) -> Tensor:
        """The other ranks' shares of a power; all of it comes from one of them."""
        rows = torch.zeros(group.size, shard.numel(), dtype=shard.dtype, device=shard.device)
        rows[group.rank] = shard.reshape(-1)
        if shard.numel() == 1:  # The first of several groups.
            rows[(group.rank + 1) % group.size] = self._replica.power() - shard.reshape(-1)
        return rows.view(-1)

    def _before(self, output: Tensor) -> None:
        if output.is_floating_point():
            output.fill_(torch.nan)
        self.sleep()

    def _owner_of(self, tensor: Tensor, buffer_of: Any) -> Any:
        pointer = tensor.untyped_storage()._cdata
        return next(
            (h for h in self._handles if buffer_of(h).untyped_storage()._cdata == pointer), None
        )

    def _of_this_unit(self, numel: int) -> Any:
        assert self._operation is not None
        found = [
            handle
            for handle in self._handles
            if self._unit_of[id(handle)] == self._operation.unit
            and handle.layout.padded_numel // handle.placement.shard_group.size == numel
        ]
        assert len(found) == 1, f"{self._operation}: {len(found)} flat parameters of {numel}"
        return found[0]

    def compare(self, what: str, expected: Tensor, got: Tensor) -> None:
        """Count elements that differ (NaN does), on the current stream, without waiting."""
        assert expected.shape == got.shape and expected.dtype == got.dtype, (
            f"{what}: expected {expected.dtype} {[*expected.shape]}, got {got.dtype} {[*got.shape]}"
        )
        # One counter for each stream: adding from two streams would itself be a race.
        stream = torch.cuda.current_stream(self.device).stream_id if self._on_gpu else -1
        key = (what, stream)
        if key not in self._counters:
            self._counters[key] = torch.zeros((), dtype=torch.int64, device=got.device)
        self._counters[key].add_((expected != got).sum())

    def wrong(self) -> dict[str, int]:
        """Elements that differed so far, by kind. Blocks the host."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
        found = dict.fromkeys(("shards", "gradients", "losses", "delivered", "norms"), 0)
        for (what, _), counter in self._counters.items():
            found[what] += int(counter)
        return found


def _part(flat: Tensor, handle: Any) -> Tensor:
    """This rank's compute shard of a flat buffer."""
    group = handle.placement.shard_group
    return flat.view(group.size, -1)[group.rank]


class Replica:
    """The unsharded model on one process, its main parameters, and what every rank holds of them.

    See Note [Bits] and Note [What makes a missing wait visible].
    """

    weights: dict[int, Tensor]
    """[padded numel] in the compute dtype, by id of the flat parameter: now."""
    sent: dict[int, Tensor]
    """[numel of the gradient layout] in the reduce dtype: each rank's input to the reduction."""
    sums: dict[int, Tensor]
    """The same, as the mean over ranks that is delivered."""

    def __init__(self, module: nn.Module, model: nn.Module, num_spare: int) -> None:
        """
        Args:
            module: a copy of the model's module before it was wrapped; cast to the compute dtype.
            model: the sharded model; its first forward has not run.
            num_spare: snapshots to allocate: optimizer steps, and backward passes, at most.
        """
        self.module = module
        self._handles = [handle for unit in inner_units(model) for handle in unit.handles]
        first = self._handles[0]
        masters_on = first.main_shard.device
        self.masters = {
            name: nn.Parameter(parameter.detach().to(masters_on, copy=True))
            for name, parameter in module.named_parameters()
        }
        module.to(first.full.dtype)
        self._spare_weights = [self._blank(lambda h: h.full) for _ in range(num_spare)]
        self._spare_sent = [self._blank(lambda h: h.gradients.buffer) for _ in range(num_spare)]
        self._summed: dict[str, Tensor] = {}
        self.sent, self.sums = {}, {}
        if first.full.device.type == "cuda":
            torch.cuda.synchronize(first.full.device)
        self.refresh()

    def _blank(self, like: Any) -> dict[int, Tensor]:
        return {
            id(h): torch.full(
                (like(h).numel(),), torch.nan, dtype=like(h).dtype, device=like(h).device
            )
            for h in self._handles
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Show the main parameters' present values as the next weights."""
        self.weights = self._spare_weights.pop()
        parameters = dict(self.module.named_parameters())
        for h in self._handles:
            flat = self.weights[id(h)].zero_()
            for index, name in enumerate(h.fqns):
                start, numel = h.layout.starts[index], h.layout.numels[index]
                view = flat[start : start + numel].view(h.shapes[index])
                view.copy_(self.masters[name])
                parameters[name].data = view

    @torch.no_grad()
    def collect(self, sends: bool, sums_sharded: bool) -> None:
        """Take the gradients of a micro-batch.

        Args:
            sends: the engine reduces in this backward.
            sums_sharded: micro-batches add up after the first hop, in which each travels alone.
        """
        gradients = {}
        for name, parameter in self.module.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = parameter.grad.to(
                torch.promote_types(parameter.grad.dtype, torch.float32)
            )
            parameter.grad = None
        if sums_sharded:
            self.sent = self._filled(self._spare_sent.pop(), gradients)
            dtype = self._handles[0].gradients.buffer.dtype
            gradients = {name: g.to(dtype).to(g.dtype) for name, g in gradients.items()}
        for name, gradient in gradients.items():
            earlier = self._summed.get(name)
            self._summed[name] = gradient if earlier is None else earlier + gradient
        if sends and not sums_sharded:
            self.sent = self._filled(self._spare_sent.pop(), self._summed)

    def _filled(self, blank: dict[int, Tensor], gradients: Mapping[str, Tensor]) -> Any:
        """Lay gradients out as the reduction's input."""
        for h in self._handles:
            flat = blank[id(h)].zero_()
            for fqn, start, numel in zip(h.fqns, h.layout.starts, h.layout.numels, strict=True):
                if fqn in gradients:
                    flat[start : start + numel].copy_(gradients[fqn].reshape(-1))
        return blank

    @torch.no_grad()
    def deliver(self, sums_sharded: bool, num_parts: int = 1) -> None:
        """The sum over micro-batches is complete: make it the main parameters' gradient.

        Args:
            num_parts: ranks whose parts the engine adds one after the other, which rounds; 1: the
                backend adds equal parts, which is exact.
        """
        self.sums = self._filled(self._spare_sent.pop(), self._summed)
        for h in self._handles:
            # Sums that add up after the only hop stay as wide as they are; all else travels.
            is_wide = sums_sharded and len(h.placement.reduce_groups) == 1
            for name in h.fqns:
                total, master = self._summed[name], self.masters[name]
                if not is_wide:
                    total = total.to(h.gradients.buffer.dtype)
                part = total.to(torch.promote_types(total.dtype, torch.float32))
                total = sum([part] * (num_parts - 1), start=part) * (1.0 / num_parts)
                master.grad = total.to(master.device, master.dtype)
        self._summed = {}

    def power(self) -> Tensor:
        """Sum of squares of all gradients, in float64."""
        norms = [
            torch.linalg.vector_norm(m.grad, dtype=torch.float64) for m in self.masters.values()
        ]
        return torch.stack(norms).square().sum()


def compare_delivered(
    mirror: Mirror, model: nn.Module, masters: Mapping[str, nn.Parameter]
) -> None:
    """Every element of every sharded `.grad` beside the replica's."""
    for parameter in model.parameters():
        info = get_info(parameter)
        assert info is not None, "every parameter is sharded"
        if parameter.numel():
            expected = masters[info.fqn].grad
            assert parameter.grad is not None and expected is not None, info.fqn
            mirror.compare("delivered", expected.reshape(-1)[slice(*info.range)], parameter.grad)
