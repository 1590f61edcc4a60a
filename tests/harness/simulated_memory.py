"""Memory of the simulated device: who accesses it, in which order, and whose pool it returns to.

Two accesses of the same memory, one of them a write, must be ordered by events. Memory belongs to
the stream it was allocated on. When it is freed it may be handed out again at once on that stream:
what is written there must come after every use that the old contents had on any stream. And it may
leave the pool altogether as soon as that stream is done: so the stream itself must come after every
use when the memory is freed.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

from tests.harness.simulated_streams import Stream

_NAMES = {
    "flat_param.__init__": "main shard",
    "flat_param._make_full": "full buffer",
    "flat_param.make_compute_shard": "compute shard",
    "flat_param.allocate_compute_shard": "compute shard",
    "flat_param.allocate_full": "full buffer",
    "flat_param.keep_shard": "shard kept for backward",
    "flat_param.write_compute_slice": "staged main shard",
    "gradient_sums.allocate_buffer": "gradient buffer",
    "gradients.collect": "gradient buffer",
    "gradient_sums.add_to_sum": "gradient buffer",
    "arena._add": "arena",
    "gradient_sums.add_host_sum_to": "staged sum",
    "gradient_sums.add_sharded": "sharded sum",
    "reduction._allocate_chunk": "reduced chunk",
    "reduction._add_up_on_host": "reduced chunk",
    "reduction._download": "reduced chunk",
    "reduction.hops": "sum between hops",
    "collectives.reduce_scatter": "sum of a hop",
    "ordered_sums._all_to_all": "received parts",
    "messages.exchange_in_place": "received parts",
    "full_tensors._gather": "streamed bucket",
    "presence._gather_flags": "gradient presence",
    "stepping._begin": "packed pieces",
    "presence.flags_tensor": "gradient presence",
}
"""Function of the engine that allocates -> what it allocates."""
_ENGINE = str(Path(__file__).resolve().parents[2] / "layerzero")
_PASSED_OVER = (
    f"{_ENGINE}/flat/buffer.py",
    f"{_ENGINE}/flat/host_memory.py",
    *(
        str(Path(__file__).with_name(name))
        for name in (
            *("simulated_memory.py", "simulated_device.py", "missing_waits.py", "recording.py"),
        )
    ),
    *(str(Path(torch.__file__).parent / name) for name in ("_ops.py", "_compile.py", "_dynamo")),
    str(Path(torch.__file__).parent / "utils/_python_dispatch.py"),
)


def allocated_by(fallback: str) -> str:
    """What memory allocated now is, by the function that allocates it; else of `fallback`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame = frame.f_back
    code = frame.f_code
    if not code.co_filename.startswith(_ENGINE):
        return f"result of {fallback}"
    name = place_of(code)
    return _NAMES.get(name, f"memory of {name}")


def place_of(code: CodeType) -> str:
    """A function of the engine by its file and name."""
    return f"{Path(code.co_filename).stem}.{code.co_name}"


class Use(NamedTuple):
    """Something that a stream did with memory."""

    what: str
    """Name of the operation, with the unit that the engine was at."""
    stream: str

    def __str__(self) -> str:
        return f"{self.what} on {self.stream}"


class Race(NamedTuple):
    """Two uses of the same memory in no order."""

    memory: str
    use: Use
    earlier: Use
    before_free: bool
    """Whether the earlier use was of memory that was freed since, and handed out again."""

    def __str__(self) -> str:
        since = ", in memory freed since" if self.before_free else ""
        return f"{self.memory}: {self.use} does not wait for what was used by {self.earlier}{since}"


class EarlyFree(NamedTuple):
    """Memory that was freed before the stream that owns it comes after all uses."""

    memory: str
    home: str
    earlier: Use

    def __str__(self) -> str:
        return f"{self.memory} of {self.home} is freed before that waits for {self.earlier}"


Span = tuple[int, int, int]
"""Of an access: stream, first byte, byte after the last."""


def _span(tensor: Tensor, stream: Stream, base: int) -> Span:
    width = tensor.element_size()
    begin = base + tensor.storage_offset() * width
    if tensor.is_contiguous():
        return stream.id, begin, begin + tensor.numel() * width
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in pairs)
    return stream.id, begin, begin + (reach + 1) * width


@dataclass
class Memory:
    """One storage since it was allocated."""

    name: str
    home: Stream
    """The stream it was allocated on, whose allocations may get its memory next."""
    alive: weakref.ref[torch.UntypedStorage]
    before: dict[int, tuple[int, Use]]
    """Stream -> (time, use): what came before any use of this, in memory that may be the same."""
    written: dict[Span, tuple[int, Use]] = field(default_factory=dict)
    read: dict[Span, tuple[int, Use]] = field(default_factory=dict)
    is_pinned: bool = True
    """Of the host's: whether copies to and from it need not block."""

    def uses(self) -> Iterator[tuple[int, int, Use]]:
        """(stream, time, use) of the last ones; not of what came before."""
        for uses in (self.written, self.read):
            for (stream, _, _), (time, use) in uses.items():
                yield stream, time, use


class MemoryWatch:
    """Every storage in use, and what is found about them."""

    def __init__(self, host: Stream) -> None:
        self.races: list[Race] = []
        self.early_frees: list[EarlyFree] = []
        self.freed: Counter[tuple[str, str]] = Counter()
        """(what, stream that owned it) -> how often such memory was freed."""
        self._host = host
        self._memories: dict[int, Memory] = {}
        self._arenas: list[tuple[int, int, int]] = []
        """(first address, address after the last, key) of memory that other storages show, too."""
        self._pools: dict[int, dict[int, tuple[int, Use]]] = {}
        """Stream -> the last uses of all memory that it owned and that was freed since. Replaced,
        not changed: memory that was handed out before holds the old one."""

    def find(self, tensor: Tensor) -> Memory | None:
        return self._at(tensor.untyped_storage())[0]

    def _at(self, storage: torch.UntypedStorage) -> tuple[Memory | None, int]:
        """The memory that a storage shows, and the place in it where the storage begins."""
        arena = self._arena_of(storage)
        if arena is None:
            return self._memories.get(storage._cdata), 0
        first, key = arena
        return self._memories[key], storage.data_ptr() - first

    def _arena_of(self, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        if not self._arenas or not storage.nbytes():
            return None
        address = storage.data_ptr()
        found = ((first, key) for first, after, key in self._arenas if first <= address < after)
        return next((each for each in found if each[1] in self._memories), None)

    def is_in_arena(self, storage: torch.UntypedStorage) -> bool:
        return self._arena_of(storage) is not None

    def is_on_host(self, tensor: Tensor) -> bool:
        memory = self.find(tensor)
        return memory is not None and memory.home is self._host

    def name(self, tensor: Tensor, name: str) -> None:
        """Call its memory so from now on."""
        memory = self.find(tensor)
        if memory is not None:
            memory.name = name

    def allocate(self, storage: torch.UntypedStorage, home: Stream, name: str) -> Memory:
        """Memory from the pool of a stream; the host's allocator waits before it gives any out."""
        key = storage._cdata
        gone = weakref.ref(storage, lambda _: self.free(key))
        before = {} if home is self._host else self._pools.get(home.id, {})
        memory = self._memories[key] = Memory(name, home, gone, before)
        if name == "arena":
            address = storage.data_ptr()
            self._arenas.append((address, address + storage.nbytes(), key))
        return memory

    def free(self, key: int) -> None:
        """The storage is gone, or resized."""
        memory = self._memories.pop(key, None)
        self._arenas = [each for each in self._arenas if each[2] != key]
        if memory is None or memory.home is self._host:
            return
        home = memory.home
        self.freed[memory.name, home.name] += 1
        pool = dict(self._pools.get(home.id, {}))
        for stream, time, use in memory.uses():
            if home.clock.get(stream, 0) < time:
                self.early_frees.append(EarlyFree(memory.name, home.name, use))
            if stream not in pool or pool[stream][0] < time:
                pool[stream] = time, use
        self._pools[home.id] = pool

    def resize(self, storage: torch.UntypedStorage, home: Stream) -> None:
        self.free(storage._cdata)
        if storage.nbytes():
            self.allocate(storage, home, allocated_by("resize_"))

    def throw_away(self, source: Tensor, unit: str) -> None:
        """What was read of `source` last for a unit goes unused: writes need not wait for that."""
        memory = self.find(source)
        if memory is not None:
            reads = [use for _, use in memory.read.values() if use.what.endswith(f"[{unit}]")]
            self.races[:] = (
                race
                for race in self.races
                if race.memory != memory.name or not any(race.earlier is use for use in reads)
            )

    def access(self, tensor: Tensor, stream: Stream, use: Use, home: Stream, writes: bool) -> None:
        """`home`: of memory that was not seen before."""
        storage = tensor.untyped_storage()
        if not storage.nbytes() or not tensor.numel():
            return
        memory, base = self._at(storage)
        if memory is None:
            memory = self.allocate(storage, home, allocated_by(use.what))
        span = own, begin, end = _span(tensor, stream, base)
        clock = stream.clock
        for other, (time, earlier) in memory.before.items():
            if clock.get(other, 0) < time:
                self.races.append(Race(memory.name, use, earlier, before_free=True))
        for uses in (memory.written, memory.read) if writes else (memory.written,):
            for (other, first, last), (time, earlier) in uses.items():
                if first < end and begin < last and clock.get(other, 0) < time:
                    self.races.append(Race(memory.name, use, earlier, before_free=False))
        (memory.written if writes else memory.read)[span] = clock[own], use
