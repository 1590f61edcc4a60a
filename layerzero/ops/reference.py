"""The ops in plain torch: their definition, and the fallback where no native kernel was built.

    pack_           out = cast(compute(source) * scale), or zeros
    ordered_sum_    out = cast((compute(parts[0]) + parts[1] + ...) * scale)

compute is float64 for float64 and float32 for the other dtypes. The result is rounded once to out's
dtype, at the end. (torch casts float64 to a 16-bit dtype through float32, and so do we.) With a
scale of 1 nothing is multiplied. Nothing here blocks the host. Arguments are not
checked, as native kernels check them: here torch's own operations stay inside their tensors.

`Segments` is the table that `pack_` reads, with the source of each element of its output:

    rows (source, source offset, destination offset, numel)     rows [S + 1, 3]
    (0, 0, 0, 5)                                                 0, 0,  0
                                                                -1, 0,  5    a gap: zeros
    (1, 4, 8, 12), of a buffer of 20                             1, 4,  8
                                                                -1, 0, 20    the sentinel

A row ends where the next one begins, so the destinations rise, have no gaps and end at the size of
the buffer. Offsets count elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from layerzero.ops.schema import use_everywhere

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ZEROS = -1
"""Used as a source number: fill the row with zeros."""


@dataclass(frozen=True, eq=False)
class Segments:
    """A checked table, built once for a layout and copied once to each device that uses it."""

    table: torch.Tensor
    """[S + 1, 3] int64 on the CPU."""
    numel: int
    """Number of elements of the buffer."""
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, rows: Iterable[Sequence[int]], numel: int) -> Segments:
        """Check rows (source, source offset, destination offset, numel) and fill the gaps.

        Args:
            rows: in rising order of destination; source `ZEROS` writes zeros. Rows without
                elements are dropped.
            numel: number of elements of the buffer; those that no row covers become zeros.
        """
        table: list[tuple[int, int, int]] = []
        end = 0
        for number, (source, offset, start, count) in enumerate(rows):
            row = number, source, offset, start, count
            assert source >= ZEROS and min(offset, count) >= 0, f"row {row}: a number is negative"
            assert end <= start <= numel - count, f"row {row}: not in [{end}, {numel}]"
            if not count:
                continue
            if start > end:
                table.append((ZEROS, 0, end))
            table.append((source, offset, start))
            end = start + count
        if end < numel:
            table.append((ZEROS, 0, end))
        table.append((ZEROS, 0, numel))
        return cls(torch.tensor(table, dtype=torch.int64, device="cpu"), numel)

    def on(self, device: torch.device) -> torch.Tensor:
        """A copy of the table on `device`; the first call for a device blocks the host."""
        found = self._on_device.get(device)
        if found is None:
            found = self._on_device[device] = self.table.to(device)
        return found


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are scaled and added."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements as integers: [numel], or [numel, 2] for complex128."""
    if tensor.element_size() == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_BITS[tensor.element_size()])


def pack_(
    out: torch.Tensor,
    srcs: Sequence[torch.Tensor],
    segs: torch.Tensor,
    scale: float,
    nt: bool = False,
) -> None:
    """See `layerzero.ops.pack_`. `segs` are on the CPU, whatever the device of the others, so that
    reading them does not block the host. Also moves integers and complex numbers, with scale 1."""
    table = segs.tolist()
    flat = out.detach().view(-1)
    targets: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    zeros: list[torch.Tensor] = []
    sizes = [stop[2] - start[2] for start, stop in itertools.pairwise(table)]
    for target, (index, offset, _) in zip(flat.split_with_sizes(sizes), table, strict=False):
        count = target.numel()
        if not count:
            continue
        if index < 0 or not srcs[index].numel():
            zeros.append(target)
            continue
        source = srcs[index].detach().reshape(-1)
        targets.append(target)
        parts.append(source if count == source.numel() else source[offset : offset + count])
    if zeros:
        torch._foreach_zero_(zeros)
    if not targets:
        return
    if scale == 1.0:
        torch._foreach_copy_(targets, parts)
    else:
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.to(compute_dtype(part.dtype)).mul(scale))


def ordered_sum_(out: torch.Tensor, parts: Sequence[torch.Tensor], scale: float) -> None:
    """See `layerzero.ops.ordered_sum_`."""
    dtype = out.dtype if out.is_complex() else compute_dtype(parts[0].dtype)
    total = parts[0].detach().reshape(-1).to(dtype, copy=True)  # `out` may be one of the parts.
    for part in parts[1:]:
        total.add_(part.detach().reshape(-1))
    if scale != 1.0:
        total.mul_(scale)
    out.detach().view(-1).copy_(total)


for _kernel in (pack_, ordered_sum_):
    use_everywhere(_kernel)
