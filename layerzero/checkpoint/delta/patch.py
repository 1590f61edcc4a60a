"""Patch: some elements of one tensor, and its place in the chain of its sender.

Note [A chain of patches]
    Every rank numbers the patches that it yields, 1, 2, 3, ..., and never uses a number twice. A
    patch also says after which number it comes: that of the last patch that counted as sent.

        number  1   2   3   4            5   6
        after   0   1   2   3   3 is     3   5       the round was interrupted at patch 4, which
                                sent                 may have arrived or not; 5 begins the repeat

    A receiver at position p takes a patch with after <= p < number, and moves to number. Otherwise
    a patch was lost (p < after), or comes again (p >= number). The patches of `full()` have parts
    instead, and the last one moves the receiver to the position of the sender.

Packed (docs/reference/delta_format.md), a patch has gaps between indices, which take fewer bytes:
at 2 % of changed elements a bfloat16 value and the gap before it take 4 bytes instead of 10.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from layerzero.errors import CheckpointError
from layerzero.state_dict.dtype_names import DTYPES, dtype_name

_START = struct.Struct("<II")
_WIDTHS = (1, 2, 4, 8)
_DTYPES = {**DTYPES, "C128": torch.complex128}
"""safetensors has no complex128."""


class DeltaError(CheckpointError, ValueError):
    """A patch does not fit the tensors, the dtype or the chain. The message names it and why."""


class Link(NamedTuple):
    """A patch's place in the chain of its sender; see Note [A chain of patches]."""

    stream: str
    """Name of the stream, the same on all ranks."""
    chain: str
    """Random name of the sender's `DeltaStream` object: another object begins another chain."""
    sender: int
    """Global rank of the sender."""
    anchor: tuple[str, ...]
    """Names of the tensor beside which receivers keep the sender's chain."""
    number: int
    """Of a patch of `full()`: that of the sender's last patch before it."""
    after: int
    part: int = 0
    """Number of this patch among those of one `full()`, from 0."""
    parts: int = 0
    """How many patches that `full()` has; 0: the patch is one of `changes()`."""

    @property
    def is_last(self) -> bool:
        """Whether nothing is missing behind it: a patch of `changes()`, or the last part."""
        return self.part + 1 >= self.parts

    @property
    def where(self) -> str:
        what = f"part {self.part + 1} of {self.parts} of full()" if self.parts else "patch"
        number = "" if self.parts else f" {self.number}"
        return f"{what}{number} of rank {self.sender}, stream {self.stream}"


@dataclass(frozen=True)
class Patch:
    """New values of some elements of one tensor. Can be pickled; `to_bytes` needs no pickle.

    Attributes:
        name: the tensor's name in the model, of a tied parameter the first one.
        indices: [n] int64, rising: positions in the flattened original tensor.
        values: [n] in the stream's dtype; in the tensor's own if that is not floating-point.
        shape: shape of the original tensor.
        aliases: the other names of a tied parameter.
        link: place in the chain of its sender.
        before: CRC-32 of the bytes that receivers have at `indices`, in the dtype of `values`;
            None: not computed. It is for a receiver that starts without `full()`.
    """

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    link: Link
    before: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The name, and then the aliases."""
        return (self.name, *self.aliases)

    @property
    def nbytes(self) -> int:
        """Bytes of `indices` and `values`."""
        return self.indices.nbytes + self.values.nbytes

    @property
    def where(self) -> str:
        """The patch, for messages."""
        return f"{self.name!r} ({self.link.where})"

    def to_bytes(self) -> bytes:
        """The patch for a file or a wire: JSON and raw numbers (docs/reference/delta_format.md)."""
        indices = self.indices.cpu().numpy()
        gaps = np.diff(indices)
        width = 0
        if len(gaps) and not (gaps == 1).all():
            largest = int(gaps.max())
            width = next(each for each in _WIDTHS if largest < 256**each)
        dtype = self.values.dtype
        head = json.dumps(
            [
                *(self.name, self.aliases, self.shape),
                "C128" if dtype == torch.complex128 else dtype_name(dtype, self.name),
                *(int(indices[0]), len(indices), width, self.before, self.link),
            ],
            separators=(",", ":"),
            ensure_ascii=False,
        ).encode()
        packed = gaps.astype(f"<u{width}").tobytes() if width else b""
        values = self.values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        body = b"".join((head, packed, values))
        return _START.pack(len(head), zlib.crc32(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Patch:
        """The patch that `to_bytes` packed, on the CPU. Nothing in `data` is executed.

        Raises:
            DeltaError: the bytes are damaged, or no packed patch.
        """
        try:
            length, crc = _START.unpack_from(data)
            body = memoryview(data)[_START.size :]
            if zlib.crc32(body) != crc:
                raise ValueError("the checksum of its bytes differs")
            head = json.loads(bytes(body[:length]))
            name, aliases, shape, dtype_text, first, numel, width, before, given = head
            link = Link(*given)
            dtype = _DTYPES[dtype_text]
            gaps_end = length + width * (numel - 1)
            if len(body) != gaps_end + numel * dtype.itemsize:
                raise ValueError(f"{len(body)} bytes do not hold {numel} elements")
            indices = np.ones(numel, dtype=np.int64)
            if width:
                indices[1:] = np.frombuffer(body[length:gaps_end], dtype=f"<u{width}")
            indices[0] = first
            np.cumsum(indices, out=indices)
            values = torch.frombuffer(bytearray(body[gaps_end:]), dtype=dtype)
            link = link._replace(anchor=tuple(link.anchor))
            whole = tuple(shape), tuple(aliases)
            return cls(name, torch.from_numpy(indices), values, *whole, link, before)
        except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
            raise DeltaError(f"damaged, or no packed patch: {error!r:.300}") from error
