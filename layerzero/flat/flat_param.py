"""FlatParam: the buffers behind one flat parameter: main shard, compute shard, full buffer.

`ParameterViews` switches what modules show: sharded or unsharded parameters.

    main shard      the optimizer updates it; original dtype
    compute shard   this rank's input to an all-gather; compute dtype
    full buffer     modules compute with it

Between steps only the main shard has memory. Where the compute shard is depends on what lies
between it and the main shard:

    nothing         it is the main shard itself
    a cast          it is this rank's place in the full buffer, into which each gather first casts
                    the main shard; the gather is in place
    an outer axis   memory of its own, written by the first gather of a step and freed when its
    or offloading   backward ends (placement.py)

Note [Views outlive storage]
    The unsharded parameters are leaves of autograd, made once, as views of one flat tensor whose
    storage is resized between zero bytes and its full size (decision 0001). Each has a version
    counter of its own: writing the gathered values does not look like an in-place change of a
    tensor that autograd saved. Where they are others than before, `note_gathered` makes it look so:
    a graph made with the former ones, going backward, gets torch's own error.

Note [One rank is whole]
    In a shard group of one rank the full buffer is the compute shard. It is freed when a step ends,
    not after each use; it is cast, or gathered over the outer group, once a step. Where it is not,
    it is the main shard itself, and changes as soon as an optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import nn

from layerzero.flat.buffer import Buffer, BufferEvents
from layerzero.flat.flatten import OriginalParameter, Slot, build, fill_shard, make_sharded, sizes
from layerzero.flat.gradient_sums import GradientSums
from layerzero.flat.host_memory import HostMemory
from layerzero.flat.layout import FlatLayout
from layerzero.flat.parameter_info import change_info, copy_attributes, info_of, set_sharded_param
from layerzero.flat.placement import Placement
from layerzero.flat.tensor_parallel import TensorParallelSplit, split_of

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
address_of, numel_of = torch.Tensor.data_ptr, torch.Tensor.numel
offset_of = torch.Tensor.storage_offset


class FlatParam:
    """The buffers behind one flat parameter, their layout and the views into them.

    Uses no streams or collectives: `FlatParamHandle` (step/handle.py) unshards and reshards it.
    """

    fqns: list[str]
    """Names of the original parameters, in order."""
    splits: tuple[TensorParallelSplit | None, ...]
    """How each parameter is split over tensor-parallel ranks; None if it is not a DTensor."""
    shapes: tuple[torch.Size, ...]
    """Shapes of the parameters in the full buffer: the original ones; of DTensors, the local."""
    layout: FlatLayout
    placement: Placement
    main_shard: torch.Tensor
    """[shard_numel] in the original dtype; the sharded parameters are views of it."""
    params_on: HostMemory | None
    """Host memory that holds the main shard; None: it is on the device."""
    sharded_params: list[nn.Parameter]
    """One sharded parameter per original one; the user and the optimizer see these. 1-D; with
    `row_multiple` [rows, *shape[1:]], unless the original has fewer than two dimensions."""
    row_multiple: int | None
    """Borders between shards lie at multiples of this number of rows; None: at any element."""
    unsharded_params: list[nn.Parameter]
    """One unsharded parameter per original one; see Note [Views outlive storage]."""
    is_whole: bool
    is_main_memory: bool
    """Whether the full buffer is the compute shard; the main shard: Note [One rank is whole]."""
    full_nbytes: int
    """Bytes that a gather allocates for the full buffer; 0 where it is the compute shard."""
    gathered: torch.Tensor
    """The full buffer, with the version counter of collectives: gloo's thread increments it."""
    events: BufferEvents
    buffer: Buffer
    """Allocates and frees the full buffer."""
    compute_buffer: Buffer
    """The same of the compute shard, with `has_compute_shard`."""
    has_compute_shard: bool
    """Whether the compute shard is memory of its own, which stays for a step."""
    casts_in_place: bool
    """Whether the compute shard is this rank's place in the full buffer."""
    left_versions: list[int]
    """Versions of the unsharded parameters as far as the engine has written them."""
    compute_shard: torch.Tensor
    """[compute_numel] in the compute dtype; with `has_compute_shard`, valid unless `is_stale`."""
    post_forward_shard: torch.Tensor | None = None
    """[padded numel / size of the placement's `post_forward_group`] in the compute dtype: this
    rank's part of the full buffer, kept in forward so that backward gathers over that group."""
    gradients: GradientSums
    counted: list[torch.Tensor]
    """The main shard and the sharded parameters, each with a version counter of its own."""
    noted_versions: list[int]
    """`versions` when the event was recorded for which gathers wait (`weights_written`)."""
    was_assigned = False
    """Whether `.data` of a sharded parameter was ever assigned."""
    num_rewrites = 0
    """Writes of the engine into the main shard that `versions` do not count."""
    _is_gathered = False
    """Whether what was gathered last is still to be used, unless `versions` have changed."""

    def __init__(
        self,
        originals: Sequence[OriginalParameter],
        placement: Placement,
        device: torch.device,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        params_on: HostMemory | None = None,
        grads_on: HostMemory | None = None,
        row_multiple: int | None = None,
    ) -> None:
        """Copy this rank's part of `originals`, all of one dtype, to `device`. Not collective.

        Args:
            params_on: host memory for the main shard, and so for its gradients and the optimizer's
                state; None: they are on `device`.
            grads_on: host memory in which gradients of micro-batches add up; None: on `device`.
        """
        values = [original.value for original in originals]
        dtype = values[0].dtype
        self.fqns = [original.fqn for original in originals]
        self.splits = tuple(split_of(original.parameter) for original in originals)
        self.shapes = tuple(value.shape for value in values)
        self.placement = placement
        self.row_multiple = row_multiple
        itemsize = min(dtype.itemsize, compute_dtype.itemsize)
        self.layout = build(*sizes(self.shapes, placement, device, itemsize, row_multiple))
        self.params_on = params_on
        self.events = BufferEvents()
        if params_on is None:
            self.main_shard = torch.empty(self.layout.shard_numel, dtype=dtype, device=device)
        else:
            self.main_shard = params_on.lasting(self.layout.shard_numel, dtype)
        self._shard_ranges = self.layout.shard_ranges(placement.main_shard_index)
        fill_shard(self.main_shard, values, self._shard_ranges)
        self.sharded_params = [
            make_sharded(
                original,
                self.part_of(self.main_shard, index),
                self._shard_ranges[index],
                self.splits[index],
                self.layout,
            )
            for index, original in enumerate(originals)
        ]
        self.counted = [self.main_shard, *self.sharded_params]
        self.noted_versions = self._gathered_versions = self.versions
        self.expect()
        self.is_whole = placement.shard_group.size == 1
        is_cast = compute_dtype != dtype
        is_far = not placement.owns_compute_shard or params_on is not None
        self.has_compute_shard = is_far or (is_cast and self.is_whole)
        self.casts_in_place = is_cast and not self.has_compute_shard
        self._make_full(originals, compute_dtype, device)
        self.make_compute_shard()
        if self.has_compute_shard:
            self.free_compute_shard()
        self.free_full()
        self.gradients = GradientSums(
            self.layout,
            self.shapes,
            placement,
            compute_dtype,
            reduce_dtype,
            device,
            self.sharded_params,
            self.events,
            grads_on,
        )

    def part_of(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """View of this rank's part of parameter `index` in a tensor laid out like its main shard,
        with the shape of the sharded parameter."""
        _, start, stop, offset = self._shard_ranges[index]
        part, shape = shard[offset : offset + stop - start], self.shapes[index]
        if self.row_multiple is None or len(shape) < 2:
            return part
        row = shape[1:].numel()
        return part.view(part.numel() // row if row else 0, *shape[1:])

    def _make_full(
        self,
        originals: Sequence[OriginalParameter],
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.is_main_memory = self.is_whole and not self.has_compute_shard
        if self.is_main_memory:
            self.full = self.main_shard.data
        else:
            # Freed once its views are made: `empty` does not touch the memory.
            self.full = torch.empty(self.layout.padded_numel, dtype=compute_dtype, device=device)
        self.full_nbytes = 0 if self.is_whole else self.full.nbytes
        self.gathered = self.full.data
        self.buffer = Buffer(self.full, self.events)
        self.unsharded_params = []
        for index, original in enumerate(originals):
            unsharded = nn.Parameter(
                self.view_of(self.full.data, index),
                requires_grad=original.parameter.requires_grad,
            )
            copy_attributes(original.parameter, unsharded)
            set_sharded_param(unsharded, self.sharded_params[index])
            self.unsharded_params.append(unsharded)
        self.left_versions = [*map(version_of, self.unsharded_params)]

    def view_of(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """View of parameter `index` in a buffer laid out like `full`; for a DTensor, a DTensor."""
        start = self.layout.starts[index]
        view = flat[start : start + self.layout.numels[index]].view(self.shapes[index])
        split = self.splits[index]
        return view if split is None else split.wrap(view)

    def make_compute_shard(self) -> None:
        """Have the compute shard lie in the main shard or the full buffer, or apart from both."""
        placement, numel = self.placement, self.compute_numel
        if self.is_whole:
            self.compute_shard = self.full.data
        elif self.has_compute_shard:
            self.compute_shard = torch.empty(numel, dtype=self.full.dtype, device=self.full.device)
        elif self.casts_in_place:
            self.compute_shard = self.full.data[placement.shard_group.rank * numel :][:numel]
        else:
            self.compute_shard = self.main_shard
        if self.has_compute_shard:
            self.compute_buffer = Buffer(self.compute_shard, self.events)
        own = self.layout.shard_numel
        place = placement.main_shard_index * own % max(numel, 1)
        self.compute_slice = self.compute_shard[place : place + own]

    @property
    def compute_numel(self) -> int:
        return self.layout.padded_numel // self.placement.shard_group.size

    def allocate_full(self) -> None:
        self.buffer.allocate()

    def free_full(self) -> None:
        if not self.is_whole and not self.buffer.free():
            self._leave_storage()
            self.buffer.free()

    def _leave_storage(self) -> None:
        """`numpy()` of an unsharded parameter has fixed the size of the storage: leave it to what
        reads it, the graph among them, and take another."""
        self.move_full(torch.empty_like(self.full))
        if self.is_whole or self.casts_in_place:
            self.make_compute_shard()

    def move_full(self, memory: torch.Tensor) -> None:
        """Have the full buffer and its views, which stay the same objects, lie in `memory`."""
        self.full.data = memory
        self.gathered = self.full.data
        self.buffer.follow()
        for index, unsharded in enumerate(self.unsharded_params):
            unsharded.data = self.view_of(self.full.data, index)

    def allocate_compute_shard(self) -> None:
        """Allocate it for a step, if it is not; for `has_compute_shard`."""
        if not self.compute_buffer.storage.nbytes():
            self.compute_buffer.allocate()

    def free_compute_shard(self) -> None:
        """Free it, because the optimizer is about to make it stale; for `has_compute_shard`."""
        if not self.compute_buffer.free():
            self._leave_storage()
            self.compute_buffer.free()
        self._is_gathered = False

    @property
    def versions(self) -> list[int]:
        """torch's counts of writes into the main shard, and into each sharded parameter.

        They do not count writes through `.data`; see `mark_stale`.
        """
        return [*map(version_of, self.counted)]

    @property
    def is_stale(self) -> bool:
        """Whether the main shard was written since it was gathered."""
        return not self._is_gathered or self._gathered_versions != [*map(version_of, self.counted)]

    def note_gathered(self, now: list[int]) -> None:
        """The main shard is being gathered, at these `versions`: it counts as a write into the
        unsharded parameters whose sharded ones were written since it was the last time."""
        before, self._gathered_versions = self._gathered_versions, now
        self._is_gathered = True
        triples = zip(self.unsharded_params, before[1:], now[1:], strict=True)
        are_all = now[0] != before[0]
        written = [unsharded for unsharded, old, new in triples if are_all or old != new]
        torch.autograd.graph.increment_version(written)
        self.left_versions = [*map(version_of, self.unsharded_params)]

    def mark_stale(self) -> None:
        """Let the next gather read the main shard: writes through `.data` change no version."""
        self.post_forward_shard = None
        if self.has_compute_shard:
            self._is_gathered = False

    def note_rewrite(self, by_assignment: bool = False) -> None:
        """The engine writes the main shard through `.data`, perhaps because the program did."""
        self.post_forward_shard = None
        self._is_gathered = False
        self.num_rewrites += 1
        self.was_assigned = self.was_assigned or by_assignment

    def drop_post_forward_shard(self) -> None:
        self.post_forward_shard = None

    def share_placement(self, placements: dict[Placement, Placement]) -> None:
        """Have one object for equal placements."""
        self.placement = placements.setdefault(self.placement, self.placement)

    def expect(self) -> None:
        """Note where the sharded parameters are; see `FlatParamHandle.reset_sharded_params`."""
        self.numels = [*map(numel_of, self.sharded_params)]
        self.placed = [each for each in self.sharded_params if each.numel()]
        self.empty = [each for each in self.sharded_params if not each.numel()]
        self.addresses = [*map(address_of, self.placed)]
        # Without elements a tensor has no address, but an offset, here one that no other has: all
        # ranks notice an assignment, those without elements of the parameter, too.
        self.mark = self.num_rewrites + 1
        for each in self.empty:
            each.data = each.data.as_strided(each.shape, each.stride(), self.mark)

    def rename(self, prefix: str) -> None:
        """Put `prefix` before every name, because the model became part of another."""
        self.fqns = [f"{prefix}.{fqn}" for fqn in self.fqns]
        for fqn, parameter in zip(self.fqns, self.sharded_params, strict=True):
            change_info(parameter, fqn=fqn)

    def keep_shard(self) -> None:
        """Copy this rank's part of the gathered full buffer into `post_forward_shard`."""
        group = self.placement.post_forward_group
        if group is not None and self.post_forward_shard is None:
            numel = self.layout.padded_numel // group.size
            self.post_forward_shard = self.full.data[group.rank * numel :][:numel].clone()

    def write_compute_slice(self) -> None:
        """Cast this rank's main shard into its slice of the compute shard.

        Runs on the current stream; does not block the host unless offloaded memory is not pinned.
        """
        source = self.main_shard
        if self.params_on is not None and source.dtype != self.full.dtype:
            # Uploaded first: torch would cast on the host.
            source = torch.empty_like(source, device=self.full.device)
            source.copy_(self.main_shard, non_blocking=True)
        self.compute_slice.copy_(source, non_blocking=True)


_Entry = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]
"""A slot, its sharded and its unsharded parameter. Not named: such a tuple unpacks slowly."""


class ParameterViews:
    """Swaps the parameters in the slots of one unit: one dict write per slot, no allocation."""

    shows_stand_ins = False
    """Whether slots show other parameters than sharded and unsharded ones, on purpose; state dicts
    then return these as they are."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def add(self, slots: Iterable[Slot], sharded: nn.Parameter, full: nn.Parameter) -> None:
        for module, name in slots:
            self._entries.append((module._parameters, name, sharded, full))

    def swap(self, to_full: bool) -> list[str]:
        """Show the unsharded parameters instead of the sharded ones, or these again.

        Returns:
            FQNs of parameters whose slot held another parameter, which is now dropped.
        """
        replaced = []
        for parameters, name, sharded, full in self._entries:
            if parameters.get(name) is not (sharded if to_full else full):
                replaced.append(info_of(sharded).fqn)
            parameters[name] = full if to_full else sharded
        return replaced

    def show(self, shown: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Show other parameters, given by a map from sharded ones; else the sharded ones."""
        for parameters, name, sharded, _ in self._entries:
            parameters[name] = shown.get(sharded, sharded)

    def inside(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Names of the slots in a module itself, with the sharded parameter of each."""
        return [(n, own) for slots, n, own, _ in self._entries if slots is module._parameters]

    def shown_for(self, sharded: nn.Parameter) -> list[nn.Parameter | None]:
        """Parameter that each slot of `sharded` shows now; None if it was removed."""
        return [slots.get(name) for slots, name, each, _ in self._entries if each is sharded]
