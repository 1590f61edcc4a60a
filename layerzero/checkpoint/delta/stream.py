"""DeltaStream: yields what changed in this rank's part of a model since it was last sent.

    main shard --cast--> compare with the snapshot --> patch --next asked--> snapshot updated

Each rank compares its own shard and sends its own patches: nothing is gathered, and no rank waits
for another one.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from layerzero.checkpoint.delta import scan
from layerzero.checkpoint.delta.apply import crc_of
from layerzero.checkpoint.delta.patch import DeltaError, Link, Patch
from layerzero.checkpoint.delta.pieces import Piece, Source, sources_of
from layerzero.config import parse_nbytes
from layerzero.ops.reference import DTYPES, bits_of
from layerzero.state_dict.names import Names
from layerzero.state_dict.preconditions import root_states_of
from layerzero.step.handle import FlatParamHandle
from layerzero.step.unit import TrainingState

_BLOCK = 1 << 20
"""Elements handled at once where intermediate results take memory."""
_INDEX_NBYTES = 8
_numbers = itertools.count()
"""Numbers the streams of this process."""


class DeltaStream:
    """A model's weights as patches of changed elements, for inference engines and other receivers.

    Every rank of the model has one and sends its own patches (`layerzero.checkpoint.apply_delta`
    is the receiver). The snapshot is what receivers have: this rank's part of the model in `dtype`,
    as it was when the stream was made. So a receiver starts with those weights, or with `full()`
    of every rank, and takes all `changes()` from there on.

    Not collective. Ranks make their streams in the same order, since the n-th ones share a name.

    Attributes:
        name: the stream's name, the same on all ranks.
        sender: this rank's global rank, by which receivers tell chains of patches apart.
        round: number of rounds of `changes()` that were begun.
    """

    name: str
    sender: int
    round: int

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype = torch.bfloat16,
        *,
        buffers: bool = False,
        patch_bytes: int | str = "16MB",
    ) -> None:
        """Take a snapshot of this rank's part of the model.

        Args:
            model: a ZeRO3 module, between steps. The stream keeps it alive.
            dtype: to cast floating-point tensors to: float32, float16, bfloat16 or float64. Other
                tensors keep their dtype.
            buffers: send persistent buffers as well; the model's first rank does, with its values.
            patch_bytes: bound on the bytes of a patch's indices and values, an int or a string such
                as "512MB".

        Raises:
            ValueError: `model` is not wrapped, or a bad argument; DeltaError if `dtype` cannot hold
                a value.
            RuntimeError: the model is in backward, or inside `summon_full_params`.
        """
        if dtype not in DTYPES:
            raise ValueError(
                f"DeltaStream: dtype {dtype} cannot hold the values of floating-point weights "
                "without scales; expected float32, float16, bfloat16 or float64"
            )
        widest = _INDEX_NBYTES + torch.complex128.itemsize
        self._model = model
        self._dtype = dtype
        self._buffers = buffers
        self._patch_nbytes = parse_nbytes(patch_bytes, "patch_bytes", least=widest)
        self._chunks: list[Chunk] = []
        self._handles: list[FlatParamHandle] | None = None
        self._sends_whole = False
        self._anchor: tuple[str, ...] = ()
        self.round = 0
        self._refresh("DeltaStream")
        for chunk in self._chunks:
            chunk.take_snapshot()
        self.name = _agreed_name()
        self.sender = dist.get_rank() if dist.is_initialized() else 0
        self.round = 0  # `_refresh` has counted the first pieces
        self._chain = secrets.token_hex(6)
        self._yielded = 0  # number of the last patch
        self._counted = 0  # number of the last one that counts as sent
        self._pending: tuple[Chunk, torch.Tensor] | None = None
        """A chunk and places in it that do not count as sent: of the last patch, and behind it."""

    def changes(self) -> Iterator[Patch]:
        """Yield what receivers do not have yet of this rank's elements, as patches.

        An element is sent when the bits of its cast changed: a NaN once, and -0.0 after 0.0. Each
        element is in at most one patch of a round. A patch counts as sent when the next one is
        asked for; if a round stops early, the next round sends its last patch again, with the
        values of then. Weights should not change before the round is over, or else a later patch
        has newer values than an earlier one.

        Not collective. Blocks the host for the results of each comparison.

        Raises:
            RuntimeError: the model is in backward or inside `summon_full_params`, or another round
                began meanwhile.
            DeltaError: the stream's dtype cannot hold a value.
        """
        self._refresh("DeltaStream.changes")
        return self._changes()

    def full(self) -> Iterator[Patch]:
        """Yield all of this rank's elements, with the values of now, as patches in the same form.

        A new receiver applies those of every rank, in any order of the ranks, and then all further
        rounds. Receivers that are there already need none of them. Not collective.

        Raises: as `changes`.
        """
        self._refresh("DeltaStream.full")
        return self._full()

    @property
    def snapshot_nbytes(self) -> int:
        """Bytes of the snapshot."""
        return sum(chunk.snapshot.nbytes for chunk in self._chunks)

    def _changes(self) -> Iterator[Patch]:
        if self._pending is not None:
            # What an interrupted round left is sent again.
            chunk, places = self._pending
            chunk.forget(places)
            self._pending = None
        self.round += 1
        own = self.round
        for chunk in self._chunks:
            start = 0
            while start < chunk.numel:
                # The first patch of all says what receivers have before it: see `Patch.before`.
                is_first = self._counted == 0
                found = chunk.changed(start, self._room(chunk), settles=not is_first)
                for piece, begin, end in chunk.cut(found):
                    places, values = found.places[begin:end], found.values[begin:end]
                    self._pending = chunk, found.places[begin:]
                    known = chunk.known_bytes(places) if self._counted == 0 else None
                    before = None if known is None else crc_of(known)
                    self._yielded += 1
                    link = self._link(self._yielded, self._counted)
                    # Copies: a receiver may write into them, or keep them, and not the memory of
                    # all patches.
                    indices = piece.in_whole(places)
                    yield _make_patch(piece, indices, values.clone(), link, before)
                    if self.round != own:
                        raise RuntimeError(
                            "DeltaStream.changes: another round began, or the model was resharded, "
                            "before this one was over; take the patches of one round at a time"
                        )
                    self._counted = self._yielded
                    if not found.is_settled:
                        chunk.settle(places, values)
                self._pending = None
                start = found.stop

    def _full(self) -> Iterator[Patch]:
        position = self._yielded
        parts = [
            (chunk, piece, begin, min(begin + self._room(chunk), piece.offset + piece.numel))
            for chunk in self._chunks
            for piece in chunk.source.pieces
            for begin in range(piece.offset, piece.offset + piece.numel, self._room(chunk))
        ]
        for number, (chunk, piece, begin, end) in enumerate(parts):
            values = chunk.current(begin, end)
            places = torch.arange(begin, end, device=values.device)
            link = self._link(position, position)._replace(part=number, parts=len(parts))
            yield _make_patch(piece, piece.in_whole(places), values, link, None)

    def _room(self, chunk: Chunk) -> int:
        return self._patch_nbytes // (_INDEX_NBYTES + chunk.dtype.itemsize)

    def _link(self, number: int, after: int) -> Link:
        return Link(self.name, self._chain, self.sender, self._anchor, number, after)

    def _refresh(self, verb: str) -> None:
        """Check that the model is between steps, and find this rank's pieces.

        What was resharded begins as unknown to receivers, and is sent again.
        """
        roots = root_states_of(self._model, verb)
        units = [unit for root in roots for unit in root.units]
        if any(unit.training_state is TrainingState.SUMMON_FULL_PARAMS for unit in units):
            raise RuntimeError(
                f"{verb}: inside summon_full_params() the shards are not up to date; leave it first"
            )
        handles = [handle for unit in units for handle in unit.handles]
        if handles == self._handles and not self._sends_whole:
            return
        names = Names(self._model)
        # Those that are not sharded may be replaced at any time.
        self._handles, self._sends_whole = handles, self._buffers or any(names.unsharded())
        former = {(chunk.source.pieces, chunk.dtype): chunk for chunk in self._chunks}
        chunks = []
        for source in sources_of(self._model, roots[0], names, self._buffers):
            main = source.read()
            dtype = self._dtype if main.is_floating_point() else main.dtype
            chunk = former.get((source.pieces, dtype)) or Chunk(source, dtype)
            chunk.source = source
            chunks.append(chunk)
        if chunks != self._chunks:
            self._chunks = chunks
            self.round += 1
        if not self._anchor and chunks:
            self._anchor = chunks[0].source.pieces[0].names


def _make_patch(
    piece: Piece, indices: torch.Tensor, values: torch.Tensor, link: Link, before: int | None
) -> Patch:
    return Patch(piece.names[0], indices, values, piece.extent.shape, piece.names[1:], link, before)


def _agreed_name() -> str:
    """The same random name on all ranks whose n-th call this is. Not collective.

    The first rank that calls stores its name, and the others find it there. If the default group's
    store cannot do that, every rank has a name of its own.
    """
    number, own = next(_numbers), secrets.token_hex(6)
    if not dist.is_initialized():
        return own
    try:
        store = dist.distributed_c10d._get_default_store()
        return bytes(store.compare_set(f"layerzero/delta/{number}", "", own)).decode()
    except (RuntimeError, NotImplementedError):
        return own


class Found(NamedTuple):
    """Elements to send: their places in the chunk, and their values there."""

    places: torch.Tensor
    """[n] int64, rising."""
    values: torch.Tensor
    """[n] in the chunk's dtype."""
    stop: int
    """Everything before it, from where the search began, was compared."""
    is_settled: bool
    """Whether the snapshot has the values already."""


class Chunk:
    """One source and its snapshot.

    Note [Unknown to receivers]
        Where it is uncertain what a receiver has, an element must be sent again, whatever its value
        becomes. Floating-point snapshots then hold bits that equal no value (Note [One NaN]). The
        other dtypes have no such bits, and get a mask.
    """

    source: Source
    dtype: torch.dtype
    """Of the snapshot and of the values sent."""
    numel: int
    snapshot: torch.Tensor
    """[numel] in `dtype`, beside the source."""
    unknown: torch.Tensor | None
    """[numel] bool, beside the snapshot; None: not needed."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        """Make a snapshot of which everything is unknown; see Note [Unknown to receivers]."""
        main = source.read()
        self.source = source
        self.dtype = dtype
        self.numel = main.numel()
        self.snapshot = torch.empty(self.numel, dtype=self.dtype, device=main.device)
        self.unknown = None
        self.forget(slice(0, self.numel))

    def take_snapshot(self) -> None:
        """From now on receivers have the values of now."""
        main = self.source.read()
        for begin in range(0, self.numel, _BLOCK):
            block = slice(begin, begin + _BLOCK)
            self.snapshot[block] = self._cast(main, begin, min(begin + _BLOCK, self.numel))
        self.unknown = None

    def forget(self, places: torch.Tensor | slice) -> None:
        """Treat these elements as unknown to receivers."""
        if self.dtype.is_floating_point:
            bits_of(self.snapshot)[places] = scan.UNKNOWN
            return
        if self.unknown is None:
            self.unknown = torch.zeros(self.numel, dtype=torch.bool, device=self.snapshot.device)
        self.unknown[places] = True

    def settle(self, places: torch.Tensor, values: torch.Tensor) -> None:
        """From now on receivers have these values."""
        if self.snapshot.dtype == torch.complex128:
            self.snapshot[places] = values
        else:  # The fastest of torch's ways to write elements.
            bits_of(self.snapshot).scatter_(0, places, bits_of(values))
        if self.unknown is not None:
            self.unknown[places] = False

    def changed(self, start: int, room: int, settles: bool) -> Found:
        """At most `room` elements from `start` on that receivers do not have.

        Args:
            settles: treat what is found as sent, if that costs no further pass.

        Raises:
            DeltaError: a finite value is infinite in the stream's dtype.
        """
        main = self.source.read()
        room = max(1, min(room, self.numel - start))
        if self.unknown is not None:
            block = slice(start, start + room)
            new = scan.cast(main[block], self.dtype)
            is_sent = scan.differs(new, self.snapshot[block]) | self.unknown[block]
            places = is_sent.nonzero().view(-1)
            return Found(places + start, new[places], start + room, False)
        indices = torch.empty(room, dtype=torch.int64, device=main.device)
        values = torch.empty(room, dtype=self.dtype, device=main.device)
        count, end = scan.find_changed(main, self.snapshot, start, indices, values, settles)
        found = Found(indices[:count], values[:count], end, settles)
        try:
            self._check_finite(main, found.places, found.values)
        except DeltaError:
            self.forget(found.places)
            raise
        return found

    def current(self, begin: int, end: int) -> torch.Tensor:
        """The values now of elements [begin, end). Some receiver may get them: those that differ
        from the snapshot become unknown."""
        new = self._cast(self.source.read(), begin, end)
        found = scan.differs(new, self.snapshot[begin:end])
        self.forget(found.nonzero().view(-1) + begin)
        return new

    def known_bytes(self, places: torch.Tensor) -> torch.Tensor | None:
        """What receivers have at `places`: values; None where some of it is unknown."""
        values = self.snapshot[places]
        if self.dtype.is_floating_point:
            return None if (bits_of(values) == scan.UNKNOWN).any() else values
        return values if self.unknown is None else None

    def cut(self, found: Found) -> Iterator[tuple[Piece, int, int]]:
        """(piece, begin, end) of each piece that has elements [begin, end) of those found."""
        if not found.places.numel():
            return
        pieces = self.source.pieces
        ends = [end for p in pieces for end in (p.offset, p.offset + p.numel)]
        borders = torch.searchsorted(found.places, found.places.new_tensor(ends)).tolist()
        for number, piece in enumerate(pieces):
            begin, end = borders[2 * number], borders[2 * number + 1]
            if begin < end:
                yield piece, begin, end

    def _cast(self, main: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        new = scan.cast(main[begin:end], self.dtype)
        self._check_finite(main, None, new, begin)
        return new

    def _check_finite(
        self, main: torch.Tensor, places: torch.Tensor | None, values: torch.Tensor, begin: int = 0
    ) -> None:
        """Raise if the cast made a finite value infinite. `places` of `values`; None: from `begin`
        on."""
        if main.dtype == self.dtype or not self.dtype.is_floating_point or not values.numel():
            return
        if bits_of(values.abs()).amax() < scan.infinity_bits(self.dtype):
            return  # By far the fastest test, and true of almost all weights.
        infinite = values.isinf().nonzero().view(-1)
        if not infinite.numel():
            return
        infinite = infinite + begin if places is None else places[infinite]
        lost = infinite[main[infinite].double().isfinite()]
        if not lost.numel():
            return
        place = int(lost[0])
        pieces = self.source.pieces
        piece = next((p for p in pieces if 0 <= place - p.offset < p.numel), pieces[0])
        raise DeltaError(
            f"{piece.names[0]!r}: {self.dtype} cannot hold {main[place].item():.6g} (element "
            f"{int(piece.in_whole(lost[:1]))}); use a DeltaStream of another dtype"
        )
